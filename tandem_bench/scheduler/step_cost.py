"""Cost of a step apart from the model: planning it, laying out its inputs, processing its tokens.

`python -m tandem_bench.scheduler.step_cost` prints milliseconds per step by batch and by pool, with a runner that
computes nothing. Single-threaded. Sequences differ in length, so in each step some of them need a block and fill one,
as in service; the worst case, where all do so in the same step, is a separate figure.
"""

import argparse
import gc
import itertools
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from engine.runner.step_input_builder import StepInputBuilder
from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.request import Request, SampledToken
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench import report
from tandem_bench.report import Row, figure

BATCHES = (1, 16, 64, 256)
POOLS = (1 << 10, 1 << 14, 1 << 17)
BLOCK_TOKENS = 16
GOAL_MS = 1.0
"""Goal at 256 sequences."""
_SECRET = b"0123456789abcdef"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Milliseconds per decode step."""

    num_seqs: int
    num_blocks: int
    schedule_ms: float
    inputs_ms: float
    commit_ms: float
    total_ms: float
    """Total time of a step; this and the next three are medians."""
    least_ms: float
    p99_ms: float


def engine_config(num_blocks: int) -> SchedulerConfig:
    """Return limits wide enough that only the batch matters."""
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=BLOCK_TOKENS,
        max_model_len=1 << 20,
        max_batched_tokens=1 << 20,
        prefill_chunk_tokens=1 << 20,
        max_step_s=0.4,
        max_running_requests=max(BATCHES),
        max_waiting_requests=max(BATCHES),
        kv_event_capacity=1 << 16,
        eos_token_ids=frozenset({0}),
        eviction="lru",
        max_overtakes=8,
        priority_aging_s=60.0,
    )


class NullRun:
    """Scheduler under a steady batch, with timers around its parts."""

    def __init__(self, *, num_seqs: int, num_blocks: int, prompt_tokens: int = 0, aligned: bool = False) -> None:
        """`prompt_tokens`: of each sequence; 0: what leaves a quarter of the pool to the outputs.

        `aligned`: all sequences fill their blocks in the same step.
        """
        self.scheduler = Scheduler(engine_config(num_blocks), BlockHasher(_SECRET))
        self._builder = StepInputBuilder(BLOCK_TOKENS)
        self._token = SampledToken(token_id=7)
        prompt_tokens = prompt_tokens or min(512, (num_blocks * 3 // 4 // num_seqs - 1) * BLOCK_TOKENS)
        root = root_hash(secret=_SECRET, model_fingerprint="null")
        for k in range(num_seqs):
            length = max(1, prompt_tokens) + (0 if aligned else k % BLOCK_TOKENS)
            self.scheduler.add(
                Request(
                    request_id=RequestId(f"{k:04}"),
                    token_ids=array("i", [k + 1] * length),
                    num_prompt_tokens=length,
                    params=SamplingParams(max_tokens=1 << 19, temperature=0.0),
                    hash_root=root,
                    arrival_s=float(k),
                )
            )
        self.num_seqs = num_seqs
        while self.scheduler.load().num_running < num_seqs or self.scheduler.load().num_backlog_tokens > num_seqs:
            self.step()

    def step(self) -> tuple[float, float, float]:
        """Run one step; return seconds to schedule, lay out and commit. RuntimeError when nothing could run."""
        begun = time.perf_counter()
        batch = self.scheduler.schedule(0.0)
        scheduled = time.perf_counter()
        if batch is None:
            raise RuntimeError("nothing to run")
        self._builder.build(batch)
        built = time.perf_counter()
        sampled: Sequence[SampledToken] = [self._token] * sum(item.samples for item in batch.items)
        before = time.perf_counter()
        self.scheduler.commit(batch, sampled)
        return scheduled - begun, built - scheduled, time.perf_counter() - before


def measure(*, num_seqs: int, num_blocks: int, num_steps: int = 200, aligned: bool = False) -> StepCost:
    """Time decode steps; `aligned`: only those in which every sequence starts a new block."""
    # The outputs must fit in what the prompts leave, or preemption would be measured.
    room = num_blocks // 4 // num_seqs * BLOCK_TOKENS
    run = NullRun(num_seqs=num_seqs, num_blocks=num_blocks, aligned=aligned)
    stride = BLOCK_TOKENS if aligned else 1
    gc.collect()
    times = [run.step() for _ in range(min(num_steps * stride, room))]
    if aligned:
        # In each round of a block, one step takes blocks and one fills them; the more expensive one is the worst case.
        times = [max(times[i : i + stride], key=sum) for i in range(0, len(times), stride)]
    totals = sorted(sum(parts) for parts in times)
    middle = [sorted(part)[len(times) // 2] * 1e3 for part in zip(*times, strict=True)]
    return StepCost(
        num_seqs=num_seqs,
        num_blocks=num_blocks,
        schedule_ms=middle[0],
        inputs_ms=middle[1],
        commit_ms=middle[2],
        total_ms=totals[len(totals) // 2] * 1e3,
        least_ms=totals[0] * 1e3,
        p99_ms=totals[min(len(totals) - 1, len(totals) * 99 // 100)] * 1e3,
    )


def rows(*, num_steps: int = 200) -> list[Row]:
    """Return all figures; the goal applies to the largest batch in the middle pool."""
    found: list[Row] = []
    by_batch: dict[int, float] = {}
    for num_seqs in BATCHES:
        cost = measure(num_seqs=num_seqs, num_blocks=POOLS[1], num_steps=num_steps)
        by_batch[num_seqs] = cost.total_ms
        label = f"{num_seqs} sequences"
        for part in ("schedule", "inputs", "commit"):
            found.append(figure(f"{label}: {part} p50", getattr(cost, f"{part}_ms"), "ms"))
        goal = GOAL_MS if num_seqs == max(BATCHES) else None
        found.append(figure(f"{label}: step p50", cost.total_ms, "ms", at_most=goal))
        found.append(figure(f"{label}: step least", cost.least_ms, "ms"))
        found.append(figure(f"{label}: step p99", cost.p99_ms, "ms"))
    for low, high in itertools.pairwise(BATCHES):
        slope = (by_batch[high] - by_batch[low]) / (high - low) * 1e3
        found.append(figure(f"each sequence more, {low} to {high}", slope, "us"))
    for num_blocks in POOLS:
        cost = measure(num_seqs=16, num_blocks=num_blocks, num_steps=num_steps)
        found.append(figure(f"16 sequences, pool of {num_blocks} blocks: step p50", cost.total_ms, "ms"))
    worst = measure(num_seqs=max(BATCHES), num_blocks=POOLS[1], num_steps=num_steps // 10, aligned=True)
    found.append(figure(f"{worst.num_seqs} sequences, all at a block's end: step p50", worst.total_ms, "ms"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tandem_bench.scheduler.step_cost", description="Scheduling overhead per step."
    )
    parser.add_argument("--steps", type=int, default=200, help="steps per figure")
    options = parser.parse_args()
    report.print_table(Console(highlight=False, width=110), rows(num_steps=options.steps))


if __name__ == "__main__":
    main()
