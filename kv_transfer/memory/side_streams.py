"""Streams of a GPU for a pool's work, besides the engine's, and sends on one of them. Imports no torch."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kv_transfer.layout.runs import Runs
from kv_transfer.memory.device_pool import SendUnderWay

MAX_STREAMS = 8
"""Maximum number of streams of one pool. torch has 32 of high priority per GPU, which NCCL's links use as well."""
_HIGH_PRIORITY = -1


class SideStreams:
    """Streams of one device besides the engine's, which they do not wait for; each is used by one thread at a time.

    They have high priority: a copy of a few megabytes starts as soon as the step's current kernels leave it room.
    """

    def __init__(self, cuda: Any, device: Any, *, max_streams: int = MAX_STREAMS) -> None:
        """`cuda`: the module torch.cuda."""
        self._cuda = cuda
        self._device = device
        self._free: list[Any] = []
        self._num_unmade = max_streams
        self._changed = threading.Condition()

    def acquire(self) -> Any:
        """A stream that nobody uses; waits for one when all are in use."""
        with self._changed:
            while not (self._free or self._num_unmade):
                self._changed.wait()
            if not self._free:
                stream = self._cuda.Stream(self._device, priority=_HIGH_PRIORITY)
                self._num_unmade -= 1
                return stream
            # The one used last: torch's allocator keeps separate memory for each stream.
            return self._free.pop()

    def release(self, stream: Any) -> None:
        """Let others use a stream."""
        with self._changed:
            self._free.append(stream)
            self._changed.notify()

    def current(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which a stream is the thread's current one."""
        context: AbstractContextManager[Any] = self._cuda.stream(stream)
        return context


class StreamLane:
    """See SendLane. It has one stream while sends are under way."""

    def __init__(
        self,
        streams: SideStreams | None,
        *,
        start: Callable[[Runs, Runs, Any], Callable[[], int] | None],
        send: Callable[[Runs, Runs], int],
    ) -> None:
        """`start` issues a send on a stream, and returns what returns its sum afterwards, or None when it has issued
        nothing: then `send` sends, and waits, as it does without `streams`.
        """
        self._streams = streams
        self._start = start
        self._send = send
        self._stream: Any = None
        self._num_under_way = 0

    def start(self, reads: Runs, writes: Runs) -> SendUnderWay:
        started = None if self._streams is None else self._issue(self._streams, reads, writes)
        return started or _Sent(self._send(reads, writes))

    def _issue(self, streams: SideStreams, reads: Runs, writes: Runs) -> "_StreamSend | None":
        if self._stream is None:
            self._stream = streams.acquire()
        stream, total = self._stream, None
        self._num_under_way += 1
        try:
            total = self._start(reads, writes, stream)
        finally:
            if total is None:
                self._leave(streams)
        return None if total is None else _StreamSend(stream.record_event(), total, lambda: self._leave(streams))

    def _leave(self, streams: SideStreams) -> None:
        self._num_under_way -= 1
        if not self._num_under_way:
            streams.release(self._stream)
            self._stream = None


class _StreamSend:
    def __init__(self, end: Any, total: Callable[[], int], leave: Callable[[], None]) -> None:
        self._end = end
        self._total = total
        self._leave = leave

    def done(self) -> bool:
        found: bool = self._end.query()
        return found

    def result(self) -> int:
        try:
            if not self.done():  # asking keeps the GIL, which takes long to get back from a busy engine
                self._end.synchronize()
        finally:
            self._leave()
        return self._total()


class _Sent:
    def __init__(self, total: int) -> None:
        self._total = total

    def done(self) -> bool:
        return True

    def result(self) -> int:
        return self._total
