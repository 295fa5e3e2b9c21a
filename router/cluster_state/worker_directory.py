"""The addresses of workers, from their leased notices in Redis and from the configuration.

Redis is believed when it names a worker, and doubted when it does not: an address is dropped only when notices of it
have been missing for a while, and an open session outlives its address (`WorkerFleet`).
"""

from collections.abc import Iterable

from tandem.cluster_state.entries import Notice
from tandem.rpc.worker_directory import ChangingDirectory, WorkerAddress

MAX_ADDRESSES = 4096


class KnownAddresses:
    """The set of known worker addresses. Pure."""

    def __init__(self, stated: frozenset[WorkerAddress], *, forget_s: float) -> None:
        """`stated`: known as long as it is named here. `forget_s`: how long an address without notices is kept."""
        self.stated = stated
        self._forget_s = forget_s
        self._missing_since_s: dict[WorkerAddress, float | None] = {}

    def on_notices(self, notices: Iterable[Notice], now_s: float) -> frozenset[WorkerAddress]:
        """Process all current notices; return the addresses."""
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
    """A watchable WorkerDirectory of the addresses that Redis and the configuration name."""

    def __init__(self, listing: KnownAddresses) -> None:
        super().__init__(listing.addresses)
        self._listing = listing

    def on_notices(self, notices: Iterable[Notice], now_s: float) -> None:
        """Replace the addresses by those of all notices in Redis."""
        self.replace(self._listing.on_notices(notices, now_s))

    def state(self, addresses: frozenset[WorkerAddress]) -> None:
        """Set the addresses that the configuration names from now on."""
        self._listing.stated = addresses
        self.replace(self._listing.addresses)
