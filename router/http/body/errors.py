"""Every error as HTTP shows it: `{"error": {"message", "type", "param", "code"}}`, whatever raised it."""

import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import orjson
from starlette.responses import Response

from tandem.errors import ServingError

ErrorShape = Callable[[ServingError], dict[str, Any]]
"""How clients of one API expect an error."""


def error_object(error: ServingError) -> dict[str, Any]:
    """OpenAI's error object; `code` is the error's class in snake case."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.word()}}


def error_response(error: ServingError, show: ErrorShape = error_object) -> Response:
    """The whole answer, with Retry-After where coming back helps."""
    headers = {}
    if error.retry_after_s is not None or error.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if error.http_status in (408, 413):
        # The rest of the body may still be coming, or never.
        headers["Connection"] = "close"
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(show(error), error.http_status, headers)


def method_not_allowed(allowed: str) -> Response:
    """405, for a path that has another method."""
    phrase = HTTPStatus.METHOD_NOT_ALLOWED.phrase
    code = phrase.lower().replace(" ", "_")
    content = {"error": {"message": phrase, "type": "BadRequestError", "param": None, "code": code}}
    return _json(content, HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": allowed})


def _json(content: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")
