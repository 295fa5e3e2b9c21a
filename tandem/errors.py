"""Every error that Tandem shows to clients and users.

ServingError
├── InvalidRequest            400  a field is wrong; `param` names it
│   ├── ContextLengthExceeded 400  prompt (plus output) beyond the model's context
│   └── RequestTooLarge       413  more KV than the whole pool, or a body beyond the bound
├── Unauthenticated           401
├── ModelNotFound             404
├── RouteNotFound             404
├── NotAllowed                403  a valid key without the right; or a web page of another origin
├── Overloaded                429  a bounded queue or limit is full; carries Retry-After
├── Unavailable               503  no healthy worker can take it now; carries Retry-After
│   └── AdapterUnavailable    503  a worker lacks a LoRA adapter's files; retried at others before a client sees it
├── DeadlineExceeded          504
├── Cancelled                 499  the client left
├── StreamTaken               409  the client reads the stream elsewhere
├── TransferError             503  a hand-off failed; always retried before a client sees it
└── InternalError             500
InvariantError                     a bug: the process that raises it must end with an error

A class defines how it appears on each wire; only the servers translate it. This module imports no other of Tandem, so
that every layer may use it.
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
    """Base of all errors that reach a client: `message` is shown, so it never contains prompt text."""

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
        """The class's name in snake case, by which clients distinguish errors."""
        name = cls.__name__
        return "".join(f"_{char.lower()}" if i and char.isupper() else char.lower() for i, char in enumerate(name))


class InvalidRequest(ServingError):
    """The request itself is wrong; sending it again cannot help."""

    code = Code.INVALID_ARGUMENT
    http_status = 400
    kind = "BadRequestError"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt plus `min_tokens`, does not fit the model's context."""


class RequestTooLarge(InvalidRequest):
    """The request exceeds a fixed capacity: waiting would not help."""

    http_status = 413


class Unauthenticated(ServingError):
    """No API key, or a wrong one."""

    code = Code.UNAUTHENTICATED
    http_status = 401
    kind = "AuthenticationError"


class NotAllowed(ServingError):
    """The key is valid but lacks the right; or a web page of another origin uses a route that needs no key."""

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
    """The tenant has no named cache of that name, or it has expired."""


class Overloaded(ServingError):
    """A bounded queue is full; `retry_after_s` is the time after which to retry."""

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


class AdapterUnavailable(Unavailable):
    """The files of a LoRA adapter are missing at this worker, or others than those ordered: the worker is healthy, and
    another one may have them.
    """


class DeadlineExceeded(ServingError):
    """The request's time ran out before its answer was complete."""

    code = Code.DEADLINE_EXCEEDED
    http_status = 504
    kind = "TimeoutError"


class Cancelled(ServingError):
    """The client disconnected before its answer was complete."""

    code = Code.CANCELLED
    http_status = 499
    kind = "CancelledError"


class StreamTaken(ServingError):
    """The client continues this stream through another router, or another connection."""

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
    """A fault in Tandem itself; details are logged."""


class ConfigError(Exception):
    """The configuration, command line or model directory is wrong; shown at start, then the process exits."""


class UnreadableFile(ConfigError):
    """A file that the user named cannot be read: missing, denied, not a regular file, or larger than its bound."""


class InvariantError(Exception):
    """A broken invariant: the state is unreliable, so no code may catch this and continue."""
