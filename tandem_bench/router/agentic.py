"""Placement under agents' load: sessions that grow call by call, with pauses while tools run; in the simulator.

Tandem against exact affinity (always the worker with the longest cached prefix), approximate indexes as SGLang's and
Dynamo's routers keep them, and placement without an index, with the same engines, admission and arrivals. Growth and
answers have the lengths of `AgenticSpec`, or those of a trace that the command line names.
The sum over all seeds is judged: a hit rate and a p99 of first tokens no worse than any other's.
"""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from cluster.simulator.command import SimulateOptions, cluster_of
from cluster.simulator.inputs.agentic_load import AgenticSpec, calibrated, generate_agentic
from cluster.simulator.inputs.trace_files import load_trace
from cluster.simulator.model.policies import OURS
from cluster.simulator.model.report import Report, Slo, report_on
from cluster.simulator.model.simulation import Choosing, Simulation
from tandem.errors import ConfigError
from tandem_bench.report import Row, figure

AFFINE = ("longest_prefix", "sglang", "approximate")
"""Policies with an index: exact, approximate without and with a time to live."""
POLICIES = (OURS, *AFFINE, "round_robin", "least_load")
SEEDS = (1, 2)
_SLO = Slo(ttft_s=1.0, itl_s=0.05)
_EQUAL_SHARE = 0.01
"""Figures of one seed differ by more than this from those of another."""


def spec_of(requests: int, trace: Path | None) -> AgenticSpec:
    """Return the load of so many requests. Raises ConfigError when the trace cannot be used."""
    spec = AgenticSpec(requests=requests)
    if trace is None:
        return spec
    found = calibrated(spec, load_trace(trace))
    if found is spec:
        raise ConfigError(f"--trace: {trace} has too few requests that continue another")
    return found


def describe(spec: AgenticSpec, trace: Path | None) -> str:
    """Say where the lengths come from, and what they are."""
    source = "built in" if trace is None else f"from {trace}"
    growth, answer = spec.growth.median, spec.output.median
    return f"agentic: lengths {source}; medians: growth {growth:.0f}, answers {answer:.0f} tokens"


def rows(spec: AgenticSpec, *, seeds: Sequence[int] = SEEDS, policies: Sequence[str] = POLICIES) -> list[Row]:
    """Simulate the load for each policy and seed."""
    found = {policy: [run(spec, policy, seed) for seed in seeds] for policy in policies}
    others = [found[policy] for policy in policies if policy in AFFINE]
    made: list[Row] = []
    for policy, reports in found.items():
        ours = policy == OURS and bool(others)
        least_hits = max(map(_hit_rate, others)) * (1.0 - _EQUAL_SHARE) if ours else None
        most_ms = min(map(_p99_ms, others)) * (1.0 + _EQUAL_SHARE) if ours else None
        made += [
            figure(f"agentic.{policy}.hit_rate", _hit_rate(reports), "", at_least=least_hits),
            figure(f"agentic.{policy}.ttft_p50", fmean(report.ttft_ms.median for report in reports), "ms"),
            figure(f"agentic.{policy}.ttft_p99", _p99_ms(reports), "ms", at_most=most_ms),
            figure(f"agentic.{policy}.goodput", fmean(report.goodput_per_s for report in reports), "1/s"),
        ]
    return made


def run(spec: AgenticSpec, policy: str, seed: int) -> Report:
    """Simulate one policy with four prefill and six decode workers."""
    trace = generate_agentic(spec, seed)
    options = SimulateOptions(prefill=4, decode=6, kv_tokens=600_000, seed=seed)
    simulation = Simulation(cluster_of(options, trace.block_tokens), trace, Choosing(policy=policy), seed=seed)
    simulation.run()
    return report_on(simulation, _SLO, policy=policy, seed=seed)


def _hit_rate(reports: Sequence[Report]) -> float:
    return fmean(report.hit_rate for report in reports)


def _p99_ms(reports: Sequence[Report]) -> float:
    return fmean(report.ttft_ms.p99 for report in reports)
