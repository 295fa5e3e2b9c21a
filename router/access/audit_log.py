"""Who asked for what: one entry for each request at the doors, written when it has ended. Never what was said.

The entry of the request that the running task serves is found by `current_entry`, so that whatever learns something of
it (the guard its caller, the meter its tokens) can note it, through however many layers it was called.
"""

import secrets
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from router.access.api_keys import ApiCaller


@dataclass(slots=True, kw_only=True)
class AuditEntry:
    """One request so far."""

    door: str
    """`http` or `grpc`."""
    client: str
    """Its address, as the connection has it: headers that claim another one are not believed."""
    began_s: float
    """On a clock that never jumps."""
    route: str = "unknown"
    status: str = ""
    caller: ApiCaller | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    own_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """What this router calls its first request, and the logs of all processes say of it."""
    request_id: str = ""
    """The answer's X-Request-Id: what its client calls it, else the same."""
    is_named: bool = False
    """That request has its name."""
    is_kept: bool = False
    """A key was asked for, or it was refused."""

    def __post_init__(self) -> None:
        self.request_id = self.request_id or self.own_id

    def described(self, now: datetime, seconds: float) -> dict[str, Any]:
        """The line."""
        return {
            "time": now.astimezone(UTC).isoformat(timespec="milliseconds"),
            "door": self.door,
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
    """Where entries go."""

    def keep(self, entry: AuditEntry) -> None:
        """It has ended. Never waits, never raises."""
        ...


class _NoAudit:
    def keep(self, entry: AuditEntry) -> None:
        """Forgotten."""


NO_AUDIT: AuditLog = _NoAudit()
_CURRENT: ContextVar[AuditEntry | None] = ContextVar("tandem_audit_entry", default=None)


def current_entry() -> AuditEntry | None:
    """That of the request which this task serves, if it serves one."""
    return _CURRENT.get()


def enter(entry: AuditEntry) -> Token[AuditEntry | None]:
    """This task serves it from now on, until `leave`."""
    return _CURRENT.set(entry)


def leave(token: Token[AuditEntry | None]) -> None:
    """It does no more."""
    _CURRENT.reset(token)
