"""Derives what happened in a period from successive readings of the routers' metrics. Pure.

Counts are compared with those of the last good reading, so a failed reading loses no requests: the next period is
longer. A silent router fails the reading until it has been silent for so long that its clients are assumed to use the
others. So does a router whose counts have fallen: either one of its processes did not answer just now, and the counts
will recover, or it has restarted, and they are counted from there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.planner.histogram import Histogram
from cluster.planner.router_figures import RouterFigures
from cluster.planner.speed import SpeedWatch
from cluster.planner.staffing import WorkerModel
from cluster.planner.values import Demand, Observation, Sizes

_REMEMBERED = 0.8
"""Share of the history of prompt lengths that is kept per period: answers belong to earlier prompts."""
_HIT_WEIGHT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Unseen:
    """Reading that cannot be used, with the reason."""

    why: str


@dataclass(slots=True, kw_only=True)
class _Known:
    figures: RouterFigures
    heard_s: float
    has_fallen: bool = False


class LoadWatch:
    """Observes the load of one cluster's routers."""

    def __init__(self, speed: SpeedWatch, *, ttft_s: float, forget_s: float) -> None:
        """`ttft_s`: the objective. `forget_s`: how long to wait for a silent router."""
        self._speed = speed
        self._ttft_s = ttft_s
        self._forget_s = forget_s
        self._known: dict[str, _Known] = {}
        self._looked_s: float | None = None
        self._prompts = Histogram()
        self._hit_rate = 0.0

    def observe(self, now_s: float, answers: Mapping[str, RouterFigures | str]) -> Observation | Unseen:
        """Return what happened in the period, from each router's figures or the reason there are none."""
        answered = {name: answer for name, answer in answers.items() if isinstance(answer, RouterFigures)}
        self._forget(now_s, answers, answered)
        if trouble := self._trouble(answers, answered):
            return Unseen(why=trouble)
        if not answered:
            return Unseen(why="no router was found")
        before, since_s = self._known, self._looked_s
        self._known = {name: _Known(figures=figures, heard_s=now_s) for name, figures in answered.items()}
        self._looked_s = now_s
        pairs = [(before[name].figures, figures) for name, figures in answered.items() if name in before]
        if since_s is None or not pairs:
            return Unseen(why="first reading: nothing to compare it with yet")
        return self._observation(now_s - since_s, pairs, list(answered.values()))

    def _forget(self, now_s: float, answers: Mapping[str, object], answered: Mapping[str, RouterFigures]) -> None:
        """Drop routers that are no longer listed or have been silent for long."""
        for name in list(self._known):
            known = self._known[name]
            if name in answered:
                known.heard_s = now_s
            elif name not in answers or now_s - known.heard_s > self._forget_s:
                del self._known[name]

    def _trouble(self, answers: Mapping[str, RouterFigures | str], answered: Mapping[str, RouterFigures]) -> str:
        """Return why this reading cannot be used; empty if it can."""
        silent = [f"{name}: {answer}" for name, answer in answers.items() if isinstance(answer, str)]
        if silent and (not answered or any(name in self._known for name in answers.keys() - answered.keys())):
            return "; ".join(silent)
        fallen = []
        for name, known in self._known.items():
            if not answered[name].has_restarted(known.figures):
                known.has_fallen = False
            elif known.has_fallen:
                known.figures = answered[name]
                fallen.append(f"{name} has restarted its counts")
            else:
                known.has_fallen = True
                fallen.append(f"{name}: its counts fell")
        return "; ".join(fallen)

    def _observation(
        self, period_s: float, pairs: Sequence[tuple[RouterFigures, RouterFigures]], now: Sequence[RouterFigures]
    ) -> Observation:
        prompts = _sum([after.prompts.minus(before.prompts) for before, after in pairs])
        answers = _sum([after.answers.minus(before.answers) for before, after in pairs])
        first = _sum([after.first_tokens.minus(before.first_tokens) for before, after in pairs])
        queried = sum(after.queried_tokens - before.queried_tokens for before, after in pairs)
        hits = sum(after.hit_tokens - before.hit_tokens for before, after in pairs)
        num_lost = sum(after.num_lost - before.num_lost for before, after in pairs)
        if queried > 0.0:
            self._hit_rate += _HIT_WEIGHT * (max(0.0, min(1.0, hits / queried)) - self._hit_rate)
        # A histogram with other buckets, such as another version's, is not kept: both would lose precision.
        known = self._prompts if self._prompts.bounds == prompts.bounds else Histogram()
        self._prompts = known.plus(prompts, kept=_REMEMBERED)
        answered = _answered(answers, self._prompts, hits)
        context = answered.context_tokens / answered.output_tokens if answered.output_tokens else None
        self._speed.observe(now, prompt_tokens=self._prompts.moment(1), context_tokens=context)
        worker = self._speed.prefill_worker
        demand = self._arrived(prompts, worker).plus(answered)
        num_decoding, taken_pools = fullness(now, self._speed.decode_worker.kv_tokens)
        return Observation(
            period_s=period_s,
            demand=demand,
            waiting_prompt_seconds=waiting_tokens(now) * worker.prompt_token_s,
            num_late=round(first.above(self._ttft_s) + num_lost),
            num_first=round(first.num + num_lost),
            num_decoding=num_decoding,
            taken_pools=taken_pools,
        )

    def _arrived(self, prompts: Histogram, worker: WorkerModel) -> Demand:
        seconds = [
            (worker.prompt_seconds(int(self._hit_rate * length), max(1, round(length))), count)
            for length, count in prompts.values()
        ]
        return Demand(
            num_requests=prompts.num,
            prompt_tokens=prompts.total * (1.0 - self._hit_rate),
            prompt_seconds=sum(count * one for one, count in seconds),
            prompt_seconds_squared=sum(count * one * one for one, count in seconds),
        )


