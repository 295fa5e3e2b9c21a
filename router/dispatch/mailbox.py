"""The queue of one client request's events, from worker sessions to the client's connection.

Writers never wait. The bound is in tokens: a client that reads too slowly overflows only its own mailbox, whose content
is then replaced by one `Overflowed`.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from typing import Any

from msgspec import Struct

from router.types.session_events import AttemptEvent, TokensArrived


class FromWorker(Struct, frozen=True, kw_only=True):
    """An event of one attempt at one choice."""

    choice_index: int
    attempt: int
    event: AttemptEvent
    is_twin: bool = False
    """Whether it came from the twin of a hedged choice (`router.dispatch.hedge_run`), before the first token
    decides."""


class HedgeDue(Struct, frozen=True, kw_only=True):
    """A choice has waited for its first token for longer than is usual."""

    choice_index: int


class StopChoice(Struct, frozen=True, kw_only=True):
    """The server found a stop string: the choice ends here."""

    choice_index: int


class DeadlinePassed(Struct, frozen=True):
    """The request's deadline has passed."""


class WorkersChanged(Struct, frozen=True):
    """A worker joined or left."""


class RejoinOver(Struct, frozen=True):
    """The time within which a lost worker may be replaced is over."""


class RoomAvailable(Struct, frozen=True, kw_only=True):
    """A choice that waits for room may try the workers again."""

    choice_index: int


class Recheck(Struct, frozen=True):
    """Tokens handled outside the mailbox ended the choice, failed it, or made it wait."""


class Overflowed(Struct, frozen=True):
    """More tokens were waiting than the mailbox can hold."""


class Superseded(Struct, frozen=True):
    """The client has continued this stream on another connection."""


Message = (
    FromWorker
    | StopChoice
    | DeadlinePassed
    | WorkersChanged
    | RejoinOver
    | RoomAvailable
    | HedgeDue
    | Recheck
    | Overflowed
    | Superseded
)

_URGENT = (DeadlinePassed, Overflowed, Superseded)
"""Messages that end the request, so that it goes before tokens the client has not read."""


class Mailbox:
    """A FIFO queue with many writers and one reader."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.messages: deque[Message] = deque()
        """Oldest first."""
        self._num_tokens = 0
        self._overflowed = False
        self._arrived: asyncio.Future[None] | None = None
        """What `arrival` waits for. A future, because an event takes several calls more for each request."""
        self._urgent: asyncio.Event | None = None

    def post(self, message: Message) -> None:
        """Append a message; after an overflow it is dropped."""
        if self._overflowed:
            return
        if type(message) is FromWorker and type(message.event) is TokensArrived:
            self._num_tokens += len(message.event.tokens)
            if self._num_tokens > self._max_tokens:
                self._overflowed = True
                self.messages.clear()
                message = Overflowed()
        self.messages.append(message)
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)
        if isinstance(message, _URGENT) and self._urgent is not None:
            self._urgent.set()

    async def arrival(self) -> None:
        """Wait until there is a message."""
        while not self.messages:
            self._arrived = asyncio.get_running_loop().create_future()
            await self._arrived

    async def wait_unless_urgent(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Return when `waiting` does, or when there is a message that ends the request, which then comes first.

        Raises what `waiting` raises.
        """
        self._urgent = urgent = asyncio.Event()
        if any(isinstance(message, _URGENT) for message in self.messages):
            urgent.set()
        tasks = (asyncio.ensure_future(waiting), asyncio.ensure_future(urgent.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            else:
                ordered = sorted(self.messages, key=lambda message: not isinstance(message, _URGENT))
                self.messages.clear()
                self.messages.extend(ordered)
        finally:
            self._urgent = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def next_message(self) -> Message:
        """Return the oldest message, which must exist."""
        message = self.messages.popleft()
        if type(message) is FromWorker and type(message.event) is TokensArrived:
            self._num_tokens -= len(message.event.tokens)
        return message

    @property
    def overflowed(self) -> bool:
        """Whether messages were dropped because the client reads too slowly."""
        return self._overflowed
