"""Schemas of what the door streams: of each event what stands in `event` and `data`, which is JSON in a text.

OpenAPI has had words for that since 3.2: `itemSchema`. The end mark of OpenAI's streams is an event without JSON.
"""

from router.http.openapi.json_schema import (
    COUNT,
    FLAG,
    TEXT,
    Schema,
    any_of,
    exactly,
    list_of,
    object_of,
    one_of,
    or_null,
    ref,
)

FINISH_REASONS = ("stop", "length", "tool_calls", "function_call")
LOGPROBS: Schema = {"type": ["object", "null"]}
_STREAM = "text/event-stream"
_NULL: Schema = {"type": "null"}


def _event(data: Schema, *names: str) -> Schema:
    """One event; `names`: what its `event` may be, where it has one."""
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": data}
    if names:
        return object_of({"event": one_of(*names), "data": text})
    return object_of({"data": text}, id=TEXT)


_DONE = object_of({"data": one_of("[DONE]")})


def _stream(*events: Schema) -> Schema:
    return {_STREAM: {"itemSchema": any_of(*events)}}


def _typed(kind: str, required: dict[str, Schema], **more: Schema) -> Schema:
    """Says its type in `event` and again in `data`."""
    return _event(object_of({"type": one_of(kind)} | required, **more), kind)


_CALLED = object_of({"arguments": TEXT}, name=TEXT)
_DELTA = exactly(
    {},
    role=one_of("assistant"),
    content=or_null(TEXT),
    reasoning_content=TEXT,
    tool_calls=list_of(object_of({"index": COUNT, "function": _CALLED})),
    function_call=_CALLED,
)


def _chunk(kind: str, choice: Schema, **more: Schema) -> Schema:
    choices = object_of(
        {"index": COUNT, "logprobs": LOGPROBS, "finish_reason": {"enum": [*FINISH_REASONS, None]}} | choice,
        stop_reason={"type": ["string", "integer", "null"]},
        token_ids=list_of(COUNT),
    )
    return object_of(
        {"id": TEXT, "object": one_of(kind), "created": COUNT, "model": TEXT, "choices": list_of(choices)},
        usage={"anyOf": [ref("Usage"), _NULL]},
        timing={"type": "object"},
        **more,
    )


CHUNKS: dict[str, Schema] = {
    "ChatCompletionChunk": _chunk("chat.completion.chunk", {"delta": _DELTA}, prompt_token_ids=list_of(COUNT)),
    "CompletionChunk": _chunk("text_completion", {"text": TEXT}),
    "Status": object_of(
        {
            "model": object_of({"name": TEXT, "max_model_len": COUNT}, has_chat_template=FLAG),
            "processes": {"type": "integer", "minimum": 1},
            "not_ready": or_null(TEXT),
            "requests": {"type": "object", "additionalProperties": COUNT},
            "queue": object_of({"requests": COUNT, "tokens": COUNT, "oldest_s": {"type": "number", "minimum": 0}}),
            "pools": list_of(object_of({"role": one_of("prefill", "decode"), "workers": list_of({"type": "object"})})),
            "handoffs": object_of({"in_flight": COUNT, "shown": list_of({"type": "object"})}),
            "prefixes": list_of({"type": "object"}),
            "recent": {"type": "object"},
            "curves": {"type": "object"},
            "decisions": list_of({"type": "object"}),
        }
    ),
}
"""What stands in the data of events, by name."""

_PLACE = {"item_id": TEXT, "output_index": COUNT}
_IN_PART = {**_PLACE, "content_index": COUNT}
_ITEM = {"output_index": COUNT, "item": ref("OutputItem")}
_PART: Schema = {"anyOf": [ref("OutputText"), ref("ReasoningText")]}
_NUMBERED = {"sequence_number": COUNT}


def _told(kind: str, required: dict[str, Schema]) -> Schema:
    return _typed(f"response.{kind}", required | _NUMBERED)


_RESPONSE_EVENTS = (
    *(_told(kind, {"response": ref("Response")}) for kind in ("created", "in_progress", "completed", "incomplete")),
    _told("failed", {"response": ref("Response")}),
    _told("output_item.added", _ITEM),
    _told("output_item.done", _ITEM),
    _told("content_part.added", _IN_PART | {"part": _PART}),
    _told("content_part.done", _IN_PART | {"part": _PART}),
    _told("reasoning_text.delta", _IN_PART | {"delta": TEXT}),
    _told("reasoning_text.done", _IN_PART | {"text": TEXT}),
    _told("output_text.delta", _IN_PART | {"delta": TEXT, "logprobs": list_of({"type": "object"})}),
    _told("output_text.done", _IN_PART | {"text": TEXT, "logprobs": list_of({"type": "object"})}),
    _told("function_call_arguments.delta", _PLACE | {"delta": TEXT}),
    _told("function_call_arguments.done", _PLACE | {"name": TEXT, "arguments": TEXT}),
)
_BLOCK = {"index": COUNT}
_ENDING = exactly({"stop_reason": TEXT, "stop_sequence": or_null(TEXT)})
_BLOCK_DELTA = any_of(
    exactly({"type": one_of("text_delta"), "text": TEXT}),
    exactly({"type": one_of("thinking_delta"), "thinking": TEXT}),
    exactly({"type": one_of("input_json_delta"), "partial_json": TEXT}),
)
_MESSAGE_EVENTS = (
    _typed("message_start", {"message": ref("Message")}),
    _typed("ping", {}),
    _typed("content_block_start", _BLOCK | {"content_block": ref("ContentBlock")}),
    _typed("content_block_delta", _BLOCK | {"delta": _BLOCK_DELTA}),
    _typed("content_block_stop", _BLOCK),
    _typed("message_delta", {"delta": _ENDING, "usage": ref("MessageUsage")}),
    _typed("message_stop", {}),
    _event(ref("AnthropicError"), "error"),
)
_OPENAI_ENDS = (_event(ref("Error")), _DONE)

STREAMS: dict[str, Schema] = {
    "POST /v1/chat/completions": _stream(_event(ref("ChatCompletionChunk")), *_OPENAI_ENDS),
    "POST /v1/completions": _stream(_event(ref("CompletionChunk")), *_OPENAI_ENDS),
    "POST /v1/responses": _stream(*_RESPONSE_EVENTS),
    "POST /v1/messages": _stream(*_MESSAGE_EVENTS),
    "GET /status/events": _stream(_event(ref("Status")), *_OPENAI_ENDS),
}
"""By method and path: the media type of a stream, with its events."""
