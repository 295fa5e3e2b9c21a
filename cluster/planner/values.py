"""What the planner is told, what it answers, and the bounds it keeps. Values only."""

from dataclasses import dataclass, field
from enum import Enum

from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Workers of either pool."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def size_of(self, role: WorkerRole) -> int:
        return self.prefill if role is WorkerRole.PREFILL else self.decode

    def changed(self, role: WorkerRole, by: int) -> "Sizes":
        """With so many more, or fewer, in one pool."""
        more_prefill = by if role is WorkerRole.PREFILL else 0
        return Sizes(prefill=self.prefill + more_prefill, decode=self.decode + by - more_prefill)

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests of one period, as sums: means and second moments come of any number of periods added up."""

    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    """That had to be computed: what was cached is left out."""
    prompt_seconds: float = 0.0
    """Of one prefill worker, for these prompts."""
    prompt_seconds_squared: float = 0.0
    num_answers: float = 0.0
    """Requests that ended; not those that came."""
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    """Of the prompts of those that ended."""
    context_tokens: float = 0.0
    """Of prompts and answers of those that ended, each as often as its answer has tokens."""
    context_tokens_squared: float = 0.0
    """Squares of the same lengths, as often."""

    def plus(self, other: "Demand", *, kept: float = 1.0) -> "Demand":
        """This, of which only a share is remembered, and another's."""
        sums = {name: kept * getattr(self, name) + getattr(other, name) for name in Demand.__slots__}
        return Demand(**sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One period as it was."""

    period_s: float
    demand: Demand
    waiting_prompt_seconds: float = 0.0
    """Work of prompts that are not computed yet, at its end."""
    num_late: int = 0
    """First tokens that came after the promise, or never."""
    num_first: int = 0
    """First tokens at all."""
    num_decoding: int = 0
    """Decode workers that told how full they are, at its end."""
    taken_pools: float = 0.0
    """What their sequences have of their KV and the prompts at the doors will take of it: 1.5 is a pool and a half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The machines at one moment, by what they will be when what was ordered is done."""

    sizes: Sizes
    """Ready and on their way; not those that leave."""
    starting: Sizes | None = None
    """On their way, of `sizes`: ordered or changing roles. The account tells of them. None: not known."""


class ActionKind(Enum):
    """What can be done with a worker."""

    FLIP = "flip"
    """Drain it, and start it again in the other pool on the same machine."""
    START = "start"
    """Ask for a new machine."""
    STOP = "stop"
    """Drain it, and give its machine back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    kind: ActionKind
    role: WorkerRole
    """Of the pool that gains a worker, or loses it for good."""

    def __str__(self) -> str:
        if self.kind is ActionKind.FLIP:
            return f"flip {other(self.role).value} -> {self.role.value}"
        return f"{self.kind.value} {self.role.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What is to be done now, and why."""

    actions: tuple[Action, ...]
    wanted: Sizes
    """That the forecast asks for, before hysteresis."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPolicy:
    """Bounds of what the planner may do, and how steady it is."""

    least: Sizes = field(default_factory=lambda: Sizes(prefill=1, decode=1))
    most_workers: int = 64
    start_s: float = 180.0
    """From an order to a worker that serves: the forecast looks so far ahead."""
    hold_s: float = 300.0
    """A pool shrinks only to what was enough all this time."""
    flip_hold_s: float = 60.0
    """A worker is lent to the other pool only if its own could spare it all this time."""
    cooldown_s: float = 30.0
    """Between two decisions that change roles or give workers up."""
    most_flips: int = 2
    """In one decision."""
    band: float = 0.5
    """Standard errors of the forecast that are provided for."""

    def __post_init__(self) -> None:
        if min(self.least.prefill, self.least.decode) < 1:
            raise ConfigError("a pool keeps at least one worker")
        if self.most_workers < self.least.total:
            raise ConfigError(f"at most {self.most_workers} workers cannot hold the least of {self.least}")
        if min(self.start_s, self.hold_s, self.flip_hold_s, self.cooldown_s, self.band, self.most_flips) < 0:
            raise ConfigError("times, flips and the band of a planner are not below 0")


def other(role: WorkerRole) -> WorkerRole:
    return WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL
