"""Schemas of what the HTTP door answers, for /openapi.json."""

from typing import Any

from router.http.openapi.events import CHUNKS, FINISH_REASONS, LOGPROBS, STREAMS
from router.http.openapi.json_schema import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    TEXT,
    Schema,
    exactly,
    list_of,
    object_of,
    one_of,
    or_null,
    ref,
)
from router.http.openapi.stored import STORED

_JSON, _FILE = "application/json", "application/jsonl"
_ERROR_STATUS = {"type": "integer", "minimum": 400, "maximum": 599}


def _answer(kind: str, choice: dict[str, Schema], **more: Schema) -> Schema:
    common = {"index": COUNT, "finish_reason": one_of(*FINISH_REASONS)}
    head = {"id": TEXT, "object": one_of(kind), "created": COUNT, "model": TEXT}
    choices = list_of(object_of(common | choice, logprobs=LOGPROBS))
    return object_of(head | {"choices": choices, "usage": ref("Usage")}, timing=ANY_OBJECT, **more)


def _item(kind: str, required: dict[str, Schema]) -> Schema:
    states = one_of("in_progress", "completed", "incomplete")
    return exactly({"id": TEXT, "type": one_of(kind), "status": states} | required)


_THOUGHT = exactly({"type": one_of("thinking"), "thinking": TEXT, "signature": TEXT})
_BY_TOOL = exactly({"type": one_of("tool_use"), "id": TEXT, "name": TEXT, "input": ANY_OBJECT})
_CALL = exactly({"id": TEXT, "type": one_of("function"), "function": exactly({"name": TEXT, "arguments": TEXT})})
SCHEMAS: dict[str, Schema] = {
    "Error": exactly(
        {"error": exactly({"message": TEXT, "type": TEXT, "param": or_null(TEXT), "code": or_null(TEXT)})}
    ),
    "AnthropicError": exactly({"type": one_of("error"), "error": exactly({"type": TEXT, "message": TEXT})}),
    "GoogleError": exactly({"error": exactly({"code": _ERROR_STATUS, "message": TEXT, "status": TEXT})}),
    "Usage": object_of(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
            "completion_tokens_details": object_of({"reasoning_tokens": COUNT}),
        }
    ),
    "Model": object_of(
        {"id": TEXT, "object": one_of("model"), "created": COUNT, "owned_by": TEXT, "max_model_len": COUNT},
        has_chat_template=FLAG,
        default_sampling_params=ANY_OBJECT,
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        {
            "message": exactly(
                {"role": one_of("assistant"), "content": or_null(TEXT), "refusal": {"type": "null"}},
                reasoning_content=TEXT,
                tool_calls=list_of(_CALL),
                function_call=exactly({"name": TEXT, "arguments": TEXT}),
            )
        },
    ),
    "Completion": _answer("text_completion", {"text": TEXT}),
    "OutputText": exactly(
        {"type": one_of("output_text"), "text": TEXT, "annotations": list_of({}), "logprobs": list_of(ANY_OBJECT)}
    ),
    "ReasoningText": exactly({"type": one_of("reasoning_text"), "text": TEXT}),
    "OutputItem": {
        "anyOf": [
            _item("message", {"role": one_of("assistant"), "content": list_of(ref("OutputText"))}),
            _item("reasoning", {"summary": list_of({}), "content": list_of(ref("ReasoningText"))}),
            _item("function_call", {"call_id": TEXT, "name": TEXT, "arguments": TEXT}),
        ]
    },
    "ResponseUsage": object_of(
        {
            "input_tokens": COUNT,
            "input_tokens_details": object_of({"cached_tokens": COUNT}),
            "output_tokens": COUNT,
            "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
            "total_tokens": COUNT,
        }
    ),
    "Response": object_of(
        {
            "id": TEXT,
            "object": one_of("response"),
            "created_at": COUNT,
            "status": one_of("in_progress", "completed", "incomplete", "failed"),
            "model": TEXT,
            "output": list_of(ref("OutputItem")),
            "usage": {"anyOf": [ref("ResponseUsage"), {"type": "null"}]},
        },
        timing=ANY_OBJECT,
    ),
    "ContentBlock": {"anyOf": [exactly({"type": one_of("text"), "text": TEXT}), _THOUGHT, _BY_TOOL]},
    "MessageUsage": object_of(
        {
            "input_tokens": COUNT,
            "cache_creation_input_tokens": COUNT,
            "cache_read_input_tokens": COUNT,
            "output_tokens": COUNT,
        }
    ),
    "Message": object_of(
        {
            "id": TEXT,
            "type": one_of("message"),
            "role": one_of("assistant"),
            "model": TEXT,
            "content": list_of(ref("ContentBlock")),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", None]},
            "stop_sequence": or_null(TEXT),
            "usage": ref("MessageUsage"),
        }
    ),
    "Tokens": object_of(
        {
            "count": COUNT,
            "max_model_len": COUNT,
            "tokens": list_of(COUNT),
            "token_strs": {"anyOf": [list_of(TEXT), {"type": "null"}]},
        }
    ),
    **CHUNKS,
    **STORED,
}
"""By name."""
_VECTORS = object_of({"object": one_of("list"), "data": list_of(ANY_OBJECT), "model": TEXT, "usage": ANY_OBJECT})
_LISTED: dict[str, Schema] = {"object": one_of("list"), "data": list_of(ANY_OBJECT)}

