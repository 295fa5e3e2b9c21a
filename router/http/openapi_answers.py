"""Schemas of what the HTTP door answers, for /openapi.json."""

from typing import Any

ERROR = "#/components/schemas/Error"
_TEXT: dict[str, Any] = {"type": "string"}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_EVENTS: dict[str, dict[str, Any]] = {"text/event-stream": {}}
"""Each event is an object, the end mark of a stream is not: OpenAPI 3.1 has no words for that."""


def _object(required: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **more}}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    common = {"index": _COUNT, "finish_reason": {"enum": ["stop", "length", "tool_calls"]}}
    head = {"id": _TEXT, "object": {"const": kind}, "created": _COUNT, "model": _TEXT}
    choices = _list(_object(common | choice, logprobs=_or_null("object")))
    return _object(head | {"choices": choices, "usage": _ref("Usage")}, timing={"type": "object"})


SCHEMAS: dict[str, Any] = {
    "Error": _object(
        {"error": _object({"message": _TEXT, "type": _TEXT, "param": _or_null("string"), "code": _or_null("string")})}
    ),
    "Usage": _object(
        {
            "prompt_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "total_tokens": _COUNT,
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
        }
    ),
    "Model": _object(
        {"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT, "max_model_len": _COUNT}
    ),
    "ChatCompletion": _answer(
        "chat.completion",
        {"message": _object({"role": {"const": "assistant"}, "content": _or_null("string")}, tool_calls=_list({}))},
    ),
    "Completion": _answer("text_completion", {"text": _TEXT}),
    "Response": _object(
        {
            "id": _TEXT,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "status": {"enum": ["completed", "incomplete"]},
            "model": _TEXT,
            "output": _list(_object({"id": _TEXT, "type": {"enum": ["message", "function_call"]}, "status": _TEXT})),
            "usage": _object({"input_tokens": _COUNT, "output_tokens": _COUNT, "total_tokens": _COUNT}),
        },
        timing={"type": "object"},
    ),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_COUNT),
            "token_strs": {"anyOf": [_list(_TEXT), {"type": "null"}]},
        }
    ),
}
"""By name."""

ANSWERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"application/json": _ref("ChatCompletion"), **_EVENTS},
    "/v1/completions": {"application/json": _ref("Completion"), **_EVENTS},
    "/v1/responses": {"application/json": _ref("Response"), **_EVENTS},
    "/v1/messages": {"application/json": _object({"id": _TEXT, "type": {"const": "message"}}), **_EVENTS},
    "/v1/messages/count_tokens": {"application/json": _object({"input_tokens": _COUNT})},
    "/v1/embeddings": {"application/json": _object({"object": {"const": "list"}, "data": _list({"type": "object"})})},
    "/v1/usage": {"application/json": {"type": "object"}},
    "/v1/models": {"application/json": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))})},
    "/v1/models/*": {"application/json": _ref("Model")},
    "/tokenize": {"application/json": _ref("Tokens")},
    "/detokenize": {"application/json": _object({"prompt": _TEXT})},
    "/v1/files": {"application/json": _object({"object": {"enum": ["list", "file"]}})},
    "/v1/batches": {"application/json": _object({"object": {"enum": ["list", "batch"]}})},
    "/v1/batches/*": {"application/json": _object({"id": _TEXT, "object": {"const": "batch"}, "status": _TEXT})},
    "/debug/decisions": {
        "application/json": _object({"object": {"const": "list"}, "kept": _COUNT, "data": _list({"type": "object"})})
    },
    "/status/snapshot": {"application/json": {"type": "object"}},
    "/status/events": _EVENTS,
    "/health": {"application/json": _object({"status": _TEXT})},
    "/readyz": {"application/json": _object({"status": _TEXT})},
    "/version": {"application/json": _object({"version": _TEXT})},
    "/metrics": {"text/plain": _TEXT},
    "/openapi.json": {"application/json": {"type": "object"}},
}
"""By route: what stands in an answer with status 200, by its media type. Of a route that is not here anything may."""
