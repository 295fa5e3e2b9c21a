"""The lines of a batch's input and of its results. Pure."""

import re
from dataclasses import dataclass
from typing import Any

import orjson

from tandem.errors import InvalidRequest, ServingError

MAX_ID_CHARS = 512
_RESULT_ID = re.compile(rb'\{"id":"batch_req_[0-9a-f]{32}_(\d{1,9})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLine:
    """The request of one input line."""

    custom_id: str
    body: dict[str, Any]


def read_line(data: Any, endpoint: str) -> BatchLine:
    """Check a line's JSON. Raises InvalidRequest that names the field."""
    if not isinstance(data, dict):
        raise InvalidRequest("a line must be a JSON object")
    if unknown := data.keys() - {"custom_id", "method", "url", "body"}:
        raise InvalidRequest(f"{min(unknown)[:100]}: unknown field", param=min(unknown)[:100])
    name, body = data.get("custom_id"), data.get("body")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_ID_CHARS:
        raise InvalidRequest(f"custom_id must have 1 to {MAX_ID_CHARS} characters", param="custom_id")
    if data.get("method") != "POST":
        raise InvalidRequest("method must be POST", param="method")
    if data.get("url") != endpoint:
        raise InvalidRequest(f"url must be the batch's endpoint {endpoint}", param="url")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be an object", param="body")
    return BatchLine(custom_id=name, body=body)


def body_to_run(body: dict[str, Any], lowest_priority: int) -> dict[str, Any]:
    """Return the body as the endpoint receives it. Raises InvalidRequest for what a batch must not contain."""
    if body.get("stream"):
        raise InvalidRequest("stream is not supported in a batch", param="stream")
    if body.get("priority") is not None:
        raise InvalidRequest("priority is not supported in a batch: batches run at the lowest one", param="priority")
    return body | {"priority": lowest_priority}


def answered(batch_id: str, number: int, custom_id: str, status: int, content: bytes) -> bytes:
    """Make the result of a request that was answered, or refused."""
    response = {"status_code": status, "request_id": _id(batch_id, number), "body": orjson.Fragment(content)}
    return _line(batch_id, number, custom_id, response, None)


def not_run(batch_id: str, number: int, custom_id: str, code: str, message: str) -> bytes:
    """Make the result of a request that was never run."""
    return _line(batch_id, number, custom_id, None, {"code": code, "message": message})


def number_of(result: bytes) -> int | None:
    """Return the number of the input line that a result line answers; None when it is not a result line."""
    found = _RESULT_ID.match(result)
    return None if found is None else int(found[1])


def input_error(line: int, error: ServingError) -> dict[str, Any]:
    """Make one of OpenAI's `errors` of a batch; lines count from 1."""
    return {"code": error.word(), "line": line, "message": error.message, "param": error.param}


def _line(batch_id: str, number: int, custom_id: str, response: Any, error: Any) -> bytes:
    shown = {"id": _id(batch_id, number), "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(shown) + b"\n"


def _id(batch_id: str, number: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{number}"
