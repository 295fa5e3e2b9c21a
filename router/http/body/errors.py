"""Formats every error for HTTP as `{"error": {"message", "type", "param", "code"}}`."""

import math
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from tandem.errors import InvalidRequest, ServingError

ErrorShape = Callable[[ServingError], dict[str, Any]]
"""Formats an error as the clients of one API expect it."""


class MethodNotAllowed(InvalidRequest):
    """The path supports other methods."""

    http_status = 405
    allowed = ""
    """Supported methods, for the Allow header."""


def error_object(error: ServingError) -> dict[str, Any]:
    """Format OpenAI's error object; `code` is the error's class in snake case."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.word()}}


def error_response(error: ServingError, shape: ErrorShape = error_object) -> Response:
    """Build the whole answer, with Retry-After where retrying helps."""
    headers = {}
    if error.retry_after_s is not None or error.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if error.http_status in (408, 413):
        # The rest of the body may still be arriving, or never arrive.
        headers["Connection"] = "close"
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allowed
    return _json(shape(error), error.http_status, headers)


def _json(content: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
