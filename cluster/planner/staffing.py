"""Queueing formulas: workers that a steady load requires. `cluster.planner.planner` decides how many there will be.

They stand in for simulation and take microseconds.

Prefill is a queue with several servers. The share of prompts that wait longer than the objective allows is taken from
Erlang's C for the probability of waiting at all, and an exponential tail scaled by the variability of the times between
arrivals and of service (Allen and Cunneen; Whitt 1993). Decode serves all sequences at once, only more slowly: by
Little's law the number of sequences is the number that arrives while one is answered, with Poisson scatter; there are
enough workers once a step takes no longer than the objective and the KV pools are not full.
"""

from dataclasses import dataclass, replace
from math import exp, inf, sqrt

from cluster.planner.values import Demand, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """Latency model of one worker: from the simulator's profiles, or from live measurements."""

    step_s: float
    prompt_token_s: float
    pair_s: float
    row_s: float
    context_token_s: float
    chunk_tokens: int
    kv_tokens: int
    max_running: int

    def scaled(self, factor: float) -> "WorkerModel":
        """Return a model that takes so many times as long for everything."""
        return replace(
            self,
            step_s=factor * self.step_s,
            prompt_token_s=factor * self.prompt_token_s,
            pair_s=factor * self.pair_s,
            row_s=factor * self.row_s,
            context_token_s=factor * self.context_token_s,
        )

    def prompt_seconds(self, num_cached: int, num_tokens: int) -> float:
        """Return the time of a prompt that is computed alone."""
        computed = num_tokens - num_cached
        pairs = computed * (num_cached + num_tokens + 1) / 2
        num_steps = -(-computed // self.chunk_tokens)
        return self.step_s * num_steps + self.prompt_token_s * computed + self.pair_s * pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """Latency objectives, in seconds."""

    ttft_s: float
    itl_s: float
    late_share: float = 0.01
    """Share of first tokens that may exceed `ttft_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """Margins for what the formulas do not model."""

    burstiness: float = 1.0
    """Squared coefficient of variation of the times between arrivals; 1 is Poisson."""
    late_share: float = 0.05
    """Share of prompts for which the prefill pool may be too slow: decode workers with spare time compute them."""
    spread: float = 0.5
    """Standard deviations above the mean number of sequences that decode workers must have room for."""
    imbalance: float = 0.95
    """Share of the decode workers' capacity that can be used, as no two are filled equally."""
    transfer_s: float = 0.3
    """Part of the TTFT objective for hops, transfer, and waiting for a decode worker."""


class Staffing:
    """Computes pool sizes for a load."""

    def __init__(self, worker: WorkerModel, targets: LatencyTargets, margins: Margins) -> None:
        self.worker = worker
        self.targets = targets
        self.margins = margins

    def sizes(self, rate: float, demand: Demand, *, backlog_s: float = 0.0, most: int = 1024) -> Sizes:
        """Return the sizes for a request rate of this kind; `backlog_s`: further work due within the TTFT objective."""
        return Sizes(prefill=self.prefill(rate, demand, backlog_s, most), decode=self.decode(rate, demand, most))

    def prefill(self, rate: float, demand: Demand, backlog_s: float, most: int) -> int:
        """Return the number of prefill workers with which few enough prompts wait too long."""
        if not demand.num_requests or rate <= 0.0:
            return 1
        mean_s = demand.prompt_seconds / demand.num_requests
        variance = max(0.0, demand.prompt_seconds_squared / demand.num_requests - mean_s * mean_s)
        if mean_s <= 0.0:
            return 1
        erlangs = rate * mean_s + backlog_s / max(self.targets.ttft_s, 1e-9)
        variability = (self.margins.burstiness + variance / (mean_s * mean_s)) / 2
        # A prompt's own computation counts towards the objective: that of a long one, a standard deviation above the
        # mean.
        left_s = self.targets.ttft_s - self.margins.transfer_s - mean_s - sqrt(variance)
        left_s = max(left_s, 0.1 * self.targets.ttft_s)
        for count in range(max(1, int(erlangs)), most):
            if late_share(count, erlangs, mean_s * variability, left_s) <= self.margins.late_share:
                return count
        return most

    def decode(self, rate: float, demand: Demand, most: int) -> int:
        """Return the number of decode workers for short enough steps and enough KV, except in rare crowds."""
        if not demand.num_answers or rate <= 0.0 or not demand.output_tokens:
            return 1
        return next((count for count in range(1, most) if self._decodes(count, rate, demand)), most)

    def _decodes(self, count: int, rate: float, demand: Demand) -> bool:
        worker, spread = self.worker, self.margins.spread
        output = demand.output_tokens / demand.num_answers
        context = demand.context_tokens / demand.output_tokens
        context_squared = demand.context_tokens_squared / demand.output_tokens
        step_s = self._settled_step_s(rate * output / count, context)
        if step_s is None:
            return False
        rows = rate * output * step_s
        tokens = rows * context + spread * sqrt(rows * context_squared)
        crowd = rows + spread * sqrt(rows)
        room = count * self.margins.imbalance
        crowded_s = worker.step_s + worker.row_s * crowd / room + worker.context_token_s * tokens / room
        fits = tokens <= room * worker.kv_tokens and crowd <= room * worker.max_running
        return fits and crowded_s <= self.targets.itl_s

    def _settled_step_s(self, tokens_per_s: float, context: float) -> float | None:
        """Return a worker's step time at this token rate; None if it would grow without bound.

        The step time is `base + slope * rows`, with `tokens_per_s * step` rows.
        """
        slope = tokens_per_s * (self.worker.row_s + self.worker.context_token_s * context)
        return self.worker.step_s / (1.0 - slope) if slope < 1.0 else None


def late_share(count: int, erlangs: float, mean_s: float, left_s: float) -> float:
    """Return the share of arrivals that wait longer than `left_s`; 1 if the servers cannot keep up."""
    if erlangs >= count:
        return 1.0
    return chance_to_wait(count, erlangs) * exp(-left_s * (count - erlangs) / mean_s) if mean_s > 0.0 else 0.0


def chance_to_wait(count: int, erlangs: float) -> float:
    """Compute Erlang's C by the recursion of Erlang's B, so that no factorial overflows."""
    if erlangs <= 0.0:
        return 0.0
    inverse = 1.0
    for servers in range(1, count + 1):
        inverse = 1.0 + inverse * servers / erlangs
        if inverse == inf:
            return 0.0
    blocked = 1.0 / inverse
    load = erlangs / count
    return blocked / (1.0 - load * (1.0 - blocked))
