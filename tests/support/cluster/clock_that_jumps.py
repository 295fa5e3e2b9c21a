"""An event loop whose clock can be set forward, as after a time in which its process stood still."""

import asyncio


class ClockThatJumps(asyncio.SelectorEventLoop):
    """Give it to `asyncio.Runner` as its loop factory."""

    away_s = 0.0

    def time(self) -> float:
        """Seconds, those that the process was away among them."""
        return super().time() + self.away_s
