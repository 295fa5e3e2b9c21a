"""Runs `tandem simulate` and `tandem plan` with their options."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.simulator.inputs.generated_load import LoadSpec, generate
from cluster.simulator.inputs.latency_files import load_latency
from cluster.simulator.inputs.trace import Trace
from cluster.simulator.inputs.trace_files import load_trace
from cluster.simulator.model.faults import FaultSpec, draw_faults
from cluster.simulator.model.policies import OURS, POLICIES
from cluster.simulator.model.report import Report, Slo, report_on, table
from cluster.simulator.model.settings import ClusterSpec, Network, PoolSpec, engine_config
from cluster.simulator.model.simulation import Choosing, Simulation
from cluster.simulator.studies.capacity import Trial, split, sweep, sweep_table
from cluster.simulator.studies.placement import PlacementCase, compare_placement, placement_table
from cluster.simulator.studies.plan import WorkerKind, plan
from cluster.simulator.studies.plan_text import plan_table
from tandem.errors import ConfigError


def draw(folder: Path, runs: Sequence[tuple[Simulation, Report]]) -> list[Path]:
    """Plot the distributions of time to first token and queueing, and hit rate and goodput by policy.

    ConfigError where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plots needs matplotlib, part of the extra `bench`: pip install '.[bench]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    times = Figure(figsize=(10, 4), layout="constrained")
    for axes, name in zip(times.subplots(1, 2), ("time to first token", "queueing"), strict=True):
        for simulation, report in runs:
            ordered = sorted(
                (r.first_token_s or 0.0) - r.arrived_s if name != "queueing" else (r.queued_s or 0.0)
                for r in simulation.router.outcomes.finished
            )
            shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
            axes.plot(ordered, shares, label=report.policy)
        axes.set(xlabel=f"{name} (s)", ylabel="share of requests", xscale="symlog", ylim=(0, 1))
        axes.legend()
    bars = Figure(figsize=(10, 4), layout="constrained")
    names = [report.policy for _, report in runs]
    left, right = bars.subplots(1, 2)
    left.bar(names, [report.hit_rate for _, report in runs])
    left.set(ylabel="token hit rate")
    right.bar(names, [report.goodput_per_s for _, report in runs])
    right.set(ylabel="goodput at SLO (req/s)")
    for axes in (left, right):
        axes.tick_params(axis="x", rotation=30)
    paths = [folder / "times.png", folder / "policies.png"]
    for figure, path in zip((times, bars), paths, strict=True):
        figure.savefig(path)
    return paths


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of the command line."""

    trace: Path | None = None
    generate: str = ""
    requests: int | None = None
    speed: float = 1.0
    """Factor by which the trace's arrivals are sped up."""
    prefill: int = 1
    decode: int = 1
    slo: str = ""
    policies: tuple[str, ...] = (OURS,)
    latency: str = "example"
    kv_tokens: int = 400_000
    """KV tokens of one worker's pool."""
    max_running: int = 256
    link_gbytes: float = 25.0
    faults: str = ""
    seed: int = 0
    sweep: bool = False
    placement: bool = False
    as_json: bool = False
    plots: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of the command line."""

    load: SimulateOptions
    """Options of trace, objectives and seed."""
    workers: tuple[str, ...]
    batch_limits: tuple[int, ...] = (256,)
    max_gpus: int = 64


def plan_cluster(options: PlanOptions) -> str:
    """Search for the cheapest cluster, and return the report. ConfigError for options that contradict each other."""
    if not options.workers or not options.batch_limits or min(options.batch_limits) < 1:
        raise ConfigError("give at least one --worker (kind of worker) and --batch (sequences per step)")
    load = options.load
    trial = Trial(trace=load_of(load).spread(), slo=Slo.parse(load.slo), choosing=Choosing(), seed=load.seed)
    kinds = [WorkerKind.parse(text) for text in options.workers]
    plans = plan(trial, kinds, options.batch_limits, max_gpus=options.max_gpus)
    if not load.as_json:
        return plan_table(plans, trial.trace, trial.slo)
    rows = [
        {"design": p.design.name, "prefill": p.sizes[0], "decode": p.sizes[1], "gpus": p.gpus, "why": list(p.why)}
        | {"report": None if p.report is None else p.report.as_dict()}
        for p in plans
    ]
    return json.dumps(rows, indent=2)


def simulate(options: SimulateOptions) -> str:
    """Run the simulation, and return the report. ConfigError for options that contradict each other."""
    policies = POLICIES if "all" in options.policies else options.policies
    if unknown := set(policies) - set(POLICIES):
        raise ConfigError(f"--policy must be one of {', '.join(POLICIES)} or all, not {', '.join(sorted(unknown))}")
    trace = load_of(options)
    if options.placement:
        return _placement(options, trace, policies)
    slo = Slo.parse(options.slo)
    if options.sweep:
        return _sweep(options, trace, slo, policies)
    runs = [_run(options, trace, slo, policy) for policy in policies]
    reports = [report for _, report in runs]
    if options.plots is not None:
        draw(options.plots, runs)
    return _as_json(reports) if options.as_json else table(reports)


def cluster_of(options: SimulateOptions, block_tokens: int) -> ClusterSpec:
    """Build the cluster that the options describe."""
    if options.decode < 1 or options.prefill < 0:
        raise ConfigError("--decode must be at least 1 and --prefill at least 0 (colocated)")
    latency = load_latency(options.latency)
    num_blocks = max(2, options.kv_tokens // block_tokens)

    def pool(num_workers: int, *, max_step_s: float | None) -> PoolSpec:
        engine = engine_config(
            num_blocks=num_blocks,
            block_size=block_tokens,
            max_running_requests=options.max_running,
            max_step_s=max_step_s,
        )
        return PoolSpec(num_workers=num_workers, engine=engine, latency=latency)

    return ClusterSpec(
        prefill=pool(options.prefill, max_step_s=None) if options.prefill else None,
        # Decode workers have streaming clients, so a prefill chunk in their steps is bounded by the ITL objective.
        decode=pool(options.decode, max_step_s=Slo.parse(options.slo).itl_s),
        network=Network(link_bytes_per_s=options.link_gbytes * 1e9),
    )


def load_of(options: SimulateOptions) -> Trace:
    """Build the requests that the options describe."""
    if (options.trace is None) == (not options.generate):
        raise ConfigError("give either --trace or --generate")
    if options.speed <= 0.0:
        raise ConfigError(f"--speed must be above 0, not {options.speed}")
    if options.trace is not None:
        trace = load_trace(options.trace)
    else:
        trace = generate(LoadSpec.parse(options.generate), options.seed)
    if options.requests is not None:
        trace = trace.first(options.requests)
    return trace.stretched(1.0 / options.speed)


def _run(options: SimulateOptions, trace: Trace, slo: Slo, policy: str) -> tuple[Simulation, Report]:
    spec = cluster_of(options, trace.block_tokens)
    simulation = Simulation(spec, trace, Choosing(policy=policy), seed=options.seed)
    for fault in draw_faults(FaultSpec.parse(options.faults), spec, trace.span_s, options.seed):
        simulation.strike(fault)
    simulation.run()
    return simulation, report_on(simulation, slo, policy=policy, seed=options.seed)


def _placement(options: SimulateOptions, trace: Trace, policies: tuple[str, ...]) -> str:
    result = compare_placement(trace, PlacementCase(num_workers=options.prefill), policies, seed=options.seed)
    if not options.as_json:
        return placement_table(result)
    shares = {report.policy: result.share_of_ideal(report) for report in result.reports}
    figures = {"shared_cache_hit_rate": result.ideal.hit_rate, "share_of_shared_cache": shares}
    return json.dumps({**figures, "reports": [report.as_dict() for report in result.reports]}, indent=2)


def _sweep(options: SimulateOptions, trace: Trace, slo: Slo, policies: tuple[str, ...]) -> str:
    spec = cluster_of(options, trace.block_tokens)
    num_workers = options.prefill + options.decode
    prefill, decode = spec.prefill or spec.decode, spec.decode
    if prefill is None or decode is None:
        raise ConfigError("--sweep needs workers")
    trial = Trial(trace=trace.spread(), slo=slo, choosing=Choosing(policy=policies[0]), seed=options.seed)
    rows = sweep(trial, num_workers, lambda p: split(num_workers, p, prefill, decode, spec))
    if not options.as_json:
        return sweep_table(rows)
    return json.dumps(
        [
            {"prefill": p, "decode": d, "requests_per_s": c.requests_per_s, "breaks": c.breaks}
            | {"report": None if c.report is None else c.report.as_dict()}
            for p, d, c in rows
        ],
        indent=2,
    )


def _as_json(reports: list[Report]) -> str:
    return json.dumps([report.as_dict() for report in reports], indent=2)
