"""Placement alone: how near a policy comes to one shared cache of all workers' memory, and what queueing it costs.

There are eight prefill workers with 10,000 blocks each. A prompt token takes the same time wherever it is, so
utilisation is exact: tokens not found in the shared cache, divided by what all workers can compute between the first
arrival and the last. A policy that finds less than the shared cache works above that utilisation, or never catches up.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.simulator.inputs.latency import StepLatency
from cluster.simulator.inputs.trace import Trace
from cluster.simulator.model.policies import OURS
from cluster.simulator.model.report import Report, Slo, report_on
from cluster.simulator.model.settings import ClusterSpec, PoolSpec, engine_config, unlimited_admission
from cluster.simulator.model.simulation import Choosing, Simulation
from cluster.simulator.studies.shared_cache_bound import SharedCache, shared_cache, utilised
from router.placement.costs import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementCase:
    """Setting in which the policies are compared."""

    num_workers: int = 8
    num_blocks: int = 10_000
    utilisation: float = 0.75
    prompt_tokens_per_s: float = 8_000.0
    """Prompt tokens per second of one worker."""
    model: CostModel = field(default_factory=lambda: CostModel(local_prefill_tokens=0))
    """Cost model of our own policy. There is no decoding here, so no prompt may be computed by a decode worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementResult:
    """Reports of one trace under all policies."""

    ideal: SharedCache
    reports: tuple[Report, ...]

    def share_of_ideal(self, report: Report) -> float:
        """Return the share of the shared cache's hit rate; 1 when nothing is shared."""
        return report.hit_rate / self.ideal.hit_rate if self.ideal.hit_rate else 1.0


def compare_placement(trace: Trace, case: PlacementCase, policies: Iterable[str], *, seed: int) -> PlacementResult:
    """Run the trace's prompts under each policy, at the same arrival times."""
    prompts = trace.prompts_only()
    latency = StepLatency(prompt_token_s=1.0 / case.prompt_tokens_per_s)
    ideal = shared_cache(prompts, case.num_blocks * case.num_workers)
    prompts = utilised(prompts, ideal, latency, num_workers=case.num_workers, share=case.utilisation)
    engine = engine_config(num_blocks=case.num_blocks, block_size=trace.block_tokens)
    pool = PoolSpec(num_workers=case.num_workers, engine=engine, latency=latency)
    spec = ClusterSpec(prefill=pool, decode=None, admission=unlimited_admission())
    reports = [_run(spec, prompts, Choosing(policy=policy, model=case.model), seed) for policy in policies]
    return PlacementResult(ideal=ideal, reports=tuple(reports))


def _run(spec: ClusterSpec, trace: Trace, choosing: Choosing, seed: int) -> Report:
    simulation = Simulation(spec, trace, choosing, seed=seed)
    simulation.run()
    return report_on(simulation, Slo(), policy=choosing.policy, seed=seed)


def placement_table(result: PlacementResult) -> str:
    """Render one line per policy, after the shared cache."""
    lines = [
        f"{'':15} {'hit rate':>9} {'of shared':>10}"
        f" {'queue p50':>11} {'queue p99':>11} {'TTFT p50':>11} {'TTFT p99':>11}",
        f"{'shared cache':15} {result.ideal.hit_rate:9.4f} {1:10.2%}",
    ]
    for report in result.reports:
        name = f"{report.policy} (ours)" if report.policy == OURS else report.policy
        times = (report.queue_ms.median, report.queue_ms.p99, report.ttft_ms.median, report.ttft_ms.p99)
        cells = "".join(f" {ms / 1e3:9.2f} s" for ms in times)
        lines.append(f"{name:15} {report.hit_rate:9.4f} {result.share_of_ideal(report):10.2%}{cells}")
    return "\n".join(lines)
