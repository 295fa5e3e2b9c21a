"""Every error as HTTP shows it: `{"error": {"message", "type", "param", "code"}}`, whatever raised it."""

import math
from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from tandem.errors import InvalidRequest, ServingError

ErrorShape = Callable[[ServingError], dict[str, Any]]
"""How clients of one API expect an error."""


class MethodNotAllowed(InvalidRequest):
    """The path has other methods."""

    http_status = 405
    allowed = ""
    """Its methods, for the header Allow."""


def error_object(error: ServingError) -> dict[str, Any]:
    """OpenAI's error object; `code` is the error's class in snake case."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.word()}}


def error_response(error: ServingError, shape: ErrorShape = error_object) -> Response:
    """The whole answer, with Retry-After where coming back helps."""
    headers = {}
    if error.retry_after_s is not None or error.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if error.http_status in (408, 413):
        # The rest of the body may still be coming, or never.
        headers["Connection"] = "close"
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = error.allowed
    return _json(shape(error), error.http_status, headers)


def _json(content: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
