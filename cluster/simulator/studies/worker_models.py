"""The planner's model of a worker whose step times follow a profile."""

from cluster.planner.staffing import WorkerModel
from cluster.simulator.inputs.latency import StepLatency


def worker_with(latency: StepLatency, *, chunk_tokens: int, kv_tokens: int, max_running: int) -> WorkerModel:
    """Return a model with the profile's times and the worker's own sizes."""
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
