// Before the page is drawn, so that it never flashes in the other theme.
try {
  const kept = localStorage.getItem("tandem-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
} catch {
  // Storage is closed: the system's choice stands.
}
