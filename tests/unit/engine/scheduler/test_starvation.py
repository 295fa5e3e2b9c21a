"""Every request ends in a bounded number of steps, whatever keeps arriving after it."""

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from engine.scheduler.request_queue import PATIENCE_S
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.shared_prefills import MAX_STALLS
from engine.types.request import Request, RequestState
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner

ROWS, OVERTAKES, MAX_PROMPT, MAX_OUTPUT = 3, 2, 70, 12
MAX_TOTAL = MAX_PROMPT + MAX_OUTPUT


@dataclass(frozen=True)
class Arrival:
    """A request: a prefix shared by many, and its own suffix."""

    family: int
    length: int
    own: int
    num_output: int
    patience_s: float | None

    def request(self, now: float, priority: int = 0) -> Request:
        prompt = [self.family] * self.length + [self.own]
        return ledger.request(
            prompt,
            params=SamplingParams(max_tokens=self.num_output, ignore_eos=True),
            arrival_s=now,
            priority=priority,
            deadline_s=None if self.patience_s is None else now + self.patience_s,
        )


arrivals = st.builds(
    Arrival,
    family=st.integers(0, 2),
    length=st.integers(0, MAX_PROMPT - 1),
    own=st.integers(0, 4),
    num_output=st.integers(1, MAX_OUTPUT),
    # None of these deadlines passes while the test runs: they only say who goes first.
    patience_s=st.none() | st.integers(5_000, 9_000),
)


def scheduler(num_blocks: int, chunk: int, aging_s: float | None = None) -> Scheduler:
    return ledger.scheduler(
        num_blocks=num_blocks,
        max_model_len=MAX_TOTAL + 2,
        max_running_requests=ROWS,
        prefill_chunk_tokens=chunk,
        max_overtakes=OVERTAKES,
        priority_aging_s=aging_s,
    )


def step(sched: Scheduler, runner: LedgerRunner, now: float) -> None:
    batch = sched.schedule(now)
    if batch is None:
        sched.drain()
    else:
        sched.commit(batch, runner.execute(batch))


def bound(num_before: int) -> int:
    """Steps within which the next in rank after `num_before` others must be over.

    The first in rank advances by a token in every step in which it runs. When it waits, then for room, while the
    rows run out in turn, each by a token a step, and nobody enters; or for another's blocks, which advance between
    any two of `MAX_STALLS` looks; or it is passed, `OVERTAKES` times.
    """
    to_get_in = ROWS * MAX_TOTAL + MAX_STALLS * MAX_TOTAL + OVERTAKES * MAX_TOTAL
    return (num_before + 1) * (MAX_TOTAL + to_get_in)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    before=st.lists(arrivals, max_size=4),
    watched=arrivals,
    after=st.lists(arrivals, min_size=1, max_size=6),
    num_blocks=st.integers(7, 16),
    chunk=st.integers(1, 40),
    with_decodes=st.none() | st.integers(1, 3),
)
def test_scheduler_later_requests_cause_no_starvation(
    before: list[Arrival],
    watched: Arrival,
    after: list[Arrival],
    num_blocks: int,
    chunk: int,
    with_decodes: int | None,
) -> None:
    """Nor on a very slow machine with time-bounded steps beside decodes."""
    sched, runner = scheduler(num_blocks, chunk), LedgerRunner()
    if with_decodes is not None:
        sched._planner._pace = ledger.Crawl(with_decodes)
    for arrival in before:
        sched.add(arrival.request(0.0))
    target = watched.request(1.0)
    sched.add(target)
    now, limit = PATIENCE_S + 2.0, bound(len(before))
    for number in range(limit):
        # As many as can be queued, in every step, for ever.
        while sched.load().num_waiting < 12:
            now += 0.001
            sched.add(after[number % len(after)].request(now))
        step(sched, runner, now)
        if target.state is RequestState.FINISHED:
            break
    assert target.state is RequestState.FINISHED


def flooded(aging_s: float | None) -> bool:
    """Whether a low-priority request runs while higher ones arrive faster than they are served."""
    sched, runner = scheduler(num_blocks=8, chunk=20, aging_s=aging_s), LedgerRunner()
    low = Arrival(family=0, length=40, own=1, num_output=8, patience_s=None).request(0.0, priority=2)
    sched.add(low)
    serial = 0
    for number in range(1, 600):
        while sched.load().num_waiting < 6:
            # All different: a request that waits for a twin's blocks lets others go first.
            serial += 1
            high = Arrival(family=1 + serial % 90, length=30, own=0, num_output=8, patience_s=None)
            sched.add(high.request(float(number), priority=0))
        step(sched, runner, float(number))
    return low.state is RequestState.FINISHED


@pytest.mark.parametrize(("aging_s", "gets_through"), [(50.0, True), (None, False)])
def test_scheduler_aging_prevents_starvation_of_lowest_level(aging_s: float | None, gets_through: bool) -> None:
    assert flooded(aging_s) is gets_through
