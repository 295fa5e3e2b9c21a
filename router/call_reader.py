"""One choice of an answer, from its text to what doors show of it: text, and calls with their ids."""

from typing import NamedTuple, TypeAlias

from router.calling import Calling
from router.text_stream import TextDelta
from router.tool_parsers.events import CallArguments, Content, ToolEvent
from router.tools import call_id
from tandem.outputs import FinishReason

CALLED = "tool_calls"
"""Why an answer ended that is or ends in calls, all of them whole."""


class TextPiece(NamedTuple):
    """Text that belongs to no call."""

    text: str


class CallPiece(NamedTuple):
    """A call that began: its id and name; or more of its arguments, without either."""

    call: int
    """Its number within the answer."""
    id: str | None
    name: str | None
    arguments: str


Piece: TypeAlias = TextPiece | CallPiece


class CallReader:
    """One choice of an answer: from its text to pieces. A stream that is continued is read from its beginning."""

    def __init__(self, calling: Calling, request_id: str, choice_index: int) -> None:
        self._calling = calling
        self._parser = calling.new_parser()
        self._most = None if calling.use.parallel else 1
        self._id = (request_id, choice_index)

    def read(self, delta: TextDelta) -> list[Piece]:
        """What the client does not have yet."""
        if delta.passed_text:
            self._parser.feed(delta.passed_text)
        events = self._parser.feed(delta.text)
        if delta.finish is not None:
            events += self._parser.flush()
        return [piece for event in events if (piece := self._piece(event)) is not None]

    @property
    def has_open_call(self) -> bool:
        """Whether the last call is not whole."""
        return self._parser.is_open

    def finish(self, reason: FinishReason) -> str:
        """Why it ended, as doors say it: calls that are whole are a reason of their own."""
        is_calls = reason is FinishReason.STOP and self._parser.num_calls and not self._parser.is_open
        return CALLED if is_calls else reason.value

    def _piece(self, event: ToolEvent) -> Piece | None:
        if isinstance(event, Content):
            return TextPiece(event.text)
        if self._most is not None and event.call >= self._most:
            return None
        if isinstance(event, CallArguments):
            return CallPiece(event.call, None, None, event.text)
        made = call_id(*self._id, event.call, is_short=self._calling.has_short_ids)
        return CallPiece(event.call, made, event.name, "")
