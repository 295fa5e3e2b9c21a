"""The order of the queue: priorities, deadlines, cached prefixes; and guarantees for the others."""

import pytest

from engine.scheduler.request_queue import PATIENCE_S, Deadlines, Ranking
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Batch, FinishReason, Request
from tandem.errors import ConfigError
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner, assert_empty, run

ONE = SamplingParams(max_tokens=1)
LONG = list(range(64))


def admissions(sched: Scheduler, runner: LedgerRunner, now: float = 0.0) -> list[str]:
    """Run everything; returns request ids in the order of leaving the queue."""
    order = []
    while (batch := sched.schedule(now)) is not None:
        order += [a.request_id for a in sched.commit(batch, runner.execute(batch)).admissions]
    return order


def warmed(**changes: object) -> tuple[Scheduler, LedgerRunner]:
    """With LONG in the cache, and room for one row."""
    sched, runner = ledger.scheduler(max_running_requests=1, **changes), LedgerRunner()
    sched.add(ledger.request(LONG, params=ONE))
    run(sched, runner)
    return sched, runner


def test_ranking_is_level_then_due_time_then_arrival() -> None:
    rank = Ranking(None)
    early, late, urgent, low = (
        ledger.request([1], arrival_s=1.0),
        ledger.request([1], arrival_s=2.0),
        ledger.request([1], arrival_s=3.0, deadline_s=5.0),
        ledger.request([1], arrival_s=0.0, priority=1, deadline_s=0.5),
    )
    assert sorted([low, late, early, urgent], key=rank) == [urgent, early, late, low]
    patient = ledger.request([1], arrival_s=0.0, deadline_s=1000.0)
    newcomer = ledger.request([1], arrival_s=PATIENCE_S + 1.0, deadline_s=PATIENCE_S + 1.5)
    assert rank(patient) < rank(newcomer)


def test_ranking_levels_age() -> None:
    rank = Ranking(10.0)
    low = ledger.request([1], arrival_s=0.0, priority=2)
    assert rank(ledger.request([1], arrival_s=19.0)) < rank(low) < rank(ledger.request([1], arrival_s=21.0))


@pytest.mark.parametrize(
    "change", [{"max_overtakes": -1}, {"priority_aging_s": 0.0}, {"max_step_s": 0.0}, {"eviction": "fifo"}]
)
def test_queue_order_impossible_policy_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"engine.{next(iter(change))}"):
        ledger.config(**change)


def test_queue_order_cached_prefix_goes_first() -> None:
    sched, runner = warmed()
    for name, prompt in (("new", range(30, 90)), ("half", LONG[:33]), ("whole", LONG)):
        sched.add(ledger.request(prompt, request_id=name, arrival_s=1.0, params=ONE))
    assert admissions(sched, runner) == ["whole", "half", "new"]
    assert_empty(sched)


def test_queue_order_lower_priority_never_overtakes() -> None:
    sched, runner = warmed()
    sched.add(ledger.request(LONG, request_id="cached", arrival_s=1.0, priority=1, params=ONE))
    sched.add(ledger.request(range(30, 90), request_id="new", arrival_s=2.0, params=ONE))
    assert admissions(sched, runner) == ["new", "cached"]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_queue_order_overtaking_is_limited(bound: int) -> None:
    sched, runner = warmed(max_overtakes=bound)
    sched.add(ledger.request(range(30, 90), request_id="new", arrival_s=1.0, params=ONE))
    for k in range(6):
        sched.add(ledger.request([*LONG[:48], k], request_id=f"cached{k}", arrival_s=2.0 + k, params=ONE))
    order = admissions(sched, runner)
    assert order.index("new") == bound
    assert order[:bound] == [f"cached{k}" for k in range(bound)]
    assert not sched._planner._order._overtakes


def test_queue_order_earliest_deadline_goes_first() -> None:
    sched, runner = ledger.scheduler(max_running_requests=1), LedgerRunner()
    for name, deadline_s in (("none", None), ("later", 9.0), ("sooner", 8.0)):
        sched.add(ledger.request([*range(20)], request_id=name, deadline_s=deadline_s, params=ONE))
    assert admissions(sched, runner) == ["sooner", "later", "none"]


