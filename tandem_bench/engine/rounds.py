"""Rounds: every engine runs the same job, one after another, and then the next job.

A machine's speed drifts by a factor of two within seconds, so engines are only compared within one round, where they
ran seconds apart; the order rotates by one each round, so that no engine always follows the same one.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from tandem_bench.engine.contestants import PLAIN, TAKES_NO_NEWCOMERS, TANDEM, Contestant
from tandem_bench.engine.workload import PROMPT_TOKENS, Job, Outcome, random_prompts

_SETTLE_S = 0.3
"""Pause between engines: OpenMP threads spin for up to 0.2 s after their last work."""
_NEWCOMERS = 64
_GROWTH = 2.0
"""Estimated slowdown of a step when the batch is four times larger."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """One kind of job."""

    concurrency: int
    prompt_tokens: int
    num_tokens: int
    with_newcomers: bool = False
    """Whether further prompts arrive, one at a time, while the first ones decode."""

    @property
    def label(self) -> str:
        """Name in rows: c16, or c16.p2048 for another length; c16.prefills with newcomers."""
        length = "" if self.prompt_tokens == PROMPT_TOKENS or self.with_newcomers else f".p{self.prompt_tokens}"
        return f"c{self.concurrency}{length}{'.prefills' if self.with_newcomers else ''}"

    def job(self, round_index: int, vocab_size: int) -> Job:
        """Return the round's prompts: new ones each time, the same for all engines."""
        rng = Random(f"bench:engine:{round_index}:{self.label}")
        newcomers = random_prompts(rng, _NEWCOMERS, PROMPT_TOKENS, vocab_size) if self.with_newcomers else ()
        return Job(
            prompts=random_prompts(rng, self.concurrency, self.prompt_tokens, vocab_size),
            num_tokens=self.num_tokens,
            newcomers=newcomers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Result of one engine in one cell and round."""

    contestant: str
    cell: Cell
    round_index: int
    outcome: Outcome
    read_bytes_per_s: float
    """Machine's read bandwidth, the larger of just before and just after: a limit must not be too low."""


class TimeBox:
    """Deadline, with estimates of what still fits before it."""

    def __init__(self, limit_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_s` counts from now; None: no deadline."""
        self._clock = clock
        self._end_s = None if limit_s is None else clock() + limit_s

    @property
    def left_s(self) -> float:
        """Time until the deadline; infinite without one."""
        return float("inf") if self._end_s is None else self._end_s - self._clock()

    def fits(self, cell: Cell, done: Sequence[Measurement]) -> bool:
        """Return whether a job will probably end in time, judged by the nearest one measured; the first always fits."""
        guess_s = guess(cell, done)
        return guess_s is None or guess_s <= self.left_s


def guess(cell: Cell, done: Sequence[Measurement]) -> float | None:
    """Estimate the seconds of a job from the slowest engine's nearest measured job; None when nothing is known."""
    if not done:
        return None
    nearest = min(done, key=lambda seen: abs(seen.cell.concurrency - cell.concurrency))
    seen = nearest.outcome
    growth = _GROWTH if cell.concurrency > nearest.cell.concurrency else 1.0
    step_s = growth * (seen.end_s - seen.prefill_s) / max(1, nearest.cell.num_tokens - 1)
    prefill_s = cell.concurrency * cell.prompt_tokens / seen.prefill_tokens_per_s
    if cell.with_newcomers:
        # At worst, every step also computes a whole prompt.
        step_s += PROMPT_TOKENS / seen.prefill_tokens_per_s
    return prefill_s + cell.num_tokens * step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, how often, and how to report progress."""

    cells: tuple[Cell, ...]
    num_rounds: int
    vocab_size: int
    bandwidth: Callable[[], float]
    note: Callable[[str], None]


async def run_rounds(
    plan: Plan, contestants: Sequence[Contestant], box: TimeBox, *, known: Sequence[Measurement] = ()
) -> list[Measurement]:
    """Return every measurement in order; `known` earlier ones help estimate what fits. Raises CannotMeasure."""
    done: list[Measurement] = []
    for round_index in range(plan.num_rounds):
        turn = round_index % len(contestants)
        order = [*contestants[turn:], *contestants[:turn]]
        for cell in plan.cells:
            if not box.fits(cell, [*known, *done]):
                needs_s = guess(cell, [*known, *done]) or 0.0
                left_s = max(0.0, box.left_s)
                plan.note(f"{cell.label}: skipped: may take {needs_s:.0f} s, {left_s:.0f} s are left; use --full")
                continue
            job = cell.job(round_index, plan.vocab_size)
            for contestant in order:
                if cell.with_newcomers and contestant.name in TAKES_NO_NEWCOMERS:
                    continue
                await asyncio.sleep(_SETTLE_S)
                before, seen, after = plan.bandwidth(), await contestant.run(job), plan.bandwidth()
                measured = Measurement(
                    contestant=contestant.name,
                    cell=cell,
                    round_index=round_index,
                    outcome=seen,
                    read_bytes_per_s=max(before, after),
                )
                done.append(measured)
                plan.note(describe(measured))
    return done


async def warm_up(contestant: Contestant, vocab_size: int, *, concurrency: int) -> None:
    """Run a short job before the first that counts, for compilers, thread pools and page faults."""
    prompts = random_prompts(Random(f"bench:warm:{contestant.name}"), concurrency, 64, vocab_size)
    await contestant.run(Job(prompts=prompts, num_tokens=4))


def describe(measured: Measurement) -> str:
    """Describe a measurement in one line of progress."""
    seen = measured.outcome
    return (
        f"round {measured.round_index + 1} {measured.cell.label} {measured.contestant}: prefill "
        f"{seen.prefill_tokens_per_s:.0f}, decode {seen.decode_tokens_per_s:.1f} tokens/s, "
        f"ITL p99 {1000 * seen.gap_s(99):.0f} ms, machine {measured.read_bytes_per_s / 1e9:.1f} GB/s"
    )


def round_ratios(
    done: Sequence[Measurement], cell: Cell, rate: Callable[[Outcome], float]
) -> Mapping[str, Mapping[int, float]]:
    """Return Tandem's rate over each other engine's, and over the best peer's ("best"), in rounds in which both ran."""
    rounds: dict[int, dict[str, float]] = {}
    for seen in done:
        if seen.cell == cell:
            rounds.setdefault(seen.round_index, {})[seen.contestant] = rate(seen.outcome)
    ratios: dict[str, dict[int, float]] = {}
    for index, rates in rounds.items():
        own = rates.pop(TANDEM, None)
        if own is None:
            continue
        peers = [value for name, value in rates.items() if name != PLAIN]
        for name, value in (*rates.items(), *((("best", max(peers)),) if peers else ())):
            ratios.setdefault(name, {})[index] = own / value
    return ratios
