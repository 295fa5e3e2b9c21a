"""Turns one choice's text into what servers show of it: reasoning, text, and tool calls with their ids."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from msgspec.structs import replace

from router.api.answer.choice_text import TextDelta
from router.api.request.client_request import PreparedRequest
from router.text.reasoning import AnswerPart, Reasoning
from router.text.tool_parsers.events import CallArguments, TextContent, ToolEvent
from router.text.tool_parsers.request_calls import ToolCallReading
from router.text.tools import call_id
from tandem.values.outputs import FinishReason

CALLED = "tool_calls"
"""Finish reason of an answer that is or ends in complete tool calls."""


class TextPiece(NamedTuple):
    """Text outside any tool call."""

    text: str


class ReasoningPiece(NamedTuple):
    """Reasoning that precedes the answer."""

    text: str


class CallPiece(NamedTuple):
    """The start of a tool call, with its id and name; or more of its arguments, without either."""

    call: int
    """Index of the call within the answer."""
    id: str | None
    name: str | None
    arguments: str


Piece: TypeAlias = ReasoningPiece | TextPiece | CallPiece


class AnswerParser(Protocol):
    """Turns one choice's text into pieces. A continued stream is read from its beginning."""

    @property
    def has_open_call(self) -> bool:
        """Whether the last call is incomplete."""

    def read(self, delta: TextDelta) -> list[Piece]:
        """Return the pieces that the client does not have yet."""

    def finish(self, reason: FinishReason) -> str:
        """Return the finish reason that clients see: complete tool calls are a reason of their own."""


class TextAnswerParser:
    """The parser for an answer that is text alone."""

    has_open_call = False

    def read(self, delta: TextDelta) -> list[Piece]:
        return [TextPiece(delta.text)] if delta.text else []

    def finish(self, reason: FinishReason) -> str:
        return reason.value


class CallAnswerParser:
    """The parser for an answer that may call tools."""

    def __init__(self, calling: ToolCallReading, request_id: str, choice_index: int) -> None:
        self._calling = calling
        self._parser = calling.new_parser()
        self._most = None if calling.use.parallel else 1
        self._id = (request_id, choice_index)

    def read(self, delta: TextDelta) -> list[Piece]:
        if delta.passed_text:
            self._parser.feed(delta.passed_text)
        events = self._parser.feed(delta.text)
        if delta.finish is not None:
            events += self._parser.flush()
        return [piece for event in events if (piece := self._piece(event)) is not None]

    @property
    def has_open_call(self) -> bool:
        return self._parser.is_open

    def finish(self, reason: FinishReason) -> str:
        is_calls = reason is FinishReason.STOP and self._parser.num_calls and not self._parser.is_open
        return CALLED if is_calls else reason.value

    def _piece(self, event: ToolEvent) -> Piece | None:
        if isinstance(event, TextContent):
            return TextPiece(event.text)
        if self._most is not None and event.call >= self._most:
            return None
        if isinstance(event, CallArguments):
            return CallPiece(event.call, None, None, event.text)
        made = call_id(*self._id, event.call, is_short=self._calling.has_short_ids)
        return CallPiece(event.call, made, event.name, "")


class ReasoningAnswerParser:
    """The parser for a model that reasons: passes what follows the reasoning to another parser."""

    def __init__(self, reasoning: Reasoning, answer: AnswerParser) -> None:
        self._parser = reasoning.new_parser()
        self._answer = answer

    def read(self, delta: TextDelta) -> list[Piece]:
        passed = self._parser.feed(delta.passed_text) if delta.passed_text else []
        parts = self._parser.feed(delta.text)
        if delta.finish is not None:
            parts += self._parser.flush()
        thought = "".join(part.text for part in parts if part.is_reasoning)
        text, passed_text = _answer_of(parts), _answer_of(passed)
        pieces: list[Piece] = [ReasoningPiece(thought)] if thought else []
        return pieces + self._answer.read(replace(delta, text=text, passed_text=passed_text))

    @property
    def has_open_call(self) -> bool:
        return self._answer.has_open_call

    def finish(self, reason: FinishReason) -> str:
        return self._answer.finish(reason)


def new_answer_parser(prepared: PreparedRequest, choice_index: int) -> AnswerParser:
    """Return the parser of one choice's text, by how its request wants calls and reasoning shown."""
    reader: AnswerParser = TextAnswerParser()
    if prepared.calling is not None:
        reader = CallAnswerParser(prepared.calling, prepared.request.request_id, choice_index)
    return reader if prepared.reasoning is None else ReasoningAnswerParser(prepared.reasoning, reader)


def _answer_of(parts: Sequence[AnswerPart]) -> str:
    return "".join(part.text for part in parts if not part.is_reasoning)
