"""Files and batches: their stored records, states, and the objects that OpenAI's clients see. Pure."""

from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, Literal, Self, TypeAlias, get_args

from tandem.errors import Code, ServingError

WINDOW_S = 86400.0
"""OpenAI's only completion window."""
Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]
ENDPOINTS: tuple[str, ...] = get_args(Endpoint)


class ObjectNotFound(ServingError):
    """The tenant has no such file or batch."""

    code = Code.NOT_FOUND
    http_status = 404
    kind = "NotFoundError"


class BatchStatus(Enum):
    """A batch's state under OpenAI's name for it."""

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
        """Whether the batch has ended."""
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

    def api_object(self) -> dict[str, Any]:
        """Return the file object of OpenAI's API."""
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
    """One batch. Written by the process that created it, then by the one that runs it."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    created_s: int
    expires_s: int
    metadata: dict[str, str] = field(default_factory=dict)
    status: BatchStatus = BatchStatus.VALIDATING
    at_s: dict[str, int] = field(default_factory=dict)
    """Unix time at which it entered each state."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[dict[str, Any], ...] = ()
    """Errors in its input file."""
    ends_as: str | None = None
    """The final status, known once it finalizes."""
    output_file_id: str | None = None
    error_file_id: str | None = None

    def moved(self, status: BatchStatus, now_s: float, **changes: Any) -> "StoredBatch":
        """Return the batch in its next state."""
        return replace(self, status=status, at_s=self.at_s | {status.value: int(now_s)}, **changes)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"status": self.status.value}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Load a batch that `to_json` wrote. Raises LookupError, TypeError or ValueError for anything else."""
        return cls(**data | {"status": BatchStatus(data["status"]), "errors": tuple(data["errors"])})

    def api_object(self, *, is_cancelled: bool) -> dict[str, Any]:
        """Return the batch object of OpenAI's API. `is_cancelled`: a client requested cancellation."""
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