_OBJECTS: dict[str, Schema] = {
    "POST /v1/chat/completions": ref("ChatCompletion"),
    "POST /v1/completions": ref("Completion"),
    "POST /v1/responses": ref("Response"),
    "POST /v1/messages": ref("Message"),
    "POST /v1/messages/count_tokens": object_of({"input_tokens": COUNT}),
    "POST /v1/embeddings": _VECTORS,
    "GET /v1/usage": object_of({"object": one_of("usage"), "data": list_of(ANY_OBJECT), "total": ANY_OBJECT}),
    "GET /v1/models": object_of({"object": one_of("list"), "data": list_of(ref("Model"))}),
    "GET /v1/models/{model}": ref("Model"),
    "POST /tokenize": ref("Tokens"),
    "POST /detokenize": object_of({"prompt": TEXT}),
    "POST /v1/files": ref("File"),
    "GET /v1/files": ref("FilePage"),
    "GET /v1/files/{file_id}": ref("File"),
    "DELETE /v1/files/{file_id}": ref("DeletedFile"),
    "POST /v1/batches": ref("Batch"),
    "GET /v1/batches": ref("BatchPage"),
    "GET /v1/batches/{batch_id}": ref("Batch"),
    "POST /v1/batches/{batch_id}/cancel": ref("Batch"),
    "POST /v1beta/cachedContents": ref("CachedContent"),
    "GET /v1beta/cachedContents": ref("CachedContentPage"),
    "GET /v1beta/cachedContents/{id}": ref("CachedContent"),
    "PATCH /v1beta/cachedContents/{id}": ref("CachedContent"),
    "DELETE /v1beta/cachedContents/{id}": ref("Nothing"),
    "GET /debug/decisions": object_of(_LISTED | {"kept": COUNT}),
    "GET /debug/pins": object_of(_LISTED),
    "GET /status/snapshot": ref("Status"),
    "GET /health": object_of({"status": TEXT}),
    "GET /readyz": object_of({"status": TEXT}),
    "GET /version": object_of({"version": TEXT}),
    "GET /openapi.json": ANY_OBJECT,
}
_OTHERS: dict[str, dict[str, Any]] = {
    "GET /metrics": {"text/plain": {"schema": TEXT}},
    "POST /debug/profile/router": {
        _JSON: {"schema": ANY_OBJECT},
        "text/plain": {"schema": TEXT},
        "image/svg+xml": {"schema": TEXT},
    },
    "POST /debug/profile/worker": {"application/gzip": {"schema": {"type": "string", "format": "binary"}}},
    # Lines, each of them JSON.
    "GET /v1/files/{file_id}/content": {_FILE: {"schema": {"type": "string", "contentMediaType": _FILE}}},
}


def answer_of(operation: str) -> dict[str, Any]:
    """What stands in an answer with status 200 to `METHOD path`, by media type. Nothing: anything may."""
    found = dict(_OTHERS.get(operation, {}))
    if operation in _OBJECTS:
        found[_JSON] = {"schema": _OBJECTS[operation]}
    return found | STREAMS.get(operation, {})
