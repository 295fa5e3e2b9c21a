"""What a planner is told of a worker that takes as long as a profile says."""

from cluster.planner.staffing import WorkerModel
from cluster.simulator.inputs.latency import StepLatency


def worker_with(latency: StepLatency, *, chunk_tokens: int, kv_tokens: int, max_running: int) -> WorkerModel:
    """The profile's times, and the sizes that are the worker's own."""
    return WorkerModel(
        step_s=latency.step_s,
        prompt_token_s=latency.prompt_token_s,
        pair_s=latency.pair_s,
        row_s=latency.row_s,
        context_token_s=latency.context_token_s,
        chunk_tokens=chunk_tokens,
        kv_tokens=kv_tokens,
        max_running=max_running,
    )
