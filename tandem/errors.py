"""Every error that Tandem shows to somebody outside.

ServingError
├── InvalidRequest            400  a field is wrong; `param` names it
│   ├── ContextLengthExceeded 400  prompt (plus output) beyond the model's context
│   └── RequestTooLarge       413  more KV than the whole pool, or a body beyond the bound
├── Unauthenticated           401
├── ModelNotFound             404
├── RouteNotFound             404
├── NotAllowed                403  a good key, and not for this; or a web page of another origin
├── Overloaded                429  a bounded queue or limit is full; carries Retry-After
├── Unavailable               503  no healthy worker can take it now; carries Retry-After
├── DeadlineExceeded          504
├── Cancelled                 499  the client left
├── StreamTaken               409  the client reads the stream elsewhere
├── TransferError             503  a hand-off failed; always retried inside before anybody sees it
└── InternalError             500
InvariantError                     a bug: the process that raises it must die loudly

A class says how it looks on each wire; only the doors' interceptors translate it. This module imports nothing
so that every layer may use it.
"""

from enum import Enum


class Code(Enum):
    """Same names as `grpc.StatusCode`, without importing grpc."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    NOT_FOUND = "NOT_FOUND"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class ServingError(Exception):
    """Base of all errors that reach a client: `message` is shown, so it never holds prompt text."""

    code = Code.INTERNAL
    http_status = 500
    kind = "InternalServerError"
    retryable = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @classmethod
    def word(cls) -> str:
        """The class's name in snake case: what clients tell kinds of errors apart by."""
        name = cls.__name__
        return "".join(f"_{char.lower()}" if i and char.isupper() else char.lower() for i, char in enumerate(name))


class InvalidRequest(ServingError):
    """The request itself is wrong; sending it again cannot help."""

    code = Code.INVALID_ARGUMENT
    http_status = 400
    kind = "BadRequestError"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt plus the least output asked for, does not fit the model's context."""


class RequestTooLarge(InvalidRequest):
    """More than a hard capacity: waiting would not make it fit."""

    http_status = 413


class Unauthenticated(ServingError):
    """No API key, or a wrong one."""

    code = Code.UNAUTHENTICATED
    http_status = 401
    kind = "AuthenticationError"


class NotAllowed(ServingError):
    """The key is good, and not for this; or a web page of another origin wants what needs no key."""

    code = Code.PERMISSION_DENIED
    http_status = 403
    kind = "PermissionDeniedError"


class ModelNotFound(ServingError):
    """The named model is not served here."""

    code = Code.NOT_FOUND
    http_status = 404
    kind = "NotFoundError"


class RouteNotFound(ServingError):
    code = Code.NOT_FOUND
    http_status = 404
    kind = "NotFoundError"


class CacheNotFound(RouteNotFound):
    """The tenant has no named cache of that name, or its time is over."""


class Overloaded(ServingError):
    """A bounded queue is full; `retry_after_s` says when to come back."""

    code = Code.RESOURCE_EXHAUSTED
    http_status = 429
    kind = "RateLimitError"
    retryable = True


class Unavailable(ServingError):
    """No healthy worker can take the request now."""

    code = Code.UNAVAILABLE
    http_status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class DeadlineExceeded(ServingError):
    """The request's time ran out before its answer was complete."""

    code = Code.DEADLINE_EXCEEDED
    http_status = 504
    kind = "TimeoutError"


class Cancelled(ServingError):
    """The client went away."""

    code = Code.CANCELLED
    http_status = 499
    kind = "CancelledError"


class StreamTaken(ServingError):
    """The client has gone on with this stream through another router, or another connection."""

    code = Code.CANCELLED
    http_status = 409
    kind = "ConflictError"


class TransferError(ServingError):
    """A KV hand-off ended without a commit."""

    code = Code.UNAVAILABLE
    http_status = 503
    kind = "ServiceUnavailableError"
    retryable = True


class InternalError(ServingError):
    """A fault of ours; details stay in the log."""


class ConfigError(Exception):
    """The configuration, command line or model directory is wrong; shown at start, then exit."""


class UnreadableFile(ConfigError):
    """A file that somebody names cannot be read: missing, denied, no regular file, or larger than its bound."""


class InvariantError(Exception):
    """A broken invariant: state can no longer be trusted, so nothing may catch and continue."""
