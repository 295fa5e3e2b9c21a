"""The request rate that a cluster sustains within its objectives, and the best split of the same hardware."""

from collections.abc import Callable
from dataclasses import dataclass

from cluster.simulator.inputs.trace import Trace
from cluster.simulator.model.finished import ttft_s
from cluster.simulator.model.report import HELD_SHARE, Report, Slo, report_on
from cluster.simulator.model.settings import ClusterSpec, PoolSpec
from cluster.simulator.model.simulation import Choosing, Simulation

_MAX_DOUBLINGS = 12
_LOOK_EVERY = 16
"""Number of answers between two checks of the gaps."""
_MARGIN = 1e-9
"""Tolerance for rounding: a time exactly at the bound is in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Load to simulate, whatever the cluster."""

    trace: Trace
    slo: Slo
    choosing: Choosing
    seed: int

    def run(self, spec: ClusterSpec, *, speed: float = 1.0) -> Report:
        """Simulate the trace with arrivals `speed` times as fast; once the SLO is broken the rest is skipped."""
        simulation = Simulation(spec, self.trace.stretched(1.0 / speed), self.choosing, seed=self.seed)
        simulation.is_decided = _Broken(simulation, self.slo)
        simulation.run()
        return report_on(simulation, self.slo, policy=self.choosing.policy, seed=self.seed)


class _Broken:
    """Whether a simulation can no longer meet the SLO, whatever follows: half of all trials end early by this."""

    def __init__(self, simulation: Simulation, slo: Slo) -> None:
        self._outcomes = simulation.router.outcomes
        self._gaps = simulation.workers.gaps
        self._slo = slo
        trace = simulation.trace
        self._most_late = (1.0 - HELD_SHARE) * len(trace.requests) + _MARGIN
        self._most_gaps = (1.0 - HELD_SHARE) * trace.num_output_tokens + _MARGIN
        self._num_seen = 0
        self._num_late = 0

    def __call__(self) -> bool:
        outcomes = self._outcomes
        if outcomes.num_failed:
            return True
        for index in range(self._num_seen, len(outcomes.finished)):
            self._num_late += ttft_s(outcomes.finished[index]) > self._slo.ttft_s + _MARGIN
        self._num_seen = len(outcomes.finished)
        if self._num_late + outcomes.num_rejected > self._most_late:
            return True
        return self._num_seen % _LOOK_EVERY == 0 and self._gaps.num_beyond(self._slo.itl_s) > self._most_gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Highest rate at which a cluster met the SLO."""

    requests_per_s: float
    """Rate offered while the SLO was met; 0 when no rate was found."""
    report: Report | None
    """Report at that rate."""
    breaks: str
    """Objectives that were missed at the next higher rate."""


def capacity(trial: Trial, spec: ClusterSpec, *, halvings: int = 4) -> Capacity:
    """Search for the rate by doubling, then by so many halvings of the interval (4 of a factor 2 give 4 %)."""
    span_s = max(1e-9, trial.trace.span_s)
    offered = len(trial.trace.requests) / span_s
    held: tuple[float, Report] | None = None
    low, high, breaks = 0.0, 0.0, ""
    speed = 1.0
    for _ in range(_MAX_DOUBLINGS):
        report = trial.run(spec, speed=speed)
        if report.held:
            held, low = (speed, report), speed
            if high:
                break
            speed *= 2.0
        else:
            high, breaks = speed, what_breaks(report)
            if low:
                break
            speed /= 2.0
    if held is None:
        return Capacity(requests_per_s=0.0, report=None, breaks=breaks)
    for _ in range(halvings if high else 0):
        speed = (low * high) ** 0.5
        report = trial.run(spec, speed=speed)
        if report.held:
            held, low = (speed, report), speed
        else:
            high, breaks = speed, what_breaks(report)
    return Capacity(requests_per_s=offered * held[0], report=held[1], breaks=breaks)


def what_breaks(report: Report) -> str:
    """Return the objectives that a report misses; for a simulation cut short, those missed by then."""
    broken = []
    if report.num_failed:
        broken.append("answers")
    if report.ttft_within < 0.99:
        broken.append("TTFT")
    if report.itl_within < 0.99:
        broken.append("ITL")
    return " and ".join(broken)


def split(num_workers: int, num_prefill: int, prefill: PoolSpec, decode: PoolSpec, base: ClusterSpec) -> ClusterSpec:
    """Build a cluster of so many equal workers as two pools; without prefill workers it is colocated."""
    return ClusterSpec(
        prefill=None if not num_prefill else _sized(prefill, num_prefill),
        decode=_sized(decode, num_workers - num_prefill),
        network=base.network,
        max_inflight=base.max_inflight,
        admission=base.admission,
    )


def _sized(pool: PoolSpec, num_workers: int) -> PoolSpec:
    return PoolSpec(num_workers=num_workers, engine=pool.engine, latency=pool.latency)


Row = tuple[int, int, Capacity]
"""Number of prefill workers (0: colocated), number of decode workers, and their capacity."""


def sweep(trial: Trial, num_workers: int, make: Callable[[int], ClusterSpec]) -> list[Row]:
    """Measure every ratio, colocated first. `make` builds the cluster with so many prefill workers."""
    return [(p, num_workers - p, capacity(trial, make(p))) for p in range(num_workers)]


def sweep_table(rows: list[Row]) -> str:
    """Render one line per ratio, and the verdict."""
    lines = [
        f"{'P:D':>10}  {'req/s at SLO':>12}  {'p99 TTFT':>9}  {'p99 ITL':>9}  {'hit rate':>8}  first missed beyond it"
    ]
    for num_prefill, num_decode, found in rows:
        name = f"{num_prefill}:{num_decode}" if num_prefill else f"colo {num_decode}"
        report = found.report
        figures = (
            f"{'-':>9}  {'-':>9}  {'-':>8}"
            if report is None
            else f"{report.ttft_ms.p99:6.0f} ms  {report.itl_ms.p99:6.1f} ms  {report.hit_rate:8.4f}"
        )
        lines.append(f"{name:>10}  {found.requests_per_s:12.3f}  {figures}  {found.breaks}")
    lines.append(verdict(rows))
    return "\n".join(lines)


def verdict(rows: list[Row]) -> str:
    """Name the winner, in words."""
    colocated = max((row[2].requests_per_s for row in rows if not row[0]), default=0.0)
    best = max((row for row in rows if row[0]), key=lambda row: row[2].requests_per_s, default=None)
    if best is None or best[2].requests_per_s == colocated == 0.0:
        return "no configuration meets the SLO at any rate tried"
    split_rate, ratio = best[2].requests_per_s, f"{best[0]}:{best[1]}"
    if not colocated or not split_rate:
        winner, loser = (f"disaggregated {ratio}", "colocated") if split_rate else ("colocated", "disaggregated")
        return f"{winner} wins: {loser} meets the SLO at no rate tried"
    if split_rate > colocated:
        return f"disaggregated {ratio} wins: {split_rate / colocated:.2f} times colocated"
    return f"colocated wins: {colocated / split_rate:.2f} times the best ratio ({ratio})"
