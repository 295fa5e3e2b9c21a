"""Errors in the formats of Anthropic's and Google's APIs, and which requests expect them."""

from typing import Any

from starlette.types import Scope

from router.http.body.errors import ErrorShape, error_object
from tandem.errors import ServingError

_ANTHROPIC_PATH, _GOOGLE_PATH = "/v1/messages", "/v1beta"
_ANTHROPIC_HEADER = b"anthropic-version"
"""Header that Anthropic's clients send with every request."""

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_GOOGLE = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "INVALID_ARGUMENT",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def anthropic_error(error: ServingError) -> dict[str, Any]:
    """Format `{"type": "error", "error": {"type", "message"}}`."""
    kind = _ANTHROPIC.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def google_error(error: ServingError) -> dict[str, Any]:
    """Format `{"error": {"code", "message", "status"}}`."""
    status = _GOOGLE.get(error.http_status, "INTERNAL")
    return {"error": {"code": error.http_status, "message": error.message, "status": status}}


def error_shape(scope: Scope) -> ErrorShape:
    """Return the error format that a request's client expects: by path or, for an unknown route, by headers."""
    path: str = scope["path"]
    if _is_below(path, _ANTHROPIC_PATH):
        return anthropic_error
    if _is_below(path, _GOOGLE_PATH):
        return google_error
    is_unknown = "route" not in scope
    is_anthropics = is_unknown and any(name == _ANTHROPIC_HEADER for name, _ in scope["headers"])
    return anthropic_error if is_anthropics else error_object


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
