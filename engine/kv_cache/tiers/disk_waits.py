"""Requests that wait in the queue for blocks to be read from disk, each for a bounded time. Pure."""

from dataclasses import dataclass

from tandem.values.ids import BlockHash, RequestId


@dataclass(slots=True, kw_only=True)
class _Wait:
    """One request's wait for blocks from disk."""

    until_s: float
    outstanding: set[BlockHash]
    is_reported: bool = False
    """True when the end of the wait has been reported to the sleeping engine."""


class DiskWaits:
    """Requests' waits, by id: for which blocks, and until when. A request waits at most once between two admissions."""

    __slots__ = ("_waits", "num_late")

    def __init__(self) -> None:
        self.num_late = 0
        """Waits that ran out of time before all blocks had been read."""
        self._waits: dict[RequestId, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether the request waits, or has waited."""
        return request_id in self._waits

    def begin(self, request_id: RequestId, names: set[BlockHash], *, until_s: float) -> None:
        """Begin a request's wait for these blocks, until `until_s` at most."""
        self._waits[request_id] = _Wait(until_s=until_s, outstanding=names)

    def check_wait(self, request_id: RequestId, now: float) -> bool:
        """Return whether a request that began to wait still waits; end its wait when its time is over, for good."""
        wait = self._waits[request_id]
        if wait.outstanding and now >= wait.until_s:
            self.num_late += 1
            wait.outstanding.clear()
        return bool(wait.outstanding)

    def landed(self, name: BlockHash) -> None:
        """Record that the read of a block has ended, successfully or not."""
        for wait in self._waits.values():
            wait.outstanding.discard(name)

    def drop(self, request_id: RequestId) -> None:
        """Forget a request that is admitted or over."""
        self._waits.pop(request_id, None)

    def patience_s(self, now: float) -> float | None:
        """Seconds until the first wait runs out of time; None when no request waits.

        A time that has passed is reported once: the request may be queued behind others for a long time.
        """
        ends: list[float] = []
        for wait in self._waits.values():
            if wait.outstanding and not wait.is_reported:
                ends.append(wait.until_s)
                wait.is_reported = wait.until_s <= now
        return max(0.0, min(ends) - now) if ends else None
