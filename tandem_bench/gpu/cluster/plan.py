"""Sizes of the runs, and the clusters that they need."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_bench.clusters import COLOCATED, Setup
from tandem_bench.gpu.stage import Stage

_SHAPE = "1b"
"""Shape on a GPU, unless another than the suite's default is chosen: seven workers hold a copy each."""
_MEMORY_BYTES = 8 << 30
"""Memory of each of the seven workers. They fit into 80 GB with the successors of two that were killed, whose
memory the driver may keep for as long as a peer has it mapped."""
PAIRS = 2
"""Workers of each pool in the cluster whose workers are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of all runs."""

    shape: str
    few: int
    """Streams at once; in the second run with `many`."""
    many: int
    lengths: range
    """Lengths of prompts, in tokens."""
    num_tokens: int
    """Length of answers; `long_tokens` while a decode worker is killed."""
    long_tokens: int
    max_model_len: int

    @classmethod
    def of(cls, stage: Stage) -> "Plan":
        if stage.is_small:
            return cls(
                shape=stage.shape,
                few=4,
                many=8,
                lengths=range(60, 200),
                num_tokens=24,
                long_tokens=300,
                max_model_len=512,
            )
        return cls(
            shape=_SHAPE if stage.is_judged else stage.shape,
            few=16,
            many=64,
            lengths=range(256, 1024),
            num_tokens=128,
            long_tokens=384,
            max_model_len=2048,
        )


def setups(stage: Stage, plan: Plan, model: Path, on_device: str) -> Mapping[str, Setup]:
    engine: dict[str, Any] = {"device": stage.device, "deterministic": True, "max_running_requests": plan.many}
    # The first steps may compile kernels, seven workers at once: that is not what a stalled engine is.
    engine |= {"num_blocks": 512} if stage.is_small else {"memory_bytes": _MEMORY_BYTES, "stall_s": 120.0}

    def setup(mode: str, replicas: int) -> Setup:
        pools = {} if mode == COLOCATED else {pool: {"replicas": replicas} for pool in ("prefill", "decode")}
        return Setup(
            mode=mode,
            dtype=stage.dtype,
            local_prefill_tokens=0,
            num_threads=1 if stage.is_small else None,
            model={"path": str(model), "name": "random", "max_model_len": plan.max_model_len},
            engine=engine,
            # A worker that stops need not wait for others to fetch its cache.
            more={"transfer": {"succession_s": 0.0}, **pools},
        )

    return {COLOCATED: setup(COLOCATED, 1), on_device: setup(on_device, PAIRS), "tcp": setup("tcp", 1)}
