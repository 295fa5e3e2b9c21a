"""When a live planner holds still, and that its history goes on meanwhile."""

from dataclasses import replace

from cluster.planner.controller import Controller, Outcome, PlanningRound
from cluster.planner.load_watch import Unseen
from cluster.planner.orders import Order
from cluster.planner.planner import Planner
from cluster.planner.values import Action, ActionKind, FleetView, Observation, PlannerPolicy, Sizes
from tandem.values.roles import WorkerRole
from tests.support.cluster.planned_worker import PERIOD_S, demand, staffing
from tests.support.cluster.router_figures import POLICY

SMALL, LARGE = Sizes(prefill=1, decode=1), Sizes(prefill=3, decode=3)


def seen(num_requests: float, **lengths: int) -> Observation:
    return Observation(period_s=PERIOD_S, demand=demand(num_requests, **lengths))


CALM, BUSY = seen(4), seen(120)


class Bench:
    """A controller and its clock."""

    def __init__(self, sizes: Sizes, *, is_dry_run: bool = False, policy: PlannerPolicy = POLICY) -> None:
        planner = Planner(staffing(), policy, period_s=PERIOD_S)
        self.controller = Controller(planner, is_dry_run=is_dry_run, retry_s=20.0)
        self.sizes = sizes
        self.now_s = 0.0

    def turn(self, load: Observation | Unseen = CALM, fleet: str | None = None) -> PlanningRound:
        self.now_s += PERIOD_S
        return self.controller.turn(self.now_s, load, fleet or FleetView(sizes=self.sizes))

    def obey(self, load: Observation) -> PlanningRound:
        turn = self.turn(load)
        if turn.order is not None:
            self.sizes = turn.order.after
            self.controller.done()
        return turn


def test_controller_shrinks_after_a_hold_and_grows_sooner() -> None:
    bench = Bench(LARGE)
    turns = [bench.obey(CALM) for _ in range(20)]
    first = next(number for number, turn in enumerate(turns) if turn.outcome is Outcome.ORDERED)
    assert first * PERIOD_S >= POLICY.hold_s
    assert bench.sizes.total < LARGE.total
    small = bench.sizes
    grown = [bench.obey(BUSY) for _ in range(int(POLICY.hold_s / PERIOD_S))]
    assert Outcome.ORDERED in [turn.outcome for turn in grown]
    assert bench.sizes.total > small.total


def test_controller_observation_gap_restarts_the_hold() -> None:
    bench = Bench(LARGE)
    for _ in range(3):
        assert bench.turn().outcome is Outcome.STEADY
    for _ in range(10):
        gone = bench.turn(Unseen(why="refused"))
        assert (gone.outcome, gone.why, gone.decision) == (Outcome.UNSEEN, ("refused",), None)
    back = bench.now_s + PERIOD_S
    while bench.obey(CALM).outcome is not Outcome.ORDERED:
        assert bench.now_s < back + 3 * POLICY.hold_s
    assert bench.now_s - back >= POLICY.hold_s


def test_controller_single_failed_observation_keeps_history() -> None:
    bench = Bench(LARGE)
    outcomes = [bench.turn(Unseen(why="late") if number == 2 else CALM).outcome for number in range(7)]
    assert outcomes.index(Outcome.ORDERED) * PERIOD_S <= POLICY.hold_s + PERIOD_S


def test_controller_unknown_fleet_gives_no_order_but_observes_load() -> None:
    bench = Bench(SMALL)
    for _ in range(5):
        turn = bench.turn(BUSY, fleet="403")
        assert (turn.outcome, turn.order) == (Outcome.UNKNOWN, None)
        assert "403" in turn.why[0]
        assert turn.decision is not None
    # It has not forgotten: the first look that may act does.
    assert bench.turn(BUSY).outcome is Outcome.ORDERED


