"""An engine after a storm of aborts is as fast as a fresh one (docs/extend/incidents.md), counted in steps."""

import random

from engine.scheduler.scheduler import Scheduler
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner

ABORTED = 0.89
NUM_BLOCKS = 40


def add(sched: Scheduler, rng: random.Random, *, max_tokens: int) -> RequestId:
    prompt = [rng.randrange(97) for _ in range(rng.randrange(10, 100))]
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    made = ledger.request(prompt, params=params, prefill_only=rng.random() < 0.3)
    sched.add(made)
    return made.request_id


def storm(sched: Scheduler, runner: LedgerRunner, num_requests: int) -> int:
    """So many requests at any stage, nearly all aborted. Returns how many were."""
    rng, alive, held, added, aborted = random.Random(3), set[RequestId](), set[RequestId](), 0, 0
    while added < num_requests or alive or held:
        while added < num_requests and len(alive) < 20:
            alive.add(add(sched, rng, max_tokens=40))
            added += 1
        for one in sorted(alive | held):
            if rng.random() < 0.2:
                if one in alive and (rng.random() < ABORTED or len(alive) == 20):
                    aborted += sched.abort(one)
                    alive.discard(one)
                if one in held:
                    sched.release_held(one)
                    held.discard(one)
        batch = sched.schedule(0.0)
        output = sched.drain() if batch is None else sched.commit(batch, runner.execute(batch))
        held |= {report.request_id for report in output.progress if report.is_complete}
        alive -= held | {event.request_id for event in output.events if event.finish_reason is not None}
    return aborted


def steps_of_work(sched: Scheduler, runner: LedgerRunner) -> int:
    """New prompts, more than run at once."""
    rng = random.Random(8)
    for _ in range(60):
        prompt = [96, *(rng.randrange(97) for _ in range(60))]
        sched.add(ledger.request(prompt, params=SamplingParams(max_tokens=10, ignore_eos=True)))
    steps = 0
    while (batch := sched.schedule(0.0)) is not None:
        sched.commit(batch, runner.execute(batch))
        steps += 1
    return steps


def test_scheduler_after_many_aborts_needs_no_more_steps() -> None:
    fresh = steps_of_work(ledger.scheduler(num_blocks=NUM_BLOCKS), LedgerRunner())
    sched, runner = ledger.scheduler(num_blocks=NUM_BLOCKS), LedgerRunner()
    assert storm(sched, runner, 500) > 0.8 * 500
    ledger.assert_empty(sched)
    assert steps_of_work(sched, runner) <= fresh / 0.95
    ledger.assert_empty(sched)
