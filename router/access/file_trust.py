"""How far what was read of a file may still be relied on. Pure: `router.access.watched_files` reports what it finds."""

QUIET_S = 10.0
"""A look that takes longer is taken for one that hangs."""
_HANGS = f"looking at it takes longer than {QUIET_S:g} s"


class FileTrust:
    """Of one file, or of some that belong together, from the moment when it was first read."""

    def __init__(self, now: float, *, trust_s: float | None = None) -> None:
        """`trust_s`: for so long what was read is good while the file cannot be read; None: for ever."""
        self._trust_s = trust_s
        self._read_at = self._in_force_at = now
        self._is_refused = False
        self._problem: str | None = None

    @property
    def is_readable(self) -> bool:
        """Whether the last look could read it."""
        return self._problem is None

    def on_taken(self, now: float) -> None:
        """What it says applies from now on."""
        self._is_refused = False
        self.on_unchanged(now)

    def on_refused(self, now: float) -> None:
        """It can be read and makes no sense: what was read before applies."""
        self._is_refused = True
        self.on_unchanged(now)

    def on_unchanged(self, now: float) -> None:
        """It could be read, or need not be: it is what it was."""
        self._problem, self._read_at = None, now
        if not self._is_refused:
            self._in_force_at = now

    def on_unreadable(self, problem: str) -> bool:
        """Nobody can say what is in it. Whether that is news."""
        is_news, self._problem = problem != self._problem, problem
        return is_news

    def on_waiting(self, now: float) -> str | None:
        """A look has not ended yet; what is wrong, once, when it takes too long."""
        if now - self._read_at < QUIET_S or self._problem is not None:
            return None
        self._problem = _HANGS
        return self._problem

    def stale_s(self, now: float) -> float:
        """For how long what applies has not been known to be what the file says; 0 while it is."""
        return now - self._in_force_at if self._is_refused or self._problem is not None else 0.0

    def distrust(self, now: float) -> str | None:
        """Why what was read is not to be relied on any more, if so: nothing shows what the file says by now."""
        silent_s = now - self._read_at
        if self._trust_s is None or silent_s < self._trust_s:
            return None
        return f"not read for {silent_s:.0f} s"
