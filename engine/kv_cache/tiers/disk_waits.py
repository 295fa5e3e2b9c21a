"""Requests that wait in the queue for blocks to be read from disk, each for a bounded time. Pure."""

from dataclasses import dataclass

from tandem.values.ids import BlockHash, RequestId


@dataclass(slots=True, kw_only=True)
class _Wait:
    """How long one request still waits for blocks from disk."""

    until_s: float
    outstanding: set[BlockHash]
    is_reported: bool = False
    """The end of the wait has been reported to the sleeping engine."""


class DiskWaits:
    """Who waits for what, and until when; a request waits once between two admissions."""

    __slots__ = ("_waits", "num_late")

    def __init__(self) -> None:
        self.num_late = 0
        """Waits that ended before what was waited for had come."""
        self._waits: dict[RequestId, _Wait] = {}

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether the request waits, or has waited."""
        return request_id in self._waits

    def begin(self, request_id: RequestId, names: set[BlockHash], *, until_s: float) -> None:
        """The request waits for these blocks, and no longer than that."""
        self._waits[request_id] = _Wait(until_s=until_s, outstanding=names)

    def goes_on(self, request_id: RequestId, now: float) -> bool:
        """Whether a request that began to wait waits still; if its time is over it never does again."""
        wait = self._waits[request_id]
        if wait.outstanding and now >= wait.until_s:
            self.num_late += 1
            wait.outstanding.clear()
        return bool(wait.outstanding)

    def landed(self, name: BlockHash) -> None:
        """A block was read, or could not be."""
        for wait in self._waits.values():
            wait.outstanding.discard(name)

    def drop(self, request_id: RequestId) -> None:
        """The request is admitted, or over."""
        self._waits.pop(request_id, None)

    def patience_s(self, now: float) -> float | None:
        """How long until somebody has waited long enough; None when nobody waits.

        An end that has passed is reported once: the request may be behind others that find no room for a long time.
        """
        ends: list[float] = []
        for wait in self._waits.values():
            if wait.outstanding and not wait.is_reported:
                ends.append(wait.until_s)
                wait.is_reported = wait.until_s <= now
        return max(0.0, min(ends) - now) if ends else None
