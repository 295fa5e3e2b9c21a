"""Messages of the control socket of a running cluster: one line of JSON as the request, lines of JSON as the reply.

During an upgrade a new command talks to a supervisor of the previous version, which rejects unknown fields. Fields
added since are therefore None by default and omitted unless set.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tandem.config.pools import MAX_REPLICAS

WorkerRoleName = Literal["prefill", "decode"]
RoleName = Literal["prefill", "decode", "router"]


class ControlMessage(BaseModel):
    """Base class of the messages: immutable and strict (`true` is not a number), without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StatusRequest(ControlMessage):
    """Request for the list of processes."""

    op: Literal["status"] = "status"


class ScaleRequest(ControlMessage):
    """Request for pool sizes; a pool that is not named keeps its size."""

    op: Literal["scale"] = "scale"
    prefill: int | None = Field(default=None, ge=0, le=MAX_REPLICAS)
    decode: int | None = Field(default=None, ge=1, le=MAX_REPLICAS)
    yields: bool | None = None
    """Whether an operator's change may replace this one, which a planner requests."""


class FlipRequest(ControlMessage):
    """Request to move a worker of the other pool to this one."""

    op: Literal["flip"] = "flip"
    to: WorkerRoleName
    yields: bool | None = None


class RestartRequest(ControlMessage):
    """Request to replace processes one after another: those of these roles, or all if nothing is named."""

    op: Literal["restart"] = "restart"
    roles: tuple[RoleName, ...] = ()
    names: tuple[str, ...] | None = None
    """Single processes to replace as well, such as `decode-0`."""
    in_place: bool | None = None
    """Whether each worker stops before its replacement starts, even where there is room for both."""


class AbortRequest(ControlMessage):
    """Request to abort the change in progress; finished steps stay."""

    op: Literal["abort"] = "abort"


ControlRequest = StatusRequest | ScaleRequest | FlipRequest | RestartRequest | AbortRequest
_REQUESTS: TypeAdapter[ControlRequest] = TypeAdapter(Annotated[ControlRequest, Field(discriminator="op")])


class ProcessStatus(ControlMessage):
    """State of one process of the cluster."""

    name: str
    role: RoleName
    state: str
    pid: int | None = None
    address: str


class ControlReply(ControlMessage):
    """One line of a reply; the last one has `done`."""

    progress: str | None = None
    processes: tuple[ProcessStatus, ...] | None = None
    changing: bool | None = None
    """Whether a change is in progress; set with `processes`."""
    done: bool | None = None
    reason: str | None = None
    """Reason why the request was not carried out."""


class MalformedRequest(ValueError):
    """Malformed or unknown request; the message names what is wrong with it."""


def parse_request(line: bytes) -> ControlRequest:
    try:
        return _REQUESTS.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedRequest(f"{where}: {first['msg']}" if where else first["msg"]) from None


def encode_message(message: ControlMessage) -> bytes:
    """Encode as one line, omitting fields that are None."""
    return message.model_dump_json(exclude_none=True).encode() + b"\n"