def waiting_tokens(now: Sequence[RouterFigures]) -> float:
    """Count the tokens of prompts not computed yet, in the routers' queues and on workers, which all routers report."""
    backlog: dict[str, float] = {}
    for figures in now:
        for worker, tokens in figures.backlog_tokens.items():
            backlog[worker] = max(tokens, backlog.get(worker, 0.0))
    return sum(backlog.values()) + sum(figures.queued_tokens for figures in now)


def fullness(now: Sequence[RouterFigures], pool_tokens: int) -> tuple[int, float]:
    """Count the decode workers and the KV they use, in pools, including that of prompts in the routers' queues."""
    taken: dict[str, float] = {}
    for figures in now:
        for worker, share in figures.taken_kv.items():
            taken[worker] = max(share, taken.get(worker, 0.0))
    if not taken:
        return 0, 0.0
    return len(taken), sum(taken.values()) + sum(figures.total_queued_tokens for figures in now) / max(1, pool_tokens)


def live_workers(now: Sequence[RouterFigures]) -> Sizes:
    """Count the workers that routers can send work to; the largest count is right, as other routers may have just
    started.
    """
    return Sizes(
        prefill=max((figures.live.prefill for figures in now), default=0),
        decode=max((figures.live.decode for figures in now), default=0),
    )


def _answered(answers: Histogram, prompts: Histogram, cached_tokens: float) -> Demand:
    """Combine answers and prompts: which prompt an answer had is unknown, so their lengths are taken as independent."""
    prompt, prompt_squared = prompts.moment(1), prompts.moment(2)
    output, squared, cubed = (answers.moment(power) for power in (1, 2, 3))
    return Demand(
        num_answers=answers.num,
        output_tokens=answers.total,
        cached_tokens=cached_tokens,
        context_tokens=answers.num * (output * prompt + squared),
        context_tokens_squared=answers.num * (output * prompt_squared + 2.0 * squared * prompt + cubed),
    )


def _sum(parts: Sequence[Histogram]) -> Histogram:
    whole = Histogram()
    for part in parts:
        whole = whole.plus(part)
    return whole
