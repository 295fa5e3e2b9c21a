"""Property tests of the planner: for any load its fleet stays within every bound."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.planner.planner import Planner
from cluster.planner.values import ActionKind, Decision, FleetView, Observation, PlannerPolicy, Sizes
from cluster.planner.values import other as other_pool
from tandem.errors import ConfigError
from tests.support.cluster.planned_worker import PERIOD_S, demand, staffing

POLICY = PlannerPolicy(
    start_s=60.0,
    hold_s=120.0,
    flip_hold_s=45.0,
    cooldown_s=30.0,
    most_flips=1,
    most_workers=12,
    least=Sizes(prefill=1, decode=2),
)


def seen(num_requests: float, **changes: int) -> Observation:
    return Observation(period_s=PERIOD_S, demand=demand(num_requests, **changes))


def obeyed(sizes: Sizes, decision: Decision) -> Sizes:
    for action in decision.actions:
        by = -1 if action.kind is ActionKind.STOP else 1
        sizes = sizes.changed(action.role, by)
        if action.kind is ActionKind.FLIP:
            sizes = sizes.changed(other_pool(action.role), -1)
    return sizes


def drive(planner: Planner, loads: list[Observation], sizes: Sizes) -> list[tuple[float, Sizes, Decision]]:
    """Each decision with its time and the sizes after it; machines serve at once."""
    history = []
    for number, load in enumerate(loads, 1):
        decision = planner.decide(number * PERIOD_S, load, FleetView(sizes=sizes))
        sizes = obeyed(sizes, decision)
        history.append((number * PERIOD_S, sizes, decision))
    return history


def planner(policy: PlannerPolicy = POLICY) -> Planner:
    return Planner(staffing(), policy, period_s=PERIOD_S)


def kinds(decision: Decision) -> list[ActionKind]:
    return [action.kind for action in decision.actions]


loads = st.lists(
    st.builds(
        seen, st.integers(0, 150), prompt=st.sampled_from([200, 2_000, 6_000]), output=st.sampled_from([20, 300, 900])
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(loads=loads)
def test_planner_any_load_stays_within_bounds(loads: list[Observation]) -> None:
    settled_s = -POLICY.cooldown_s
    for at_s, sizes, decision in drive(planner(), loads, Sizes(prefill=1, decode=2)):
        assert sizes.prefill >= POLICY.least.prefill
        assert sizes.decode >= POLICY.least.decode
        assert sizes.total <= POLICY.most_workers
        assert kinds(decision).count(ActionKind.FLIP) <= POLICY.most_flips
        if set(kinds(decision)) - {ActionKind.START}:
            assert at_s - settled_s >= POLICY.cooldown_s
            settled_s = at_s


@settings(max_examples=30, deadline=None)
@given(num_requests=st.integers(1, 60), prompt=st.sampled_from([200, 1_000, 4_000]))
def test_planner_constant_load_settles(num_requests: int, prompt: int) -> None:
    history = drive(planner(), [seen(num_requests, prompt=prompt)] * 80, Sizes(prefill=3, decode=3))
    assert not [decision.actions for _, _, decision in history[50:] if decision.actions]
    _, sizes, decision = history[-1]
    assert sizes == decision.wanted


def test_planner_short_waves_are_served_at_their_peak() -> None:
    waves = [seen(60 if number % 4 < 2 else 20) for number in range(120)]
    history = drive(planner(), waves, Sizes(prefill=2, decode=4))
    assert not [decision.actions for _, _, decision in history[60:] if decision.actions]


def test_planner_growing_pool_flips_a_warm_worker_first() -> None:
    long_prompts, long_answers = seen(30, prompt=6_000, output=10), seen(30, prompt=50, output=900)
    history = drive(planner(), [long_prompts] * 60 + [long_answers] * 60, Sizes(prefill=2, decode=3))
    before, after = history[59][1], history[-1][1]
    assert before.prefill > after.prefill
    assert before.decode < after.decode
    flips = [a for _, _, d in history[60:] for a in d.actions if a.kind is ActionKind.FLIP]
    assert flips
    assert {action.role.value for action in flips} == {"decode"}
    assert str(flips[0]) == "flip prefill -> decode"


def test_planner_grows_at_once_and_shrinks_after_hold() -> None:
    warm = planner()
    calm = drive(warm, [seen(8)] * 40, Sizes(prefill=1, decode=2))[-1][1]
    grown = [warm.decide((41 + n) * PERIOD_S, seen(90), FleetView(sizes=calm)) for n in range(6)]
    assert any(ActionKind.START in kinds(decision) for decision in grown)
    large = grown[-1].wanted
    after = [warm.decide((47 + n) * PERIOD_S, seen(0), FleetView(sizes=large)) for n in range(60)]
    first = next(number for number, decision in enumerate(after, 1) if ActionKind.STOP in kinds(decision))
    assert first * PERIOD_S >= POLICY.hold_s


def test_planner_adds_workers_only_when_first_tokens_are_late() -> None:
    kept, broken = (replace(seen(60), num_first=60, num_late=late) for late in (0, 6))
    calm = drive(planner(), [kept] * 60, Sizes(prefill=2, decode=3))[-1][2]
    stressed = drive(planner(), [broken] * 60, Sizes(prefill=2, decode=3))[-1][2]
    sent_nothing = drive(planner(), [seen(60)] * 60, Sizes(prefill=2, decode=3))[-1][2]
    assert calm.wanted == sent_nothing.wanted
    assert stressed.wanted.total > calm.wanted.total


def test_planner_half_spent_error_budget_adds_margin() -> None:
    # Never more late at once than may be: only the long run tells.
    some, none = (replace(seen(60), num_first=2_000, num_late=late) for late in (20, 0))
    spent = drive(planner(), [some] * 60, Sizes(prefill=2, decode=3))[-1][2]
    untouched = drive(planner(), [none] * 60, Sizes(prefill=2, decode=3))[-1][2]
    assert untouched.wanted == staffing().sizes(60 / PERIOD_S, demand(60.0))
    rates = [float(decision.reasons[0].split()[0]) for decision in (untouched, spent)]
    assert rates[0] < rates[1] <= 1.11 * rates[0]


def filled(num_requests: float, sizes: Sizes, taken_pools: float, *, starting: int = 0) -> Observation:
    return replace(seen(num_requests), num_decoding=sizes.decode - starting, taken_pools=taken_pools)


@settings(max_examples=40, deadline=None)
@given(num_requests=st.integers(1, 40), taken_pools=st.floats(0.0, 6.0))
def test_planner_constant_kv_use_settles(num_requests: int, taken_pools: float) -> None:
    one, sizes, acted = planner(), Sizes(prefill=3, decode=3), 0
    for number in range(1, 81):
        load = filled(num_requests, sizes, taken_pools)
        decision = one.decide(number * PERIOD_S, load, FleetView(sizes=sizes))
        acted = number if decision.actions else acted
        sizes = obeyed(sizes, decision)
    assert acted <= 50
    plain = drive(planner(), [seen(num_requests)] * 80, Sizes(prefill=3, decode=3))[-1][1]
    assert sizes.decode >= plain.decode
    assert taken_pools <= 0.9 * sizes.decode


def test_planner_full_decode_pool_grows_one_worker_at_a_time() -> None:
    one, sizes = planner(), Sizes(prefill=1, decode=3)
    full = filled(8, sizes, 2.8)
    assert kinds(one.decide(PERIOD_S, full, FleetView(sizes=sizes))) == [ActionKind.START]
    # It is on its way: there is another look when it serves.
    sizes = Sizes(prefill=1, decode=4)
    full = filled(8, sizes, 2.9, starting=1)
    assert not one.decide(2 * PERIOD_S, full, FleetView(sizes=sizes)).actions
    full = filled(8, sizes, 3.7)
    assert kinds(one.decide(3 * PERIOD_S, full, FleetView(sizes=sizes))) == [ActionKind.START]


@pytest.mark.parametrize(("taken_pools", "is_kept"), [(1.0, False), (2.0, True)])
def test_planner_full_decode_pool_is_not_shrunk(taken_pools: float, is_kept: bool) -> None:
    one, sizes = planner(), Sizes(prefill=1, decode=4)
    decisions = [one.decide(n * PERIOD_S, filled(8, sizes, taken_pools), FleetView(sizes=sizes)) for n in range(40)]
    assert (ActionKind.STOP not in {kind for decision in decisions for kind in kinds(decision)}) is is_kept
    long_prompts = replace(filled(40, sizes, taken_pools), demand=demand(40, prompt=6_000, output=10))
    lent = one.decide(41 * PERIOD_S, long_prompts, FleetView(sizes=sizes))
    assert (ActionKind.FLIP not in kinds(lent)) is is_kept


def test_planner_forecast_beyond_limit_is_reported() -> None:
    history = drive(planner(), [seen(600)] * 20, Sizes(prefill=6, decode=6))
    assert history[-1][1].total == POLICY.most_workers
    assert "bounded" in " ".join(history[-1][2].reasons)


def test_planner_waiting_work_adds_workers() -> None:
    calm = planner().decide(PERIOD_S, seen(8), FleetView(sizes=Sizes(prefill=1, decode=2)))
    waiting = replace(seen(8), waiting_prompt_seconds=60.0)
    stuck = planner().decide(PERIOD_S, waiting, FleetView(sizes=Sizes(prefill=1, decode=2)))
    assert stuck.wanted.prefill > calm.wanted.prefill


@pytest.mark.parametrize(
    "changes",
    [{"least": Sizes(prefill=0, decode=1)}, {"most_workers": 1}, {"hold_s": -1.0}, {"most_flips": -1}],
    ids=["least", "most", "hold", "flips"],
)
def test_planner_invalid_bounds_are_refused(changes: dict) -> None:
    with pytest.raises(ConfigError):
        PlannerPolicy(**changes)
