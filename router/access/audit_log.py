"""One audit entry for each request to a server, written when it has ended: who called what, never the content.

`current_entry` finds the entry of the request that the running task serves, so that the access guard can add the caller
and the meter the tokens, through however many layers they are called.
"""

from collections.abc import Callable
from contextvars import ContextVar, Token
from datetime import UTC, datetime
from functools import partial
from typing import Any, Protocol

from msgspec import Struct, field

from router.access.api_keys import ApiCaller
from tandem.values.random_pool import RANDOM


class AuditEntry(Struct, kw_only=True):
    server: str
    """The server that took the request: `http` or `grpc`."""
    client: str
    """The peer address of the connection; headers that claim another one are ignored."""
    began_s: float
    """Start of the request, on the monotonic clock."""
    route: str = "unknown"
    status: str = ""
    caller: ApiCaller | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    own_id: str = field(default_factory=partial(RANDOM.token_hex, 16))
    """The router's own id of the call's first request, as it appears in the logs of all processes."""
    request_id: str = ""
    """The answer's X-Request-Id: the client's, else `own_id`."""
    is_named: bool = False
    """Whether `own_id` is taken, so that the call's further requests get ids of their own."""
    is_kept: bool = False
    """Whether the entry is written to the log: the request carried a key, or was refused."""

    def __post_init__(self) -> None:
        self.request_id = self.request_id or self.own_id

    def to_line(self, now: datetime, seconds: float) -> dict[str, Any]:
        return {
            "time": now.astimezone(UTC).isoformat(timespec="milliseconds"),
            "door": self.server,
            "request_id": self.request_id,
            "own_request_id": self.own_id,
            "tenant": None if self.caller is None else self.caller.tenant,
            "key_id": None if self.caller is None else self.caller.key_id,
            "client": self.client,
            "route": self.route,
            "status": self.status,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": round(seconds, 6),
        }


class AuditLog(Protocol):
    """Receives the entries of requests that have ended."""

    def keep(self, entry: AuditEntry) -> None:
        """Queue the entry for writing. Never waits, never raises."""
        ...


class _NoAudit:
    def keep(self, entry: AuditEntry) -> None:
        """Drop the entry: no log is configured."""


NO_AUDIT: AuditLog = _NoAudit()
_CURRENT: ContextVar[AuditEntry | None] = ContextVar("tandem_audit_entry", default=None)


# The variable's own methods, by the names that say what they are for here.
current_entry: Callable[[], AuditEntry | None] = _CURRENT.get
"""Returns the entry of the request that this task serves, if any."""
enter: Callable[[AuditEntry], Token[AuditEntry | None]] = _CURRENT.set
"""Makes it the running task's entry until `leave`."""
leave: Callable[[Token[AuditEntry | None]], None] = _CURRENT.reset
"""Restores the entry from before `enter`."""
