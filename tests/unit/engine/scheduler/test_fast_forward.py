"""Steps taken at once leave the same state as single steps."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.fast_forward import FastForwardScheduler
from engine.types.kv_events import KVEvent
from engine.types.request import Request, SampledToken
from tandem.errors import InvariantError
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger

TOKEN = 5

Job = tuple[int, int, int, int]
"""Family of the prompt, its tokens, tokens to generate, the step before which it comes."""


class Worker:
    """A scheduler whose every token is the same; runs of steady steps are skipped if requested."""

    def __init__(self, jobs: Sequence[Job], *, at_once: bool, num_blocks: int, rows: int, block_size: int) -> None:
        config = ledger.config(
            num_blocks=num_blocks, max_running_requests=rows, block_size=block_size, max_model_len=400
        )
        self.sched = FastForwardScheduler(config, BlockHasher(ledger.SECRET))
        self.jobs = sorted(jobs, key=lambda job: job[3])
        self.at_once = at_once
        self.step = 0
        self.num_taken_at_once = 0
        self.events: list[KVEvent] = []
        self.ends: list[tuple[int, RequestId]] = []

    def run(self, num_steps: int) -> None:
        while self.step < num_steps:
            self.enter()
            if self.at_once and self.leap(num_steps):
                continue
            self.step += 1
            batch = self.sched.schedule(float(self.step))
            if batch is not None:
                tokens = [SampledToken(token_id=TOKEN) for item in batch.items if item.samples]
                output = self.sched.commit(batch, tokens)
                self.ends += [(self.step, event.request_id) for event in output.events if event.finish_reason]
                self.events += output.kv_events.events

    def enter(self) -> None:
        while self.jobs and self.jobs[0][3] <= self.step:
            family, length, max_tokens, _ = self.jobs.pop(0)
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
            tokens = array("i", [family] * length)
            name = RequestId(f"{len(self.jobs)}")
            self.sched.add(
                Request(
                    request_id=name, token_ids=tokens, num_prompt_tokens=length, params=params, hash_root=ledger.ROOT
                )
            )

    def leap(self, num_steps: int) -> bool:
        run = self.sched.steady_run()
        count = min(run.num_steps, num_steps - self.step, (self.jobs[0][3] if self.jobs else num_steps) - self.step)
        if count < 1:
            return False
        rows = self.sched._table.running
        assert run.num_rows == len(rows)
        assert run.num_context_tokens == sum(request.num_tokens for request in rows)
        output = self.sched.fast_forward(count, TOKEN)
        assert not output.events
        self.events += output.kv_events.events
        self.step += count
        self.num_taken_at_once += count
        return True

    def state(self) -> tuple[object, ...]:
        self.sched.check_invariants()
        blocks = self.sched.blocks
        return (
            [
                (r.request_id, r.state, r.token_ids, r.num_computed_tokens, list(r.block_table), r.block_hashes)
                for r in self.sched._table.requests.values()
            ],
            [(e.name, e.block, e.num_uses, e.is_parked) for e in blocks.index._entries.values()],
            list(blocks.index._policy.hottest_first()),
            (blocks.pool._free, blocks.pool._refs),
            (self.sched.load(), self.sched._planner.head_is_blocked, self.sched._planner._in_flight._step),
            (self.events, self.ends),
        )


jobs = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 70), st.integers(1, 90), st.integers(0, 60)), min_size=1, max_size=8
)


@settings(max_examples=50, deadline=None)
@given(jobs, st.integers(12, 60), st.integers(1, 5), st.sampled_from([16, 32]), st.integers(1, 150))
def test_fast_forward_equals_single_steps(
    work: list[Job], num_blocks: int, rows: int, block_size: int, num_steps: int
) -> None:
    size = {"num_blocks": num_blocks, "rows": rows, "block_size": block_size}
    single, leaping = (Worker(work, at_once=at_once, **size) for at_once in (False, True))
    single.run(num_steps)
    leaping.run(num_steps)
    assert single.state() == leaping.state()


def test_fast_forward_long_answer_skips_most_steps() -> None:
    worker = Worker([(1, 10, 90, 0), (2, 10, 90, 0)], at_once=True, num_blocks=40, rows=4, block_size=16)
    worker.run(100)
    assert worker.num_taken_at_once > 85


def test_fast_forward_stops_before_request_ends() -> None:
    worker = Worker([(1, 10, 20, 0)], at_once=False, num_blocks=40, rows=4, block_size=16)
    worker.run(3)
    left = worker.sched.steady_run().num_steps
    with pytest.raises(InvariantError, match="would end within a run"):
        worker.sched.fast_forward(left + 1, TOKEN)


def test_fast_forward_with_step_in_flight_has_no_run() -> None:
    worker = Worker([(1, 10, 20, 0)], at_once=False, num_blocks=40, rows=4, block_size=16)
    worker.run(3)
    assert worker.sched.schedule(4.0) is not None
    assert worker.sched.steady_run().num_steps == 0
    with pytest.raises(InvariantError, match="step is in flight"):
        worker.sched.fast_forward(1, TOKEN)
