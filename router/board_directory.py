"""Where the workers are, as the board tells: their leased notices, beside what the configuration states.

Redis is believed when it tells of a worker, and doubted when it tells of none: an address is forgotten only when
notices of it have been missing for a while, and a session that is up outlives its address (`WorkerFleet`).
"""

import asyncio
from collections.abc import AsyncIterator, Iterable

from tandem.board.entries import Notice
from tandem.registry import WorkerAddress

MAX_ADDRESSES = 4096


class WorkerListing:
    """Which addresses there are. Pure."""

    def __init__(self, stated: frozenset[WorkerAddress], *, forget_s: float) -> None:
        """`stated`: always there. `forget_s`: how long an address is kept that nobody tells of."""
        self._stated = stated
        self._forget_s = forget_s
        self._missing_since_s: dict[WorkerAddress, float | None] = {}

    def told(self, notices: Iterable[Notice], now_s: float) -> frozenset[WorkerAddress]:
        """All notices that are there now; returns the addresses."""
        present = {WorkerAddress(role=notice.role, address=notice.address) for notice in notices}
        known = self._missing_since_s
        for address in present:
            if address in known or len(known) < MAX_ADDRESSES:
                known[address] = None
        for address in known.keys() - present:
            since_s = known[address]
            if since_s is None:
                known[address] = now_s
            elif now_s - since_s >= self._forget_s:
                del known[address]
        return self.addresses

    @property
    def addresses(self) -> frozenset[WorkerAddress]:
        """Stated and told."""
        return self._stated | self._missing_since_s.keys()


class RedisDirectory:
    """A WorkerDirectory that is told of changes; one may watch it."""

    def __init__(self, listing: WorkerListing) -> None:
        self._listing = listing
        self._addresses = listing.addresses
        self._changed = asyncio.Event()

    def told(self, notices: Iterable[Notice], now_s: float) -> None:
        """All notices that are on the board."""
        addresses = self._listing.told(notices, now_s)
        if addresses != self._addresses:
            self._addresses = addresses
            self._changed.set()

    async def watch(self) -> AsyncIterator[frozenset[WorkerAddress]]:
        """The whole set now and again after each change; never ends."""
        while True:
            self._changed.clear()
            yield self._addresses
            await self._changed.wait()
