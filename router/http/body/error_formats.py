"""Errors as clients of other APIs than OpenAI's expect them."""

from typing import Any

from tandem.errors import ServingError

_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
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
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def anthropic_error(error: ServingError) -> dict[str, Any]:
    """`{"type": "error", "error": {"type", "message"}}`."""
    kind = _ANTHROPIC.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def google_error(error: ServingError) -> dict[str, Any]:
    """`{"error": {"code", "message", "status"}}`."""
    status = _GOOGLE.get(error.http_status, "INTERNAL")
    return {"error": {"code": error.http_status, "message": error.message, "status": status}}
