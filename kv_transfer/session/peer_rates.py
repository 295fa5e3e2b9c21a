"""Estimates the transfer rate of each peer from the chunks received. Pure.

Estimates lose weight with time: a peer's drifts towards its transport's, and that towards a prior. A peer that was slow
once is therefore tried again, although its rate is measured only when it is used.
"""

from collections import OrderedDict

from tandem.values.ids import Incarnation

PRIOR_BYTES_PER_S = 1e9
"""Prior rate of a link over which nothing has come yet; its first chunk replaces it."""
_WEIGHT = 1 / 16
"""Weight of the newest chunk; older ones fade over a few dozen chunks."""
_LONGEST = 8.0
"""Cap on a chunk's time, as a multiple of the expected time: one stall counts little, several in a row fully."""
_HALF_LIFE_S = 30.0
"""Half-life of the confidence in a measurement."""
_MAX_PEERS = 1024


class FadingRate:
    """Bytes per second, from averages of bytes and of seconds that fade exponentially."""

    __slots__ = ("_num_bytes", "_seconds")

    def __init__(self) -> None:
        self._num_bytes = 0.0
        self._seconds = 0.0

    def observe(self, num_bytes: int, seconds: float, expected: float = 0.0) -> None:
        """Record `num_bytes` moved in `seconds`; a time of 0 is unknown and ignored.

        `expected`: bytes per second to assume while nothing has been observed; 0 if unknown.
        """
        if seconds <= 0.0:
            return
        if rate := self.bytes_per_s or expected:
            seconds = min(seconds, _LONGEST * max(num_bytes, self._num_bytes) / rate)
        self._num_bytes += _WEIGHT * (num_bytes - self._num_bytes)
        self._seconds += _WEIGHT * (seconds - self._seconds)

    def correct(self, bytes_per_s: float) -> None:
        """Replace the observed rate, if there is one, by this one."""
        if self._num_bytes:
            self._seconds = self._num_bytes / bytes_per_s

    @property
    def bytes_per_s(self) -> float:
        """0 before anything was observed."""
        return self._num_bytes / self._seconds if self._seconds > 0.0 else 0.0


class _Estimate:
    """A rate and when it was measured."""

    __slots__ = ("incarnation", "rate", "requested_s", "seen_s", "transport")

    def __init__(self, transport: str = "", incarnation: Incarnation | None = None) -> None:
        self.transport = transport
        self.incarnation = incarnation
        self.rate = FadingRate()
        self.seen_s = 0.0
        self.requested_s = 0.0

    def after(self, idle_s: float, otherwise: float) -> float:
        """The rate after `idle_s` seconds without measurements; `otherwise`: that of similar links, 0 if unknown."""
        own = self.rate.bytes_per_s
        if not own:
            return otherwise
        # Rates are wrong by factors: their logarithms are mixed.
        trust = 0.5 ** (max(0.0, idle_s) / _HALF_LIFE_S)
        return float(own**trust * (otherwise or PRIOR_BYTES_PER_S) ** (1.0 - trust))

    def observe(self, num_bytes: int, seconds: float, now: float, otherwise: float) -> None:
        before = self.after(now - self.seen_s, otherwise)
        if before:
            self.rate.correct(before)
        self.rate.observe(num_bytes, seconds, before)
        self.seen_s = now


class PeerRates:
    """Rates by peer, identified by address and incarnation; all times are on one monotonic clock."""

    def __init__(self) -> None:
        self._by_transport: dict[str, _Estimate] = {}
        # Ordered by the latest chunk: the peer that was silent longest is evicted first.
        self._by_peer: OrderedDict[str, _Estimate] = OrderedDict()
        self._overall = _Estimate()

    def observe(
        self, peer: str, incarnation: Incarnation, transport: str, *, num_bytes: int, seconds: float, now: float
    ) -> None:
        """Record one chunk from `peer`, an address."""
        if seconds <= 0.0:
            return
        own = self._by_peer.get(peer)
        if own is None or (own.incarnation, own.transport) != (incarnation, transport):
            own = self._by_peer[peer] = _Estimate(transport, incarnation)
        self._by_peer.move_to_end(peer)
        if len(self._by_peer) > _MAX_PEERS:
            self._by_peer.popitem(last=False)
        own.observe(num_bytes, seconds, now, self._transport_rate(transport, now))
        self._by_transport.setdefault(transport, _Estimate()).observe(num_bytes, seconds, now, 0.0)
        self._overall.observe(num_bytes, seconds, now, 0.0)

    def on_request(self, peer: str, incarnation: Incarnation, now: float) -> None:
        """Restore confidence in a peer's measured rate, so that a slow one is not tried by many requests at once."""
        own = self._by_peer.get(peer)
        if own is not None and own.incarnation == incarnation:
            own.requested_s = now

    def bytes_per_s(self, peer: str, incarnation: Incarnation, transport: str = "", *, now: float) -> float:
        """Rate of this peer, or of its transport, or of all peers, whichever is known; 0 before any chunk came."""
        own = self._by_peer.get(peer)
        if own is None or own.incarnation != incarnation:
            return self._transport_rate(transport, now)
        return own.after(now - max(own.seen_s, own.requested_s), self._transport_rate(own.transport, now))

    def _transport_rate(self, transport: str, now: float) -> float:
        through = self._by_transport.get(transport) if transport else self._overall
        return 0.0 if through is None else through.after(now - through.seen_s, 0.0)
