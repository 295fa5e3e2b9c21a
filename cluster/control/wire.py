"""What is said over the control socket of a running cluster: one line of JSON asks, lines of JSON answer.

An upgrade begins with a new command that asks a parent of the version before. Whatever a message has gained since is
therefore None, and left out, unless somebody wants it: the parent refuses fields that it does not know.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from tandem.config.pools import MAX_REPLICAS

WorkerRoleName = Literal["prefill", "decode"]
RoleName = Literal["prefill", "decode", "router"]


class ControlMessage(BaseModel):
    """Base of all: frozen, and refusing what it does not know or what is of another type: `true` is no size."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StatusAsked(ControlMessage):
    """Which processes there are."""

    op: Literal["status"] = "status"


class ScaleAsked(ControlMessage):
    """So many workers; a pool that is not named stays as it is."""

    op: Literal["scale"] = "scale"
    prefill: int | None = Field(default=None, ge=0, le=MAX_REPLICAS)
    decode: int | None = Field(default=None, ge=1, le=MAX_REPLICAS)
    yields: bool | None = None
    """A planner asks: an operator's change takes its place."""


class FlipAsked(ControlMessage):
    """A worker of the other pool becomes one of this."""

    op: Literal["flip"] = "flip"
    to: WorkerRoleName
    yields: bool | None = None


class RestartAsked(ControlMessage):
    """Every process of these roles is replaced, one after another; nothing named: of all."""

    op: Literal["restart"] = "restart"
    roles: tuple[RoleName, ...] = ()
    names: tuple[str, ...] | None = None
    """Single processes besides, such as `decode-0`."""
    in_place: bool | None = None
    """Each worker leaves before its successor starts, also where there is room for both."""


class AbortAsked(ControlMessage):
    """The change that is under way is taken back; what it has done stays."""

    op: Literal["abort"] = "abort"


Asked = StatusAsked | ScaleAsked | FlipAsked | RestartAsked | AbortAsked
_ASKED: TypeAdapter[Asked] = TypeAdapter(Annotated[Asked, Field(discriminator="op")])


class ProcessTold(ControlMessage):
    """One process of the cluster."""

    name: str
    role: RoleName
    state: str
    pid: int | None = None
    address: str


class Told(ControlMessage):
    """One line of an answer; the last has `done`."""

    progress: str | None = None
    processes: tuple[ProcessTold, ...] | None = None
    changing: bool | None = None
    """Beside `processes`: whether a change is under way."""
    done: bool | None = None
    reason: str | None = None
    """Why it was not done."""


class NotUnderstood(ValueError):
    """A line that asks for nothing that there is; the message names what is wrong with it."""


def read_asked(line: bytes) -> Asked:
    try:
        return _ASKED.validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise NotUnderstood(f"{where}: {first['msg']}" if where else first["msg"]) from None


def written(message: ControlMessage) -> bytes:
    """One line; what is not said is left out."""
    return message.model_dump_json(exclude_none=True).encode() + b"\n"
