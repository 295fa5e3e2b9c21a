"""The page in a browser tab, and what the tab complained of."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from playwright.async_api import Browser, Page, expect

expect.set_options(timeout=30_000)
DESK, PHONE = (1440, 900), (390, 844)
_OVERFLOWING = """(figures) => {
  const tiles = [...document.querySelectorAll(".tile .figure")];
  figures.forEach(([value, unit], i) => {
    tiles[i].firstChild.textContent = value;
    tiles[i].lastChild.textContent = unit;
  });
  return [...document.querySelectorAll(".tile, .tile *, .chart-head *, .facts, .worker > *, .rows > li")]
    .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline")
    .map((one) => `${one.className}: ${one.textContent}`);
}"""


class Tab:
    """One page, with every message that its console had."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.messages: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))

    async def open(self, url: str) -> None:
        await self.page.goto(url)

    async def is_live(self) -> None:
        await expect(self.page.locator("#link")).to_have_attribute("data-state", "live")

    async def ask(self, prompt: str) -> None:
        await self.page.fill("#prompt", "")
        await self.page.type("#prompt", prompt)
        await self.page.click("#send")

    async def fits(self) -> bool:
        """Whether nothing sticks out sideways."""
        return bool(await self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))

    async def overflowing(self, figures: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Text that sticks out of its card. `figures`: put into the tiles before, and no update takes them back."""
        found = await self.page.evaluate(_OVERFLOWING, list(figures))
        return [str(one) for one in found]

    async def violations(self) -> list[str]:
        """What axe finds against WCAG 2.2 AA and its best practices."""
        script = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
        await self.page.evaluate(script)
        found: dict[str, Any] = await self.page.evaluate("() => axe.run()")
        assert len(found["passes"]) > 15, "axe looked at nothing"
        return [
            f"{one['id']}: {node['target']} {node['failureSummary']}"
            for one in found["violations"]
            for node in one["nodes"]
        ]


@asynccontextmanager
async def tab(
    browser: Browser, size: tuple[int, int] = DESK, scheme: str = "light", **options: Any
) -> AsyncIterator[Tab]:
    width, height = size
    context = await browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce", **options
    )
    yield Tab(await context.new_page())
    await context.close()
