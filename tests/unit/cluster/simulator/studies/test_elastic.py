"""Fleets that change under load: no lost request, exact machine time, obeyed schedules."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.planner.values import Action, ActionKind, Decision, FleetView, Observation, Sizes
from cluster.simulator.autoscale_command import AutoscaleOptions, autoscale_day
from cluster.simulator.command import SimulateOptions
from cluster.simulator.inputs.day import Curve, DaySpec, day_trace
from cluster.simulator.inputs.trace import Trace
from cluster.simulator.model.report import HELD_SHARE, Slo
from cluster.simulator.studies.elastic import Elastic, Scheduled, run_elastic
from cluster.simulator.studies.fleet import FleetTiming
from cluster.simulator.studies.schedule import Breaches, ScheduleSearch, cheapest
from tandem.errors import ConfigError, InvariantError
from tandem.values.roles import WorkerRole
from tests.support.cluster.small_clusters import BLOCK, cluster, load

TIMING = FleetTiming(start_s=2.0, flip_s=0.5, drain_s=1.0)


class Script:
    """Acts at given times, and records what it saw."""

    def __init__(self, actions: dict[float, list[Action]]) -> None:
        self.actions = actions
        self.seen: list[Observation] = []
        self.views: dict[float, FleetView] = {}

    def decide(self, now_s: float, seen: Observation, fleet: FleetView) -> Decision:
        self.seen.append(seen)
        self.views[round(now_s, 3)] = fleet
        actions = tuple(self.actions.get(round(now_s, 3), []))
        return Decision(actions=actions, wanted=fleet.sizes, reasons=())


def elastic(trace: Trace, **changes: object) -> Elastic:
    plain = Elastic(trace=trace, slo=Slo(), spec=cluster(), timing=TIMING, period_s=0.5)
    return replace(plain, **changes)


def action(kind: ActionKind, role: WorkerRole) -> Action:
    return Action(kind=kind, role=role)


FLIP, START, STOP = ActionKind
PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def test_fleet_scales_and_flips_without_losing_requests() -> None:
    trace = load(requests=90, rate=10.0)
    orders = {
        1.0: [action(FLIP, PREFILL)],
        2.0: [action(START, DECODE), action(START, PREFILL)],
        5.0: [action(STOP, PREFILL), action(FLIP, DECODE)],
        7.0: [action(STOP, DECODE)],
    }
    script = Script(orders)
    result = run_elastic(elastic(trace), script, Sizes(prefill=2, decode=2))
    assert result.report.num_finished == 90
    assert (result.num_flips, result.num_starts, result.num_stops) == (2, 2, 2)
    assert [change.at_s for change in result.changes] == [1.0, 2.0, 5.0, 7.0]
    assert script.views[1.5].sizes == Sizes(prefill=3, decode=1)
    assert script.views[2.5].starting == Sizes(prefill=1, decode=1)
    assert script.views[4.5].starting == Sizes(prefill=0, decode=0)
    assert script.views[8.0].sizes == Sizes(prefill=2, decode=2)


def test_fleet_machine_time_runs_from_order_to_end_of_drain() -> None:
    trace = load(requests=60, rate=10.0)
    still = run_elastic(elastic(trace), Script({}), Sizes(prefill=2, decode=2))
    assert still.machine_hours == pytest.approx(4 * trace.span_s / 3600.0)
    more = run_elastic(elastic(trace), Script({3.0: [action(START, DECODE)]}), Sizes(prefill=2, decode=2))
    assert more.machine_hours == pytest.approx((5 * trace.span_s - 3.0) / 3600.0)
    orders = {3.0: [action(START, DECODE)], 4.0: [action(STOP, DECODE)]}
    recalled = run_elastic(elastic(trace), Script(orders), Sizes(prefill=2, decode=2))
    # Who does not serve yet is given back first, at once.
    assert recalled.machine_hours == pytest.approx((4 * trace.span_s + 1.0) / 3600.0)


def test_fleet_worker_beyond_its_drain_moves_requests_elsewhere() -> None:
    trace = load(requests=30, rate=20.0, output=200.0)
    orders = {1.5: [action(STOP, DECODE)]}
    timing = FleetTiming(start_s=2.0, flip_s=0.5, drain_s=0.25)
    result = run_elastic(elastic(trace, timing=timing), Script(orders), Sizes(prefill=2, decode=2))
    assert result.report.num_finished == 30
    assert result.report.num_retries


def test_fleet_flips_starting_worker_when_no_other_can() -> None:
    trace = load(requests=60, rate=10.0)
    orders = {
        1.0: [action(START, DECODE), action(FLIP, PREFILL)],
        1.5: [action(FLIP, PREFILL)],
        5.0: [action(FLIP, DECODE)],
    }
    script = Script(orders)
    result = run_elastic(elastic(trace), script, Sizes(prefill=1, decode=1))
    assert script.views[2.0].sizes == Sizes(prefill=3, decode=0)
    assert result.num_flips == 3
    assert result.report.num_finished == 60


def test_fleet_stop_in_empty_pool_is_refused() -> None:
    script = Script({0.5: [action(STOP, PREFILL), action(STOP, PREFILL)]})
    with pytest.raises(InvariantError, match="no prefill worker"):
        run_elastic(elastic(load()), script, Sizes(prefill=1, decode=2))


def test_fleet_observations_add_up_to_arrivals() -> None:
    trace, script = load(requests=60, rate=10.0), Script({})
    run_elastic(elastic(trace), script, Sizes(prefill=2, decode=2))
    # The last period is cut by the end.
    arrived = sum(seen.demand.num_requests for seen in script.seen)
    by_then = sum(r.arrival_s <= 0.5 * len(script.seen) for r in trace.requests)
    assert arrived == by_then > 50
    assert sum(seen.demand.output_tokens for seen in script.seen) > 0
    assert all(seen.num_late <= seen.num_first for seen in script.seen)
    assert all(seen.taken_pools >= 0.0 and seen.num_decoding == 2 for seen in script.seen)
    assert any(seen.taken_pools for seen in script.seen)


def test_fleet_first_tokens_are_counted_once() -> None:
    trace, script = load(requests=30, rate=20.0, output=400.0), Script({1.5: [action(STOP, DECODE)]})
    timing = FleetTiming(start_s=2.0, flip_s=0.5, drain_s=0.25)
    result = run_elastic(elastic(trace, slo=Slo(ttft_s=0.0), timing=timing), script, Sizes(prefill=2, decode=2))
    assert result.report.num_retries
    counts = [(seen.num_first, seen.num_late) for seen in script.seen]
    assert all(first == late for first, late in counts)
    assert sum(first for first, _ in counts) <= 30
    answered, ended = (
        sum(n) for n in zip(*((s.num_first, s.demand.num_answers) for s in script.seen[:4]), strict=True)
    )
    assert answered > ended


def test_schedule_reaches_its_sizes_at_each_window() -> None:
    trace = load(requests=150, rate=10.0)
    windows = (Sizes(prefill=1, decode=2), Sizes(prefill=2, decode=3), Sizes(prefill=1, decode=1))

    class Watched(Scheduled):
        def decide(self, now_s: float, seen: Observation, fleet: FleetView) -> Decision:
            views[now_s] = fleet
            return super().decide(now_s, seen, fleet)

    views: dict[float, FleetView] = {}
    result = run_elastic(elastic(trace), Watched(windows, 6.0, TIMING), windows[0])
    assert result.report.num_finished == 150
    for at_s, window in ((3.0, 0), (6.5, 1), (11.0, 1), (14.0, 2)):
        assert views[at_s].sizes.total >= windows[window].total
    assert views[6.5].starting.total == 0
    assert views[6.5].sizes == windows[1]
    assert views[14.0].sizes == windows[2]


def small_day() -> Trace:
    spec = DaySpec(
        hour_s=0.5,
        chat=Curve(mean=6.0, swing=0.6, peak_h=15.0, surge=0.5),
        long=Curve(mean=2.0, swing=0.5, peak_h=21.0),
        block_tokens=BLOCK,
    )
    return day_trace(spec, load(requests=40, seed=1), load(requests=30, seed=2, prompt=150.0))


def test_day_trace_follows_rates_and_repeats_no_prefix() -> None:
    day = small_day()
    assert 80 < len(day.requests) < 110
    assert day.span_s <= 12.0
    night = sum(1.0 <= r.arrival_s < 3.0 for r in day.requests)
    noon = sum(6.5 <= r.arrival_s < 8.5 for r in day.requests)
    assert noon > 2 * night
    first, again = (day_trace(DaySpec(hour_s=h, block_tokens=BLOCK), load(), load()) for h in (0.5, 5.0))
    names = {name for r in first.requests for name in r.names}
    assert len({name for r in again.requests for name in r.names}) >= 2 * len(names)


def test_day_trace_without_usable_prompt_is_refused() -> None:
    with pytest.raises(ConfigError, match="no prompt"):
        day_trace(DaySpec(longest_prompt=1), load(), load())


def breaches(late: float, gaps: float = 0.0) -> Breaches:
    return Breaches(num_late=late, num_gaps=gaps)


def test_cheapest_schedule_spends_allowance_best() -> None:
    small, middle, large = (Sizes(prefill=1, decode=d) for d in (1, 2, 4))
    calm = [(small, breaches(6)), (middle, breaches(0))]
    busy = [(small, breaches(9)), (large, breaches(0))]
    allowed = breaches(10, 1)
    assert cheapest([calm, busy], allowed) == (middle, small)
    assert cheapest([calm, calm], breaches(12, 1)) == (small, small)
    with pytest.raises(ConfigError):
        cheapest([[(small, breaches(11))]], allowed)


def test_schedule_search_finds_holding_schedule() -> None:
    day = small_day()
    task = elastic(day, slo=Slo(ttft_s=0.6, itl_s=0.05))
    search = ScheduleSearch(
        elastic=task, window_s=6.0, lead_s=1.0, guess=lambda _: Sizes(prefill=1, decode=1), say=lambda _: None
    )
    best = search.run()
    assert best.verified.report.held
    assert best.verified.report.ttft_within >= HELD_SHARE
    fewer = Sizes(prefill=1, decode=1)
    hours = sum(sizes.total for sizes in best.windows) * 6.0 / 3600.0
    assert best.machine_hours == pytest.approx(hours)
    assert best.machine_hours >= fewer.total * 12.0 / 3600.0


LOAD = SimulateOptions(generate="rate=3,requests=60,prompt=900", latency="small-gpu", kv_tokens=45_000, slo="ttft=6")


def test_autoscale_day_dry_run_explains_actions() -> None:
    options = AutoscaleOptions(is_dry_run=True, timing=TIMING, period_s=2.0, first=Sizes(prefill=1, decode=1))
    report = autoscale_day(LOAD, options)
    assert "start decode: decode needs" in report
    assert "requests/s forecast require" in report
    assert "machine-hours" in report
    figures = json.loads(autoscale_day(replace(LOAD, as_json=True), options))
    assert figures["report"]["num_finished"] == 60
    assert figures["starts"] == sum(action.startswith("start") for c in figures["changes"] for action in c["actions"])


@pytest.mark.parametrize(
    "options",
    [AutoscaleOptions(), AutoscaleOptions(is_dry_run=True, chat=Path("a.csv"))],
    ids=["nothing to change", "half a day"],
)
def test_autoscale_day_invalid_options_are_refused(options: AutoscaleOptions) -> None:
    with pytest.raises(ConfigError):
        autoscale_day(LOAD, options)
