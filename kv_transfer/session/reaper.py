"""The reaper: ends leases on its own timer, so that a full pool or an idle scheduler still gets cleaned up."""

import asyncio
from collections.abc import Callable

from kv_transfer.protocol.leases import LeaseClock


class Reaper:
    """Calls `sweep(now)` every `period_s` until stopped."""

    def __init__(self, sweep: Callable[[float], None], *, period_s: float, clock: Callable[[], float]) -> None:
        self._sweep = sweep
        self._period_s = period_s
        self._clock = clock
        # A tick later than this was delayed by this process, not by a peer.
        self._lease_clock = LeaseClock(clock(), max_step_s=2 * period_s)
        self._stopped = asyncio.Event()

    def now(self) -> float:
        """Lease time: see LeaseClock."""
        return self._lease_clock.read(self._clock())

    async def run(self) -> None:
        while not self._stopped.is_set():
            try:
                async with asyncio.timeout(self._period_s):
                    await self._stopped.wait()
            except TimeoutError:
                self._sweep(self._lease_clock.tick(self._clock()))

    def stop(self) -> None:
        self._stopped.set()
