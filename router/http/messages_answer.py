"""Anthropic's shape of an answer, whole or as events."""

from typing import Any

import orjson

from router.asked import Prepared
from router.http.error_shapes import anthropic_error
from router.http.sse import EventStream
from router.text_stream import TextDelta
from tandem.errors import ServingError
from tandem.outputs import FinishReason


def event(content: dict[str, Any]) -> bytes:
    """One event: its type is said twice."""
    kind: str = content["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(content) + b"\n\n"


def error_event(error: ServingError) -> bytes:
    """What ends a stream that has begun."""
    return event(anthropic_error(error))


class MessagesUsage:
    """Tokens, as Anthropic divides them: read from the cache, written to it because a mark asked for it, others."""

    def __init__(self, prepared: Prepared) -> None:
        request = prepared.request
        self._prompt_tokens = len(request.prompt_token_ids)
        self._marked = {
            ttl: max((pin.num_tokens for pin in request.pins if (pin.ttl_s > 300.0) is is_long), default=0)
            for ttl, is_long in (("5m", False), ("1h", True))
        }
        self.cached_tokens = 0
        self.output_tokens = 0

    def add(self, delta: TextDelta) -> None:
        """Count one delta."""
        self.output_tokens += len(delta.tokens)
        if delta.finish is not None:
            self.cached_tokens = delta.finish.cached_tokens
        elif delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens

    def shown(self) -> dict[str, Any]:
        """The usage object."""
        read = self.cached_tokens
        # What both marks cover is written once, for the longer time.
        long = max(0, self._marked["1h"] - read)
        short = max(0, self._marked["5m"] - max(read, self._marked["1h"]))
        return {
            "input_tokens": self._prompt_tokens - read - long - short,
            "cache_creation_input_tokens": long + short,
            "cache_read_input_tokens": read,
            "cache_creation": {"ephemeral_5m_input_tokens": short, "ephemeral_1h_input_tokens": long},
            "output_tokens": self.output_tokens,
        }


def whole_message(prepared: Prepared, model: str, choice: TextDelta) -> dict[str, Any]:
    """The answer in one piece."""
    usage = MessagesUsage(prepared)
    usage.add(choice)
    return {
        **_head(prepared, model),
        "content": [{"type": "text", "text": choice.text}],
        **_ending(choice),
        "usage": usage.shown(),
    }


class MessageStream:
    """A `TextReader` that writes events."""

    def __init__(self, events: EventStream, prepared: Prepared, model: str) -> None:
        self._events = events
        self._prepared = prepared
        self._model = model
        self._usage = MessagesUsage(prepared)
        self._begun = False

    async def ready(self) -> None:
        """See TextReader."""
        await self._events.ready()

    def take(self, delta: TextDelta) -> bool:
        """See TextReader."""
        parts = []
        self._usage.add(delta)
        if not self._begun:
            self._begun = True
            parts += self._opening()
        if delta.text:
            text = {"type": "text_delta", "text": delta.text}
            parts.append(event({"type": "content_block_delta", "index": 0, "delta": text}))
        if delta.finish is not None:
            parts += self._closing(delta)
        return bool(parts) and self._events.write(b"".join(parts))

    def _opening(self) -> list[bytes]:
        message: dict[str, Any] = _head(self._prepared, self._model)
        message |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage.shown()}
        block = {"type": "text", "text": ""}
        return [
            event({"type": "message_start", "message": message}),
            event({"type": "content_block_start", "index": 0, "content_block": block}),
            event({"type": "ping"}),
        ]

    def _closing(self, delta: TextDelta) -> list[bytes]:
        return [
            event({"type": "content_block_stop", "index": 0}),
            event({"type": "message_delta", "delta": _ending(delta), "usage": self._usage.shown()}),
            event({"type": "message_stop"}),
        ]


def _head(prepared: Prepared, model: str) -> dict[str, Any]:
    return {"id": f"msg_{prepared.request.request_id}", "type": "message", "role": "assistant", "model": model}


def _ending(delta: TextDelta) -> dict[str, Any]:
    reason = "end_turn"
    if delta.finish is not None and delta.finish.reason is FinishReason.LENGTH:
        reason = "max_tokens"
    stopped_by = delta.stopped_by if isinstance(delta.stopped_by, str) else None
    return {"stop_reason": "stop_sequence" if stopped_by else reason, "stop_sequence": stopped_by}