def test_controller_gives_one_order_at_a_time() -> None:
    bench = Bench(SMALL)
    order = bench.turn(BUSY).order
    assert order is not None
    assert bench.turn(BUSY).outcome is Outcome.UNDER_WAY
    assert bench.turn(BUSY, fleet="refused").outcome is Outcome.UNDER_WAY
    bench.sizes = order.after
    bench.controller.done()
    assert bench.turn(BUSY).outcome in (Outcome.STEADY, Outcome.ORDERED)


def test_controller_failed_orders_back_off() -> None:
    bench, waits = Bench(SMALL), []
    for _ in range(4):
        while bench.turn(BUSY).outcome is not Outcome.ORDERED:
            pass
        bench.controller.failed(bench.now_s)
        failed_s = bench.now_s
        while (turn := bench.turn(BUSY)).outcome is Outcome.WAITING:
            assert "failed" in turn.why[0]
        waits.append(bench.now_s - failed_s)
        bench.controller.failed(bench.now_s)
    assert waits == sorted(waits)
    assert waits[-1] >= 4 * waits[0]


def test_controller_partly_executed_order_is_no_foreign_change() -> None:
    bench = Bench(SMALL)
    order = bench.turn(BUSY).order
    assert order is not None
    bench.sizes = SMALL.changed(WorkerRole.DECODE, 1)
    bench.controller.failed(bench.now_s)
    outcomes = [bench.turn(BUSY).outcome for _ in range(3)]
    assert Outcome.OTHERS not in outcomes
    assert Outcome.ORDERED in outcomes


def test_controller_foreign_sizes_are_kept_for_a_hold() -> None:
    bench = Bench(SMALL)
    for _ in range(10):
        assert bench.turn().outcome is Outcome.STEADY
    bench.sizes = LARGE
    turn = bench.turn()
    assert turn.outcome is Outcome.OTHERS
    assert "someone else" in turn.why[0]
    theirs_s = bench.now_s
    while bench.turn().outcome is Outcome.STEADY:
        assert bench.now_s < theirs_s + 3 * POLICY.hold_s
    assert bench.now_s - theirs_s >= POLICY.hold_s


def test_controller_foreign_shrink_does_not_block_growth() -> None:
    bench = Bench(LARGE)
    for _ in range(3):
        bench.obey(BUSY)
    bench.sizes = SMALL
    assert bench.turn(BUSY).outcome is Outcome.OTHERS
    grown = bench.turn(BUSY)
    assert grown.outcome is Outcome.ORDERED
    assert ActionKind.STOP not in [action.kind for action in grown.decision.actions]


def test_controller_dry_run_repeats_orders_without_acting() -> None:
    bench = Bench(SMALL, is_dry_run=True)
    for _ in range(3):
        turn = bench.turn(BUSY)
        assert turn.outcome is Outcome.WOULD_ORDER
        assert turn.order is not None
        assert turn.order.after.total > SMALL.total


def test_controller_full_fleet_flips_a_warm_worker() -> None:
    policy = replace(POLICY, most_workers=3)
    bench = Bench(Sizes(prefill=1, decode=2), policy=policy)
    prompts = seen(12, prompt=6000, output=10)
    turns = [bench.obey(prompts) for _ in range(8)]
    assert bench.sizes == Sizes(prefill=2, decode=1)
    [order] = [turn.order for turn in turns if turn.order is not None]
    assert order.flips == (WorkerRole.PREFILL,)


def test_order_applies_flips_before_sizes() -> None:
    actions = (
        Action(kind=ActionKind.FLIP, role=WorkerRole.PREFILL),
        Action(kind=ActionKind.START, role=WorkerRole.DECODE),
        Action(kind=ActionKind.START, role=WorkerRole.PREFILL),
    )
    order = Order.from_actions(actions, Sizes(prefill=1, decode=3))
    assert order.flipped == Sizes(prefill=2, decode=2)
    assert order.after == Sizes(prefill=3, decode=3)
    stop = Order.from_actions((Action(kind=ActionKind.STOP, role=WorkerRole.DECODE),), order.after)
    assert (stop.flips, stop.after) == ((), Sizes(prefill=3, decode=2))
