"""Faults of workers: their kind, time and worker, drawn from a seed in advance.

A crashed worker is gone with its cache; the router notices when the connection breaks, and a new process joins after a
while. A frozen worker continues where it stopped, unless the router gives it up first: then it returns as a new one.
"""

from dataclasses import dataclass
from enum import Enum
from random import Random

from cluster.simulator.model.settings import ClusterSpec
from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole


class FaultKind(Enum):
    """Kind of fault of a worker."""

    CRASH = "crash"
    FREEZE = "freeze"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of one worker."""

    kind: FaultKind
    at_s: float
    role: WorkerRole
    index: int
    duration_s: float
    """Time until a new process runs, or for which the worker is frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSpec:
    """Number of faults of each kind, and their durations."""

    crashes: int = 0
    freezes: int = 0
    restart_s: float = 10.0
    freeze_s: float = 5.0

    @classmethod
    def parse(cls, text: str) -> "FaultSpec":
        """Parse `crash=3,freeze=2,restart=10,freeze_for=5`. ConfigError for anything else."""
        fields = {"crash": "crashes", "freeze": "freezes", "restart": "restart_s", "freeze_for": "freeze_s"}
        try:
            parts = [part.split("=", 1) for part in text.split(",") if part]
            values = {fields[name]: int(v) if name in ("crash", "freeze") else float(v) for name, v in parts}
        except (KeyError, ValueError) as error:
            raise ConfigError(f"--faults must be crash=N,freeze=N,restart=S,freeze_for=S, not {text!r}") from error
        if any(value < 0 for value in values.values()):
            raise ConfigError(f"--faults: values must be at least 0, got {text!r}")
        return cls(**values)  # type: ignore[arg-type]


def draw_faults(faults: FaultSpec, cluster: ClusterSpec, span_s: float, seed: int) -> list[Fault]:
    """Draw the faults in order of time, spread over the middle of the span."""
    rng = Random(f"faults {seed}")
    pools = ((WorkerRole.PREFILL, cluster.prefill), (WorkerRole.DECODE, cluster.decode))
    workers = [(role, index) for role, pool in pools if pool is not None for index in range(pool.num_workers)]
    kinds = [FaultKind.CRASH] * faults.crashes + [FaultKind.FREEZE] * faults.freezes
    drawn = []
    for kind in kinds:
        role, index = rng.choice(workers)
        duration_s = faults.restart_s if kind is FaultKind.CRASH else faults.freeze_s
        at_s = rng.uniform(0.1, 0.9) * span_s
        drawn.append(Fault(kind=kind, at_s=at_s, role=role, index=index, duration_s=duration_s))
    return sorted(drawn, key=lambda fault: fault.at_s)
