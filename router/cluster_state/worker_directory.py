"""Where the workers are, as the board tells: their leased notices, beside what the configuration states.

Redis is believed when it tells of a worker, and doubted when it tells of none: an address is forgotten only when
notices of it have been missing for a while, and a session that is up outlives its address (`WorkerFleet`).
"""

from collections.abc import Iterable

from tandem.cluster_state.entries import Notice
from tandem.rpc.worker_directory import ChangingDirectory, WorkerAddress

MAX_ADDRESSES = 4096


class KnownAddresses:
    """Which addresses there are. Pure."""

    def __init__(self, stated: frozenset[WorkerAddress], *, forget_s: float) -> None:
        """`stated`: there as long as it is named here. `forget_s`: how long an address is kept that nobody tells of."""
        self.stated = stated
        self._forget_s = forget_s
        self._missing_since_s: dict[WorkerAddress, float | None] = {}

    def on_notices(self, notices: Iterable[Notice], now_s: float) -> frozenset[WorkerAddress]:
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
        return self.stated | self._missing_since_s.keys()


class RedisDirectory(ChangingDirectory):
    """A WorkerDirectory of what Redis and the configuration name; one may watch it."""

    def __init__(self, listing: KnownAddresses) -> None:
        super().__init__(listing.addresses)
        self._listing = listing

    def on_notices(self, notices: Iterable[Notice], now_s: float) -> None:
        """Replace the addresses by those of all notices in Redis."""
        self.replace(self._listing.on_notices(notices, now_s))

    def state(self, addresses: frozenset[WorkerAddress]) -> None:
        """The configuration names these from now on."""
        self._listing.stated = addresses
        self.replace(self._listing.addresses)
