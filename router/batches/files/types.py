"""Files and batches: what is kept of them, what they are allowed to become, and how OpenAI's clients see them. Pure."""

from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Self, TypeAlias, get_args

from tandem.errors import Code, ServingError

WINDOW_S = 86400.0
"""OpenAI's only completion window."""
Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)


class ObjectNotFound(ServingError):
    """There is no such file or batch, or it is another tenant's."""

    code = Code.NOT_FOUND
    http_status = 404
    kind = "NotFoundError"


class BatchStatus(Enum):
    """OpenAI's words."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether nothing more becomes of it."""
        return self in (BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One file of a tenant."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int

    def shown(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """One batch. Written by whoever made it, then by the one process that runs it."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_s: int
    expires_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    status: BatchStatus = BatchStatus.VALIDATING
    at_s: dict[str, int] = field(default_factory=dict)
    """When it came to each of its states."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[dict[str, Any], ...] = ()
    """What is wrong with its input."""
    ends_as: str | None = None
    """Known once it finalizes: what it becomes when its results are files."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    def moved(self, status: BatchStatus, now_s: float, **changes: Any) -> "StoredBatch":
        """In its next state."""
        return replace(self, status=status, at_s=self.at_s | {status.value: int(now_s)}, **changes)

    def to_json(self) -> dict[str, Any]:
        """For the disk."""
        return asdict(self) | {"status": self.status.value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """From the disk."""
        return cls(**data | {"status": BatchStatus(data["status"]), "errors": tuple(data["errors"])})

    def shown(self, *, is_cancelled: bool) -> dict[str, Any]:
        """OpenAI's batch object. `is_cancelled`: somebody asked for that."""
        status = BatchStatus.CANCELLING if is_cancelled and not self.status.is_final else self.status
        errors = {"object": "list", "data": list(self.errors)} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_s,
            "expires_at": self.expires_s,
            **{f"{state.value}_at": self.at_s.get(state.value) for state in BatchStatus if state.value != "validating"},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata or None,
        }
