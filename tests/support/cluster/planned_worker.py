"""The one worker, promise and period by which the tests of the planner and of its live side reckon."""

from cluster.planner.staffing import LatencyTargets, Margins, Staffing, WorkerModel
from cluster.planner.values import Demand

PERIOD_S = 15.0
WORKER = WorkerModel(
    step_s=0.05,
    prompt_token_s=3e-4,
    pair_s=0.0,
    row_s=3e-4,
    context_token_s=4e-7,
    chunk_tokens=2048,
    kv_tokens=50_000,
    max_running=64,
)
TARGETS = LatencyTargets(ttft_s=5.0, itl_s=0.1)


def staffing() -> Staffing:
    """By that worker, with the usual margins."""
    return Staffing(WORKER, TARGETS, Margins())


def demand(num_requests: float, prompt: int = 1_000, output: int = 200) -> Demand:
    seconds, length = WORKER.prompt_seconds(0, prompt), prompt + output
    return Demand(
        num_requests=num_requests,
        prompt_tokens=num_requests * prompt,
        prompt_seconds=num_requests * seconds,
        prompt_seconds_squared=num_requests * seconds**2,
        num_answers=num_requests,
        output_tokens=num_requests * output,
        context_tokens=num_requests * output * length,
        context_tokens_squared=num_requests * output * length**2,
    )
