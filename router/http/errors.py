"""Every error as HTTP shows it: `{"error": {"message", "type", "param", "code"}}`, whatever raised it."""

import logging
import math
import re
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tandem.errors import InternalError, InvalidRequest, RouteNotFound, ServingError

_log = logging.getLogger(__name__)
_WORD = re.compile(r"(?<!^)(?=[A-Z])")


def error_object(error: ServingError) -> dict[str, Any]:
    """OpenAI's error object; `code` is the error's class in snake case."""
    code = _WORD.sub("_", type(error).__name__).lower()
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": code}}


def error_response(error: ServingError) -> Response:
    """The whole answer, with Retry-After where coming back helps."""
    headers = {}
    if error.retry_after_s is not None or error.http_status in (429, 503):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if error.http_status in (408, 413):
        # The rest of the body may still be coming, or never.
        headers["Connection"] = "close"
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _json(error_object(error), error.http_status, headers)


def install(app: FastAPI) -> None:
    """Make the application answer every error in this shape."""
    app.add_exception_handler(ServingError, _on_serving_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    # The one interceptor for what nobody foresaw; Starlette raises the exception again, so it is logged with its trace.
    app.add_exception_handler(Exception, _on_bug)


def _json(content: dict[str, Any], status: int, headers: dict[str, str]) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


async def _on_serving_error(_request: Request, error: Exception) -> Response:
    if not isinstance(error, ServingError):
        raise error
    if isinstance(error, InternalError):
        _log.error("internal error shown to a client: %s", error.message)
    return error_response(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    if error.status_code == HTTPStatus.NOT_FOUND:
        return error_response(RouteNotFound(f"no route {request.method} {request.url.path[:200]}"))
    phrase = HTTPStatus(error.status_code).phrase
    content = {
        "error": {"message": phrase, "type": "BadRequestError", "param": None, "code": phrase.lower().replace(" ", "_")}
    }
    return _json(content, error.status_code, dict(error.headers or {}))


async def _on_validation_error(_request: Request, _error: Exception) -> Response:
    return error_response(InvalidRequest("the request's path or query is wrong"))


async def _on_bug(_request: Request, _error: Exception) -> Response:
    return error_response(InternalError("internal error"))
