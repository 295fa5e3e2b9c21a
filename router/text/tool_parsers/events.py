"""Events of a parsed answer: text, and calls of tools."""

from typing import NamedTuple, Protocol, TypeAlias


class TextContent(NamedTuple):
    """Text outside any call."""

    text: str


class CallBegan(NamedTuple):
    """The start of a call of an offered tool; the arguments follow."""

    call: int
    """Index of the call within the answer."""
    name: str


class CallArguments(NamedTuple):
    """More of the arguments' JSON."""

    call: int
    text: str


ToolEvent: TypeAlias = TextContent | CallBegan | CallArguments


class ToolParser(Protocol):
    """Parses one answer as it grows.

    What it has reported after some text depends on that text alone, never on how it was split: a stream that continues
    elsewhere is parsed again from its beginning.
    """

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""

    @property
    def is_open(self) -> bool:
        """Whether the last call has begun and not ended."""

    def feed(self, text: str) -> list[ToolEvent]:
        """Return the events of more text."""

    def flush(self) -> list[ToolEvent]:
        """Return the events of what was held back: the answer has ended."""


class EventList:
    """Collects events, merging each with the last one if it continues it."""

    def __init__(self) -> None:
        self._events: list[ToolEvent] = []
        self._parts: list[str] = []
        self._index: int | None = None
        """Index of the call whose arguments the parts are; None: they are content."""

    def content(self, text: str) -> None:
        self._part(None, text)

    def began(self, index: int, name: str) -> None:
        self._close()
        self._events.append(CallBegan(index, name))

    def arguments(self, index: int, text: str) -> None:
        """Add more of a call's arguments."""
        self._part(index, text)

    def drain(self) -> list[ToolEvent]:
        """Return all events since the last call."""
        self._close()
        events, self._events = self._events, []
        return events

    def _part(self, index: int | None, text: str) -> None:
        if not text:
            return
        if index != self._index:
            self._close()
            self._index = index
        self._parts.append(text)

    def _close(self) -> None:
        if self._parts:
            text = "".join(self._parts)
            self._events.append(TextContent(text) if self._index is None else CallArguments(self._index, text))
            self._parts.clear()
