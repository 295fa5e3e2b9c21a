"""Inputs, outputs and bounds of the planner. Values only."""

from dataclasses import dataclass, field
from enum import Enum

from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Number of workers in each pool."""

    prefill: int
    decode: int

    @property
    def total(self) -> int:
        return self.prefill + self.decode

    def size_of(self, role: WorkerRole) -> int:
        return self.prefill if role is WorkerRole.PREFILL else self.decode

    def changed(self, role: WorkerRole, by: int) -> "Sizes":
        """Return sizes with so many more, or fewer, in one pool."""
        more_prefill = by if role is WorkerRole.PREFILL else 0
        return Sizes(prefill=self.prefill + more_prefill, decode=self.decode + by - more_prefill)

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Requests of one period, as sums, so that periods can be added before taking means and second moments."""

    num_requests: float = 0.0
    prompt_tokens: float = 0.0
    """Prompt tokens that had to be computed, without the cached ones."""
    prompt_seconds: float = 0.0
    """Time that one prefill worker takes for these prompts."""
    prompt_seconds_squared: float = 0.0
    num_answers: float = 0.0
    """Requests that ended, as opposed to arrived."""
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    """Cached tokens of the prompts of ended requests."""
    context_tokens: float = 0.0
    """Context lengths of the ended requests, each counted once per generated token."""
    context_tokens_squared: float = 0.0
    """Squares of the same lengths, counted the same way."""

    def plus(self, other: "Demand", *, kept: float = 1.0) -> "Demand":
        """Return a share of this plus another."""
        sums = {name: kept * getattr(self, name) + getattr(other, name) for name in Demand.__slots__}
        return Demand(**sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Observation of one period."""

    period_s: float
    demand: Demand
    waiting_prompt_seconds: float = 0.0
    """Work of the prompts not computed yet, at the end of the period."""
    num_late: int = 0
    """First tokens that came later than the objective, or never."""
    num_first: int = 0
    """First tokens in the period."""
    num_decoding: int = 0
    """Decode workers that reported their KV usage at the end of the period."""
    taken_pools: float = 0.0
    """KV used by sequences and needed by queued prompts, in pools: 1.5 is a pool and a half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """Fleet at one moment, by what the workers will be when all orders are done."""

    sizes: Sizes
    """Workers that are ready or starting, without those that leave."""
    starting: Sizes | None = None
    """Workers of `sizes` that are ordered or changing roles, for reports; None: unknown."""


class ActionKind(Enum):
    """Action on one worker."""

    FLIP = "flip"
    """Drain it, and restart it in the other pool on the same machine."""
    START = "start"
    """Request a new machine for a worker."""
    STOP = "stop"
    """Drain the worker and release its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    kind: ActionKind
    role: WorkerRole
    """Pool that gains a worker, or loses one for good."""

    def __str__(self) -> str:
        if self.kind is ActionKind.FLIP:
            return f"flip {other(self.role).value} -> {self.role.value}"
        return f"{self.kind.value} {self.role.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The planner's decision and its reason."""

    actions: tuple[Action, ...]
    wanted: Sizes
    """Sizes that the forecast requires, before hysteresis."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerPolicy:
    """Bounds of what the planner may do, and its damping."""

    least: Sizes = field(default_factory=lambda: Sizes(prefill=1, decode=1))
    most_workers: int = 64
    start_s: float = 180.0
    """Time from an order to a worker that serves: how far ahead the forecast looks."""
    hold_s: float = 300.0
    """Time throughout which fewer workers must have sufficed before a pool shrinks."""
    flip_hold_s: float = 60.0
    """Time throughout which a pool must have been able to spare a worker before it is lent to the other pool."""
    cooldown_s: float = 30.0
    """Minimum time between two decisions that flip or remove workers."""
    most_flips: int = 2
    """Maximum flips in one decision."""
    band: float = 0.5
    """Standard errors of the forecast that are provided for."""

    def __post_init__(self) -> None:
        if min(self.least.prefill, self.least.decode) < 1:
            raise ConfigError(f"the minimum size of each pool must be at least 1, got {self.least}")
        if self.most_workers < self.least.total:
            raise ConfigError(f"the maximum of {self.most_workers} workers is below the minimum of {self.least}")
        if min(self.start_s, self.hold_s, self.flip_hold_s, self.cooldown_s, self.band, self.most_flips) < 0:
            raise ConfigError("the planner's times, flips and band must be at least 0")


def other(role: WorkerRole) -> WorkerRole:
    return WorkerRole.DECODE if role is WorkerRole.PREFILL else WorkerRole.PREFILL
