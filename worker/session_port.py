"""The bounded queue of a worker's messages to one router."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tandem.protocol.session_versions import LOAD_PERIOD_S, MOST_LOAD_PERIOD_S, SPOKEN, worker_dialect
from tandem.protocol.version_negotiation import Dialect
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation

MAX_QUEUED_MESSAGES = 16_384
PIECE_EVENTS = 4_096
"""Blocks of a snapshot in one message. A router applies them in some milliseconds and goes on with other work; all of a
large cache in one would halt its streams, or exceed what it reads as one message."""

_log = logging.getLogger(__name__)


def orders_of(message: pb.RouterMessage) -> Sequence[pb.RouterMessage]:
    """The orders in a message, one by one."""
    return message.orders.orders if message.HasField("orders") else (message,)


def snapshot_pieces(next_event: int, stored: Sequence[pb.KVEvent]) -> Iterator[pb.KVEvents]:
    """A snapshot, then changes numbered so that the last of them ends before `next_event`.

    The first piece is larger where there are fewer numbers before that: blocks that were on disk at start have none.
    """
    end = max(PIECE_EVENTS, len(stored) - next_event)
    yield pb.KVEvents(first_sequence=next_event - len(stored[end:]), cleared=True, events=stored[:end])
    for begin in range(end, len(stored), PIECE_EVENTS):
        first = next_event - (len(stored) - begin)
        yield pb.KVEvents(first_sequence=first, events=stored[begin : begin + PIECE_EVENTS])


class EventSink(Protocol):
    """Receiver of a worker's prefix cache: first all of it, then its changes."""

    def send_snapshot(self, next_event: int, stored: Sequence[pb.KVEvent]) -> None:
        """Send the whole prefix cache; later events count from `next_event`."""
        ...

    def send_events(self, first: int, events: Sequence[pb.KVEvent]) -> bool:
        """Send changes numbered from `first`. Returns False when some are missing: a snapshot must follow."""
        ...


class SessionPort:
    """Queue of messages to one router."""

    def __init__(
        self,
        router: Incarnation,
        *,
        wants_events: bool = True,
        dialect: Dialect | None = None,
        load_period_s: float = LOAD_PERIOD_S,
    ) -> None:
        """`wants_events`: whether the router needs cache events. `dialect`: the kinds of message that it knows.

        `load_period_s`: the period of load reports that it asks for; one that is out of bounds, 0 included, is
        replaced by the nearest.
        """
        self.router = router
        # This order, so that NaN becomes the least.
        self.load_period_s = min(MOST_LOAD_PERIOD_S, max(LOAD_PERIOD_S, load_period_s))
        self.dialect = dialect or worker_dialect(SPOKEN.newest)
        self.wants_events = wants_events
        self.closed = False
        self._finished = False
        self._queue: deque[pb.WorkerMessage] = deque()
        self._wake = asyncio.Event()
        self._on_change: Callable[[], None] = self._wake.set
        self._closed = asyncio.Event()
        self._next_event: int | None = None

    def send(self, message: pb.WorkerMessage) -> None:
        """Queue a message; dropped once the port is closed, and when the router is too old to know its kind."""
        if self.closed or self._finished or not self.dialect.has(message.WhichOneof("kind")):
            return
        if len(self._queue) >= MAX_QUEUED_MESSAGES:
            _log.warning("router %x reads too slowly: closing its session", self.router)
            self.close()
            return
        self._queue.append(message)
        self._on_change()

    def finish(self) -> None:
        """End the session after the queued messages; later ones are dropped."""
        self._finished = True
        self._on_change()

    def close(self) -> None:
        """Drop what is queued and end the session."""
        self.closed = True
        self._queue.clear()
        self._closed.set()
        self._on_change()

    def attach(self, on_change: Callable[[], None]) -> None:
        """Have `on_change` called whenever there is something to `pop`, or the port ends, in place of `next`."""
        self._on_change = on_change

    @property
    def finished(self) -> bool:
        """Whether nothing more will be queued."""
        return self._finished

    def pop(self) -> pb.WorkerMessage | None:
        """The next message to write, if there is one."""
        return self._queue.popleft() if self._queue else None

    async def wait_closed(self) -> None:
        await self._closed.wait()

    def send_snapshot(self, next_event: int, stored: Sequence[pb.KVEvent]) -> None:
        """Send the whole prefix cache; later events count from `next_event`."""
        self._next_event = next_event
        for events in snapshot_pieces(next_event, stored):
            self.send(pb.WorkerMessage(kv_events=events))

    def send_events(self, first: int, events: Sequence[pb.KVEvent]) -> bool:
        """Send changes numbered from `first`, except those in the snapshot. Returns False when some are missing."""
        if self._next_event is None:
            return True  # a snapshot is on its way and will include these
        if first > self._next_event:
            return False
        fresh = events[self._next_event - first :]
        if fresh:
            message = pb.KVEvents(first_sequence=self._next_event, events=fresh)
            self._next_event += len(fresh)
            self.send(pb.WorkerMessage(kv_events=message))
        return True

    async def next(self) -> pb.WorkerMessage | None:
        """The next message to write; None when the port is closed, or finished and empty."""
        while not self._queue and not self.closed and not self._finished:
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft() if self._queue and not self.closed else None
