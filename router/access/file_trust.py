"""Limits the time for which content read from a file is trusted after the file became unreadable. Pure:
`router.access.watched_files` reports what it finds."""

QUIET_S = 10.0
"""A check that takes longer is assumed to hang."""
_HANGS = f"checking it takes longer than {QUIET_S:g} s"


class FileTrust:
    """Trust in one file, or in several that belong together, from the moment of the first successful read."""

    def __init__(self, now: float, *, trust_s: float | None = None) -> None:
        """`trust_s`: how long the content stays in force while the file cannot be read; None: for ever."""
        self._trust_s = trust_s
        self._read_at = self._in_force_at = now
        self._is_refused = False
        self._problem: str | None = None

    @property
    def is_readable(self) -> bool:
        """Whether the last check could read the file."""
        return self._problem is None

    def on_taken(self, now: float) -> None:
        """The content was read and applied."""
        self._is_refused = False
        self.on_unchanged(now)

    def on_refused(self, now: float) -> None:
        """The file can be read but its content is invalid: the previous content stays in force."""
        self._is_refused = True
        self.on_unchanged(now)

    def on_unchanged(self, now: float) -> None:
        """The file was readable, or did not need to be read: it has not changed."""
        self._problem, self._read_at = None, now
        if not self._is_refused:
            self._in_force_at = now

    def on_unreadable(self, problem: str) -> bool:
        """The file cannot be read, so its content is unknown. Returns whether the problem is new."""
        is_news, self._problem = problem != self._problem, problem
        return is_news

    def on_waiting(self, now: float) -> str | None:
        """A check has not finished yet. Returns the problem, once, when it takes too long."""
        if now - self._read_at < QUIET_S or self._problem is not None:
            return None
        self._problem = _HANGS
        return self._problem

    def stale_s(self, now: float) -> float:
        """Seconds for which the content in force could not be verified against the file; 0 while it can be."""
        return now - self._in_force_at if self._is_refused or self._problem is not None else 0.0

    def distrust_reason(self, now: float) -> str | None:
        """Return why the content may no longer be relied on; None while it may."""
        silent_s = now - self._read_at
        if self._trust_s is None or silent_s < self._trust_s:
            return None
        return f"not read for {silent_s:.0f} s"
