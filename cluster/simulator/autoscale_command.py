"""`tandem autoscale --dry-run` with a simulated load: runs a planner over a day, and explains each decision."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster.planner.planner import Planner
from cluster.planner.staffing import LatencyTargets, Margins, Staffing
from cluster.planner.values import Demand, PlannerPolicy, Sizes
from cluster.simulator.command import SimulateOptions, cluster_of, load_of
from cluster.simulator.inputs.day import HOURS, DaySpec, day_trace
from cluster.simulator.inputs.trace import Trace
from cluster.simulator.inputs.trace_files import load_trace
from cluster.simulator.model.report import Slo
from cluster.simulator.model.settings import ClusterSpec
from cluster.simulator.studies.elastic import Change, Elastic, ElasticReport, run_elastic, worker_model
from cluster.simulator.studies.fleet import FleetTiming
from cluster.simulator.studies.schedule import BestSchedule, ScheduleSearch
from tandem.errors import ConfigError

_MAX_LEAD_S = 60.0
_SCHEDULE_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleOptions:
    """Options of the command line."""

    is_dry_run: bool = False
    chat: Path | None = None
    """Traces of a day; without them, the other options describe the load."""
    long: Path | None = None
    hour_s: float = 3600.0
    period_s: float = 15.0
    """Seconds between two rounds of the planner."""
    timing: FleetTiming = field(default_factory=FleetTiming)
    hold_s: float = 300.0
    """Hold time; a third of it applies to flips, and the cooldown is two periods."""
    most_workers: int = 64
    least: Sizes = field(default_factory=lambda: Sizes(prefill=1, decode=1))
    first: Sizes = field(default_factory=lambda: Sizes(prefill=1, decode=1))
    against_best: bool = False
    """Also search for the best fixed schedule, with as many windows as a day has hours."""

    def policy(self) -> PlannerPolicy:
        return PlannerPolicy(
            least=self.least,
            most_workers=self.most_workers,
            start_s=self.timing.start_s,
            hold_s=self.hold_s,
            flip_hold_s=self.hold_s / 3.0,
            cooldown_s=2.0 * self.period_s,
        )


def autoscale_day(load: SimulateOptions, options: AutoscaleOptions) -> str:
    """Run the planner over the load, and return the report. ConfigError for options that contradict each other."""
    if not options.is_dry_run:
        raise ConfigError("a simulated load needs --dry-run; to scale a running cluster, give no load")
    trace = _trace(load, options)
    slo, spec = Slo.parse(load.slo), cluster_of(load, trace.block_tokens)
    elastic = Elastic(trace=trace, slo=slo, spec=spec, timing=options.timing, period_s=options.period_s, seed=load.seed)
    staffing = staffing_for(spec, slo)
    planner = Planner(staffing, options.policy(), period_s=options.period_s)
    result = run_elastic(elastic, planner, options.first)
    best = _best(elastic, staffing) if options.against_best else None
    return _as_json(result, best) if load.as_json else _words(result, best)


def _trace(load: SimulateOptions, options: AutoscaleOptions) -> Trace:
    if options.chat is None and options.long is None:
        return load_of(load)
    if options.chat is None or options.long is None or load.trace is not None or load.generate:
        raise ConfigError("a day needs both --chat and --long, and no other load")
    return day_trace(DaySpec(hour_s=options.hour_s), load_trace(options.chat), load_trace(options.long))


def staffing_for(spec: ClusterSpec, slo: Slo) -> Staffing:
    """Return what the planner knows of the workers whose pools it sizes."""
    if spec.decode is None:
        raise ConfigError("a planner needs a pool of decode workers")
    return Staffing(worker_model(spec.decode), LatencyTargets(ttft_s=slo.ttft_s, itl_s=slo.itl_s), Margins())


def hindsight(staffing: Staffing, window: Trace) -> Sizes:
    """Return the sizes that the formulas require for a window's load with nothing cached: where the search starts."""
    demand = Demand()
    for request in window.requests:
        seconds = staffing.worker.prompt_seconds(0, request.num_prompt_tokens)
        output, length = request.num_output_tokens, request.num_prompt_tokens + request.num_output_tokens
        one = Demand(
            num_requests=1,
            prompt_tokens=request.num_prompt_tokens,
            prompt_seconds=seconds,
            prompt_seconds_squared=seconds * seconds,
            num_answers=1,
            output_tokens=output,
            context_tokens=output * length,
            context_tokens_squared=output * length**2,
        )
        demand = demand.plus(one)
    return staffing.sizes(len(window.requests) / max(window.span_s, 1e-9), demand)


def _best(elastic: Elastic, staffing: Staffing) -> BestSchedule:
    # Slightly longer than the day's part, so that the last window contains the last request.
    window_s = elastic.trace.requests[-1].arrival_s / HOURS * (1.0 + 1e-9)
    search = ScheduleSearch(
        elastic=replace(elastic, period_s=min(elastic.period_s, _SCHEDULE_PERIOD_S)),
        window_s=window_s,
        lead_s=min(window_s, _MAX_LEAD_S),
        guess=lambda window: hindsight(staffing, window),
        say=_quietly,
    )
    return search.run()


def _quietly(_text: str) -> None:
    """Ignore the search's progress; only its result is printed."""


def _words(result: ElasticReport, best: BestSchedule | None) -> str:
    report = result.report
    lines = [_change(change) for change in result.changes]
    lines += [
        f"SLO {'held' if report.held else 'BROKEN'}: TTFT within {report.slo_ttft_ms:g} ms {report.ttft_within:.2%}, "
        f"ITL within {report.slo_itl_ms:g} ms {report.itl_within:.2%}; {report.num_requests} requests, "
        f"{report.num_rejected} rejected, {report.num_failed} failed",
        f"{result.machine_hours:.2f} machine-hours; {result.num_flips} flips, {result.num_starts} starts, "
        f"{result.num_stops} stops",
    ]
    if best is not None:
        lines += [
            f"best fixed schedule found: {best.verified.machine_hours:.2f} machine-hours, {best.machine_hours:.2f} by "
            f"the sizes alone ({best.num_simulated} windows simulated): {' '.join(map(str, best.windows))}",
            f"the planner uses {result.machine_hours / best.verified.machine_hours:.3f} times as many, "
            f"{result.machine_hours / best.machine_hours:.3f} times that of the sizes alone",
        ]
    return "\n".join(lines)


def _change(change: Change) -> str:
    minutes, decision = change.at_s / 60.0, change.decision
    actions = ", ".join(map(str, decision.actions))
    return f"{minutes:8.2f} min  {change.sizes!s:>7}  {actions}  ({'; '.join(decision.reasons)})"


def _as_json(result: ElasticReport, best: BestSchedule | None) -> str:
    report = result.report.as_dict()
    # These figures assume pools of constant size, so they would be wrong here.
    del report["pools"]
    figures = {
        "report": report,
        "machine_hours": result.machine_hours,
        "flips": result.num_flips,
        "starts": result.num_starts,
        "stops": result.num_stops,
        "changes": [
            {"at_s": c.at_s, "sizes": str(c.sizes), "actions": [str(a) for a in c.decision.actions]}
            | {"reasons": list(c.decision.reasons)}
            for c in result.changes
        ],
    }
    if best is not None:
        figures["best_fixed"] = {
            "machine_hours": best.verified.machine_hours,
            "machine_hours_of_sizes": best.machine_hours,
            "windows": [str(sizes) for sizes in best.windows],
        }
    return json.dumps(figures, indent=2)