def test_queue_order_deadline_passed_while_waiting_ends_request() -> None:
    sched, runner = ledger.scheduler(max_running_requests=1), LedgerRunner()
    running = ledger.request(range(20), deadline_s=1.0)
    waiting = ledger.request(range(40, 60), arrival_s=0.5, deadline_s=2.0)
    for request in (running, waiting):
        sched.add(request)
    batch = sched.schedule(0.6)
    assert batch is not None
    sched.commit(batch, runner.execute(batch))
    # The one that runs has its tokens read by somebody, who judges its time.
    batch = sched.schedule(2.0)
    assert batch is not None
    assert [item.request for item in batch.items] == [running]
    (ended, _) = sched.commit(batch, runner.execute(batch)).events
    assert (ended.request_id, ended.token, ended.finish_reason) == (waiting.request_id, None, FinishReason.DEADLINE)
    assert not sched.abort(waiting.request_id)
    run(sched, runner)
    assert running.finish_reason is FinishReason.LENGTH
    assert_empty(sched)


def shares(batch: Batch | None, *requests: Request) -> list[int]:
    assert batch is not None
    return [sum(item.num_tokens for item in batch.items if item.request is request) for request in requests]


def test_queue_order_chunk_goes_to_prompts_in_order() -> None:
    """A later prompt's chunk never makes an earlier prompt's step longer than one chunk."""
    sched, runner = ledger.scheduler(prefill_chunk_tokens=20, max_batched_tokens=100, num_blocks=64), LedgerRunner()
    first, second, third = (ledger.request([k] * 30, arrival_s=float(k)) for k in range(3))
    for request in (first, second, third):
        sched.add(request)
    planned = []
    for _ in range(5):
        batch = sched.schedule(9.0)
        assert batch is not None
        planned.append(shares(batch, first, second, third))
        sched.commit(batch, runner.execute(batch))
    assert planned == [[20, 0, 0], [10, 10, 0], [1, 20, 0], [1, 1, 20], [1, 1, 10]]
    run(sched, runner)
    assert_empty(sched)


def test_queue_order_earlier_rank_takes_chunk_from_long_prompt() -> None:
    sched, runner = ledger.scheduler(prefill_chunk_tokens=20, max_batched_tokens=100, num_blocks=64), LedgerRunner()
    long = ledger.request([1] * 150, priority=1)
    sched.add(long)
    batch = sched.schedule(0.0)
    assert batch is not None
    sched.commit(batch, runner.execute(batch))
    urgent = ledger.request([2] * 15, arrival_s=5.0)
    sched.add(urgent)
    batch = sched.schedule(5.0)
    assert shares(batch, urgent, long) == [15, 5]
    assert batch is not None
    sched.commit(batch, runner.execute(batch))
    run(sched, runner)
    assert long.num_preemptions == 0
    assert_empty(sched)


def test_deadlines_request_no_longer_waiting_is_not_kept() -> None:
    deadlines = Deadlines()
    requests = [ledger.request([1], deadline_s=600.0 + k) for k in range(500)]
    for request in requests:
        deadlines.watch(request)
        deadlines.forget(request)
    kept = requests[-1]
    deadlines.watch(kept)
    deadlines.watch(kept)
    assert len(deadlines) <= 66
    assert deadlines.expired(600.0) == []
    assert deadlines.expired(2000.0) == [kept]
    assert deadlines.expired(2000.0) == []


def test_deadlines_reused_id_has_its_own_deadline() -> None:
    deadlines = Deadlines()
    first, again = (ledger.request([1], request_id="same", deadline_s=due) for due in (5.0, 9.0))
    deadlines.watch(first)
    deadlines.forget(first)
    deadlines.watch(again)
    assert deadlines.expired(6.0) == []
    assert deadlines.expired(9.0) == [again]
