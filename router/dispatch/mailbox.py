"""The queue of one client request's events, from worker sessions to the client's connection.

Writers never wait. The bound is in tokens: a client that reads too slowly overflows its own mailbox, whose content is
then replaced by one `Overflowed`, and no other request is slowed down.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from router.types.session_events import AttemptEvent, TokensArrived


@dataclass(frozen=True, slots=True, kw_only=True)
class FromWorker:
    """An event of one attempt at one choice."""

    choice_index: int
    attempt: int
    event: AttemptEvent
    is_twin: bool = False
    """Of the second of two runs of the choice (`router.dispatch.hedge_run`), which the first token decides between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeDue:
    """A choice has waited for its first token for longer than is usual."""

    choice_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopChoice:
    """The server found a stop string: the choice ends here."""

    choice_index: int


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The request's time is up."""


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """A worker joined or left."""


@dataclass(frozen=True, slots=True)
class RejoinOver:
    """The time is up in which a lost worker may be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomAvailable:
    """A choice that waits for room may try the workers again."""

    choice_index: int


@dataclass(frozen=True, slots=True)
class Recheck:
    """Tokens handled outside the mailbox ended the choice, failed it, or made it wait."""


@dataclass(frozen=True, slots=True)
class Overflowed:
    """More tokens were waiting than the mailbox holds."""


@dataclass(frozen=True, slots=True)
class Superseded:
    """The client has continued this stream on another connection."""


Mail = (
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
"""Mail that ends the request, so that it goes before tokens the client has not read."""


class Mailbox:
    """A FIFO queue with many writers and one reader."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._mail: deque[Mail] = deque()
        self._num_tokens = 0
        self._overflowed = False
        self._arrived = asyncio.Event()
        self._urgent: asyncio.Event | None = None

    def post(self, mail: Mail) -> None:
        """Append mail; after an overflow it is dropped."""
        if self._overflowed:
            return
        self._num_tokens += _count_tokens(mail)
        if self._num_tokens > self._max_tokens:
            self._overflowed = True
            self._mail.clear()
            mail = Overflowed()
        self._mail.append(mail)
        self._arrived.set()
        if isinstance(mail, _URGENT) and self._urgent is not None:
            self._urgent.set()

    async def arrival(self) -> None:
        """Wait until there is mail."""
        while not self._mail:
            self._arrived.clear()
            await self._arrived.wait()

    async def urgent_or(self, waiting: Coroutine[Any, Any, None]) -> None:
        """Return when `waiting` does, or when there is mail that ends the request, which then comes first.

        Raises what `waiting` raises.
        """
        self._urgent = urgent = asyncio.Event()
        if any(isinstance(mail, _URGENT) for mail in self._mail):
            urgent.set()
        tasks = (asyncio.ensure_future(waiting), asyncio.ensure_future(urgent.wait()))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
            else:
                self._mail = deque(sorted(self._mail, key=lambda mail: not isinstance(mail, _URGENT)))
        finally:
            self._urgent = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def next_mail(self) -> Mail:
        """The oldest mail, which there must be."""
        mail = self._mail.popleft()
        self._num_tokens -= _count_tokens(mail)
        return mail

    @property
    def is_empty(self) -> bool:
        """Whether there is no mail."""
        return not self._mail

    @property
    def overflowed(self) -> bool:
        """Whether mail was dropped because the client reads too slowly."""
        return self._overflowed


def _count_tokens(mail: Mail) -> int:
    if isinstance(mail, FromWorker) and isinstance(mail.event, TokensArrived):
        return len(mail.event.tokens)
    return 0
