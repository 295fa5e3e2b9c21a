"""Streams of a GPU that is not there: work happens at once, but a stream is done only when what it waits for is.

They follow the rules of torch.cuda's: `wait_stream` and `wait_event` order what is asked for later, `synchronize` waits
for all that was asked for. A stream that sleeps is an engine's with a long step on it.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class EngineAsleep(AssertionError):
    """Somebody waits for a stream that will not wake while they do."""


class FakeStream:
    """`log` has what was done to it, or asked of it, in order."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.is_asleep = False
        self.log: list[str] = []
        self.events: list[FakeEvent] = []
        self._behind: list[FakeStream] = []

    def wait_stream(self, other: "FakeStream") -> None:
        self._behind.append(other)

    def synchronize(self) -> None:
        self.log.append("synchronized")
        if self.is_held_up():
            raise EngineAsleep

    def record_event(self) -> "FakeEvent":
        self.events.append(FakeEvent())
        return self.events[-1]

    def is_held_up(self) -> bool:
        return self.is_asleep or any(stream.is_held_up() for stream in self._behind)


class FakeEvent:
    """Has happened once `happen` was called."""

    def __init__(self) -> None:
        self._happened = threading.Event()
        self.happen = self._happened.set
        self.query = self._happened.is_set

    def synchronize(self) -> None:
        self._happened.wait()


class FakeCuda:
    """What of torch.cuda a pool uses."""

    def __init__(self) -> None:
        self.engine = FakeStream()
        self.made: list[FakeStream] = []
        self._current = threading.local()

    def Stream(self, _device: Any, *, priority: int = 0) -> FakeStream:
        self.made.append(FakeStream(priority))
        return self.made[-1]

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def current_stream(self, _device: Any = None) -> FakeStream:
        found: FakeStream = getattr(self._current, "stream", self.engine)
        return found

    def default_stream(self, _device: Any = None) -> FakeStream:
        return self.engine
