"""The planner's claim over a whole day that was made from a seed: it holds the promise, at little more than the best
fixed schedule of who has seen the day. Over the public traces the same is measured by hand: docs/operate/autoscale.md.
"""

from functools import partial

import pytest

from cluster.planner.planner import Planner
from cluster.planner.values import Sizes
from cluster.simulator.autoscale_command import AutoscaleOptions, hindsight, staffing_for
from cluster.simulator.command import SimulateOptions, cluster_of
from cluster.simulator.inputs.day import HOURS, DaySpec, day_trace
from cluster.simulator.inputs.generated_load import LoadSpec, generate
from cluster.simulator.model.report import Slo
from cluster.simulator.studies.elastic import Elastic, run_elastic
from cluster.simulator.studies.fleet import FleetTiming
from cluster.simulator.studies.schedule import ScheduleSearch

MOST_RATIO = 1.15
CHAT = LoadSpec(requests=4000, rate=4.0, prefixes=0, prompt=1150.0, output=210.0, turns=1.0, block=512)
LONG = LoadSpec(requests=2000, rate=1.0, prefixes=0, prompt=3600.0, output=230.0, turns=2.0, block=512, think=30.0)
FIRST = Sizes(prefill=2, decode=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_planner_day_costs_little_more_than_best_schedule() -> None:
    load = SimulateOptions(slo="ttft=6,itl=0.1", latency="small-gpu", kv_tokens=45_000, max_running=64)
    day = day_trace(DaySpec(hour_s=200.0), generate(CHAT, 1), generate(LONG, 2))
    slo, spec = Slo.parse(load.slo), cluster_of(load, day.block_tokens)
    timing = FleetTiming(start_s=20.0, flip_s=10.0, drain_s=20.0)
    elastic = Elastic(trace=day, slo=slo, spec=spec, timing=timing, period_s=5.0)
    staffing = staffing_for(spec, slo)
    policy = AutoscaleOptions(period_s=5.0, hold_s=60.0, timing=timing).policy()
    planned = run_elastic(elastic, Planner(staffing, policy, period_s=5.0), FIRST)
    assert planned.report.held
    window_s = day.requests[-1].arrival_s / HOURS * (1.0 + 1e-9)
    search = ScheduleSearch(
        elastic=elastic, window_s=window_s, lead_s=60.0, guess=partial(hindsight, staffing), splits=1, say=print
    )
    best = search.run()
    assert best.verified.report.held
    # Both as they were simulated: machines from the order to the end of the drain.
    planned_h, best_h = planned.machine_hours, best.verified.machine_hours
    print(f"{planned_h:.3f} of {best_h:.3f}: {planned_h / best_h:.3f}")
    print(f"of {best.machine_hours:.3f} by sizes alone: {planned_h / best.machine_hours:.3f}")
    assert planned_h <= MOST_RATIO * best_h
