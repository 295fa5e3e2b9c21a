"""Results of a simulation: the table that vLLM's serving benchmark prints, and figures that only a simulator has.

Goodput counts requests per second whose first token met the TTFT target and whose mean time per further token met the
ITL target. `held` also checks the share of all first tokens, and of all gaps, that met its target; a rejected request
has missed the TTFT target.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from cluster.simulator.model.finished import FinishedRequest, ttft_s
from cluster.simulator.model.gap_histogram import GapHistogram, percentile, share_within
from cluster.simulator.model.simulation import Simulation
from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole

HELD_SHARE = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency objectives for clients."""

    ttft_s: float = 2.0
    itl_s: float = 0.1

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Parse `ttft=2,itl=0.1`, in seconds. ConfigError for anything else."""
        try:
            parts = dict(part.split("=", 1) for part in text.split(",") if part)
            unknown = parts.keys() - {"ttft", "itl"}
            if unknown:
                raise ValueError(f"unknown {', '.join(sorted(unknown))}")
            values = {f"{name}_s": float(value) for name, value in parts.items()}
        except ValueError as error:
            raise ConfigError(f"--slo must be ttft=SECONDS,itl=SECONDS, not {text!r}: {error}") from error
        if any(not value > 0.0 for value in values.values()):
            raise ConfigError(f"--slo: targets must be above 0, not {text!r}")
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles of latencies, in milliseconds."""

    mean: float
    median: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Usage of one pool."""

    num_workers: int
    busy_share: float
    """Share of all its workers' time from the first arrival to the last end."""
    prompt_tokens: int
    """Prompt tokens that were computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Figures of one simulation. The same seed gives the same bytes."""

    trace: str
    policy: str
    seed: int
    num_requests: int
    num_finished: int
    num_rejected: int
    num_failed: int
    num_retries: int
    num_preemptions: int
    duration_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    """Share of prompt tokens that were cached where the prompt was computed."""
    queue_ms: Spread
    """Time from arrival at the router until the prompt's first step starts."""
    ttft_ms: Spread
    tpot_ms: Spread
    itl_ms: Spread
    e2e_ms: Spread
    slo_ttft_ms: float
    slo_itl_ms: float
    goodput_per_s: float
    ttft_within: float
    """Share of all requests that have ended."""
    itl_within: float
    kv_gbytes_moved: float
    pools: dict[str, PoolUse]

    @property
    def held(self) -> bool:
        """Whether no request failed, and 99 % of first tokens and of gaps were in time."""
        return not self.num_failed and self.ttft_within >= HELD_SHARE and self.itl_within >= HELD_SHARE

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "held": self.held}


def report_on(simulation: Simulation, slo: Slo, *, policy: str, seed: int) -> Report:
    """Build the report of a simulation that has run."""
    outcomes, trace = simulation.router.outcomes, simulation.trace
    finished = list(outcomes.finished.in_order())
    start_s = trace.requests[0].arrival_s
    duration_s = max(1e-9, max((r.finished_s for r in finished), default=start_s) - start_s)
    ttft = sorted(map(ttft_s, finished))
    tpot = sorted(_tpot_s(request) for request in finished if request.wanted.num_output_tokens > 1)
    num_good = sum(ttft_s(r) <= slo.ttft_s and _tpot_s(r) <= slo.itl_s for r in finished)
    num_prompt_tokens = sum(r.wanted.num_prompt_tokens for r in finished)
    gaps = simulation.workers.gaps
    return Report(
        trace=trace.name,
        policy=policy,
        seed=seed,
        num_requests=len(trace.requests),
        num_finished=len(finished),
        num_rejected=outcomes.num_rejected,
        num_failed=outcomes.num_failed,
        num_retries=outcomes.num_retries,
        num_preemptions=simulation.workers.num_preemptions,
        duration_s=duration_s,
        requests_per_s=len(finished) / duration_s,
        prompt_tokens_per_s=num_prompt_tokens / duration_s,
        output_tokens_per_s=sum(r.wanted.num_output_tokens for r in finished) / duration_s,
        hit_rate=sum(r.cached_tokens or 0 for r in finished) / max(1, num_prompt_tokens),
        queue_ms=_spread(sorted(r.queued_s or 0.0 for r in finished)),
        ttft_ms=_spread(ttft),
        tpot_ms=_spread(tpot),
        itl_ms=_gap_spread(gaps),
        e2e_ms=_spread(sorted(r.finished_s - r.arrived_s for r in finished)),
        slo_ttft_ms=slo.ttft_s * 1e3,
        slo_itl_ms=slo.itl_s * 1e3,
        goodput_per_s=num_good / duration_s,
        ttft_within=share_within([*ttft, *[inf] * (outcomes.num_rejected + outcomes.num_failed)], slo.ttft_s),
        itl_within=gaps.share_within(slo.itl_s),
        kv_gbytes_moved=simulation.workers.handoffs.num_kv_bytes / 1e9,
        pools=_pools(simulation, duration_s),
    )


