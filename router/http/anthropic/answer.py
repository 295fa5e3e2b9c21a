"""Anthropic's format of an answer, whole or as events."""

from typing import Any

import orjson

from router.api.answer.call_reader import CALLED, AnswerParser, CallPiece, Piece, TextPiece, new_answer_parser
from router.api.answer.choice_text import TextDelta, TextSink
from router.api.request.client_request import PreparedRequest
from router.http.body.error_formats import anthropic_error
from router.http.body.sse import EventStream, event
from tandem.errors import ServingError
from tandem.values.outputs import FinishReason

_NO_TEXT = {"type": "text", "text": ""}
_NO_THOUGHT = {"type": "thinking", "thinking": "", "signature": ""}
"""Reasoning is unsigned: its content is not verified when it comes back."""


def typed_event(content: dict[str, Any]) -> bytes:
    """Format one event; its type is in the event line and in the data."""
    return event(content, kind=content["type"])


def error_event(error: ServingError) -> bytes:
    """Format the event that ends a stream after an error."""
    return typed_event(anthropic_error(error))


class MessagesUsage:
    """Token counts as Anthropic divides them: read from the cache, written to it because of a breakpoint, others."""

    def __init__(self, prepared: PreparedRequest) -> None:
        request = prepared.request
        self._prompt_tokens = len(request.prompt_token_ids)
        self._marked = {
            ttl: max((pin.num_tokens for pin in request.pins if (pin.ttl_s > 300.0) is is_long), default=0)
            for ttl, is_long in (("5m", False), ("1h", True))
        }
        self.cached_tokens = 0
        self.output_tokens = 0

    def add(self, delta: TextDelta) -> None:
        self.output_tokens += len(delta.tokens)
        if delta.finish is not None:
            self.cached_tokens = delta.finish.cached_tokens
        elif delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens

    def to_json(self) -> dict[str, Any]:
        read = self.cached_tokens
        # What both breakpoints cover is written once, for the longer time.
        long = max(0, self._marked["1h"] - read)
        short = max(0, self._marked["5m"] - max(read, self._marked["1h"]))
        return {
            "input_tokens": self._prompt_tokens - read - long - short,
            "cache_creation_input_tokens": long + short,
            "cache_read_input_tokens": read,
            "cache_creation": {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": long},
            "output_tokens": self.output_tokens,
        }


def _ending(reader: AnswerParser, delta: TextDelta) -> dict[str, Any]:
    """Return Anthropic's stop reason and stop sequence."""
    stopped_by = delta.stopped_by if isinstance(delta.stopped_by, str) else None
    reason = FinishReason.STOP if delta.finish is None else delta.finish.reason
    if reason is FinishReason.LENGTH:
        shown = "max_tokens"
    elif reader.finish(reason) == CALLED:
        shown = "tool_use"
    else:
        shown = "stop_sequence" if stopped_by else "end_turn"
    return {"stop_reason": shown, "stop_sequence": stopped_by if shown == "stop_sequence" else None}


def whole_message(prepared: PreparedRequest, model: str, choice: TextDelta) -> dict[str, Any]:
    """Build an unstreamed answer."""
    usage, reader = MessagesUsage(prepared), new_answer_parser(prepared, 0)
    usage.add(choice)
    blocks: list[dict[str, Any]] = []
    arguments: list[str] = []
    for piece in reader.read(choice):
        if isinstance(piece, CallPiece):
            if piece.id is not None:
                blocks.append({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
                arguments = []
            arguments.append(piece.arguments)
            blocks[-1]["input"] = _parsed("".join(arguments)) or {}
            continue
        block = _NO_TEXT if isinstance(piece, TextPiece) else _NO_THOUGHT
        if not blocks or blocks[-1]["type"] != block["type"]:
            blocks.append(dict(block))
        blocks[-1][block["type"]] += piece.text
    return {
        **_head(prepared, model),
        "content": blocks or [_NO_TEXT],
        **_ending(reader, choice),
        "usage": usage.to_json(),
    }


class MessageStream(TextSink):
    """A `TextSink` that writes Anthropic's events."""

    def __init__(self, events: EventStream, prepared: PreparedRequest, model: str) -> None:
        self._events = events
        self._prepared = prepared
        self._model = model
        self._usage = MessagesUsage(prepared)
        self._reader = new_answer_parser(prepared, 0)
        self._has_begun = False
        self._index = -1
        self._kind = ""
        """Type of the open content block."""

    async def ready(self) -> None:
        await self._events.ready()

    def on_delta(self, delta: TextDelta) -> bool:
        self._usage.add(delta)
        parts = [] if self._has_begun else self._opening()
        self._has_begun = True
        for piece in self._reader.read(delta):
            parts += self._piece(piece)
        if delta.finish is not None:
            parts += self._closing(delta)
        return bool(parts) and self._events.write(b"".join(parts))

    def _opening(self) -> list[bytes]:
        message: dict[str, Any] = _head(self._prepared, self._model)
        message |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage.to_json()}
        return [typed_event({"type": "message_start", "message": message}), typed_event({"type": "ping"})]

    def _piece(self, piece: Piece) -> list[bytes]:
        if not isinstance(piece, CallPiece):
            block = _NO_TEXT if isinstance(piece, TextPiece) else _NO_THOUGHT
            kind = block["type"]
            begun = [] if self._kind == kind else self._block(block)
            return [*begun, self._delta({"type": f"{kind}_delta", kind: piece.text})]
        begun = []
        if piece.id is not None:
            begun = self._block({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        if not piece.arguments:
            return begun
        return [*begun, self._delta({"type": "input_json_delta", "partial_json": piece.arguments})]

    def _block(self, block: dict[str, Any]) -> list[bytes]:
        """Begin the next block, ending the one before it."""
        ended = self._end_block()
        self._index += 1
        self._kind = block["type"]
        return [*ended, typed_event({"type": "content_block_start", "index": self._index, "content_block": block})]

    def _end_block(self) -> list[bytes]:
        return [] if self._index < 0 else [typed_event({"type": "content_block_stop", "index": self._index})]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return typed_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _closing(self, delta: TextDelta) -> list[bytes]:
        return [
            *([] if self._index >= 0 else self._block(_NO_TEXT)),
            *self._end_block(),
            typed_event(
                {"type": "message_delta", "delta": _ending(self._reader, delta), "usage": self._usage.to_json()}
            ),
            typed_event({"type": "message_stop"}),
        ]


def _head(prepared: PreparedRequest, model: str) -> dict[str, Any]:
    return {"id": f"msg_{prepared.request.request_id}", "type": "message", "role": "assistant", "model": model}


def _parsed(arguments: str) -> dict[str, Any] | None:
    """Parse a call's arguments; None if they were cut short."""
    try:
        value = orjson.loads(arguments or b"{}")
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
