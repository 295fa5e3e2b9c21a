"""Small clusters and loads for the simulator's tests."""

from typing import Any

from cluster.simulator.inputs.generated_load import LoadSpec, generate
from cluster.simulator.inputs.latency import StepLatency
from cluster.simulator.inputs.trace import Trace
from cluster.simulator.model.settings import ClusterSpec, PoolSpec, engine_config

LATENCY = StepLatency(
    step_s=0.005, prompt_token_s=1e-4, pair_s=1e-9, row_s=1e-4, context_token_s=1e-7, kv_bytes_per_token=1024
)
BLOCK = 16


def load(requests: int = 60, seed: int = 3, **changes: Any) -> Trace:
    figures = {"rate": 6.0, "prefix": 64, "prompt": 60.0, "output": 30.0, "block": BLOCK, "think": 3.0}
    return generate(LoadSpec(requests=requests, **{**figures, **changes}), seed)


def cluster(prefill: int = 2, decode: int = 2, *, num_blocks: int = 400, rows: int = 64) -> ClusterSpec:
    engine = engine_config(num_blocks=num_blocks, block_size=BLOCK, max_running_requests=rows, chunk_tokens=256)
    return ClusterSpec(
        prefill=PoolSpec(num_workers=prefill, engine=engine, latency=LATENCY) if prefill else None,
        decode=PoolSpec(num_workers=decode, engine=engine, latency=LATENCY) if decode else None,
    )
