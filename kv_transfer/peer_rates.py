"""How fast KV comes from each peer, as far as anything has come. Pure."""

from collections import OrderedDict

_WEIGHT = 1 / 16
"""Of the newest chunk: old news fades within some tens of chunks."""
_MAX_PEERS = 1024


class FadingRate:
    """Bytes per second, from averages of bytes and of seconds that fade exponentially."""

    __slots__ = ("_num_bytes", "_seconds")

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """So many bytes took so long; a time of 0 is an unknown one, and says nothing."""
        if seconds > 0.0:
            self._num_bytes += _WEIGHT * (num_bytes - self._num_bytes)
            self._seconds += _WEIGHT * (seconds - self._seconds)

    @property
    def bytes_per_s(self) -> float:
        """0 before anything was observed."""
        return self._num_bytes / self._seconds if self._seconds > 0.0 else 0.0


class PeerRates:
    """By peer; from one that sent nothing yet as much is expected as its transport has done with others."""

    def __init__(self) -> None:
        self._by_transport: dict[str, FadingRate] = {}
        # The last to have sent is the last to be forgotten.
        self._by_peer: OrderedDict[str, FadingRate] = OrderedDict()
        self._overall = FadingRate()

    def observe(self, peer: str, transport: str, num_bytes: int, seconds: float) -> None:
        """One chunk came from `peer`, which is known by its address."""
        rate = self._by_peer.setdefault(peer, FadingRate())
        self._by_peer.move_to_end(peer)
        if len(self._by_peer) > _MAX_PEERS:
            self._by_peer.popitem(last=False)
        for each in (rate, self._by_transport.setdefault(transport, FadingRate()), self._overall):
            each.observe(num_bytes, seconds)

    def bytes_per_s(self, peer: str, transport: str = "") -> float:
        """From this peer; else of its transport; else, when that is not known either, of all; 0 before any came."""
        own = self._by_peer.get(peer)
        if own is not None and own.bytes_per_s:
            return own.bytes_per_s
        if not transport:
            return self._overall.bytes_per_s
        through = self._by_transport.get(transport)
        return 0.0 if through is None else through.bytes_per_s