def table(reports: Sequence[Report]) -> str:
    """Render all reports side by side, one column each."""
    rows = [("", [report.policy for report in reports])]
    rows += [(name, [f"{value(report):{form}}" for report in reports]) for name, form, value in _ROWS]
    first = max(len(name) for name, _ in rows)
    widths = [max(len(row[i]) for _, row in rows) for i in range(len(reports))]
    return "\n".join(
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, cells in rows
    )


_Row = tuple[str, str, Callable[[Report], float]]
"""Name of a line, format of its figures, and function that returns them."""


def _spread_rows(name: str, of: Callable[[Report], Spread]) -> list[_Row]:
    return [
        (f"mean {name} (ms)", ".1f", lambda r: of(r).mean),
        (f"median {name} (ms)", ".1f", lambda r: of(r).median),
        (f"p99 {name} (ms)", ".1f", lambda r: of(r).p99),
    ]


_ROWS: tuple[_Row, ...] = (
    ("successful requests", "d", lambda r: r.num_finished),
    ("rejected, failed", "d", lambda r: r.num_rejected + r.num_failed),
    ("duration (s)", ".1f", lambda r: r.duration_s),
    ("request throughput (req/s)", ".3f", lambda r: r.requests_per_s),
    ("output throughput (tok/s)", ".1f", lambda r: r.output_tokens_per_s),
    ("total throughput (tok/s)", ".1f", lambda r: r.output_tokens_per_s + r.prompt_tokens_per_s),
    ("goodput at SLO (req/s)", ".3f", lambda r: r.goodput_per_s),
    ("TTFT within SLO", ".2%", lambda r: r.ttft_within),
    ("ITL within SLO", ".2%", lambda r: r.itl_within),
    ("token hit rate", ".4f", lambda r: r.hit_rate),
    *_spread_rows("queue", lambda r: r.queue_ms),
    *_spread_rows("TTFT", lambda r: r.ttft_ms),
    *_spread_rows("TPOT", lambda r: r.tpot_ms),
    *_spread_rows("ITL", lambda r: r.itl_ms),
    *_spread_rows("E2E", lambda r: r.e2e_ms),
    ("preemptions", "d", lambda r: r.num_preemptions),
    ("retries", "d", lambda r: r.num_retries),
    ("KV moved (GB)", ".2f", lambda r: r.kv_gbytes_moved),
)


def _pools(simulation: Simulation, duration_s: float) -> dict[str, PoolUse]:
    return {
        role.value: PoolUse(
            num_workers=pool.num_workers,
            busy_share=sum(worker.busy_s for worker in workers) / (pool.num_workers * duration_s),
            prompt_tokens=sum(worker.num_prompt_tokens for worker in workers),
        )
        for role, pool in ((WorkerRole.PREFILL, simulation.spec.prefill), (WorkerRole.DECODE, simulation.spec.decode))
        if pool is not None and (workers := [w for w in simulation.workers.all if w.info.role is role])
    }


def _tpot_s(request: FinishedRequest) -> float:
    """Return the mean time per token after the first."""
    return (request.finished_s - request.arrived_s - ttft_s(request)) / max(1, request.wanted.num_output_tokens - 1)


def _spread(ordered: Sequence[float]) -> Spread:
    return Spread(
        mean=1e3 * sum(ordered) / max(1, len(ordered)),
        median=1e3 * percentile(ordered, 50),
        p99=1e3 * percentile(ordered, 99),
    )


def _gap_spread(gaps: GapHistogram) -> Spread:
    return Spread(mean=1e3 * gaps.mean_s, median=1e3 * gaps.percentile(50), p99=1e3 * gaps.percentile(99))


def best(reports: Iterable[Report]) -> Report | None:
    """Return the report with the highest goodput of those that meet the SLO; None when none does."""
    return max((report for report in reports if report.held), key=lambda report: report.goodput_per_s, default=None)
