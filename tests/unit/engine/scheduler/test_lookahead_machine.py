"""The scheduler's state machine test with a step always in flight on a late device."""

from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant, rule

from engine.scheduler.request_limits import end_rule, reason_of
from engine.types.request import Batch, FinishReason, Request, RequestState
from tests.support.engine import ledger
from tests.support.engine.delayed import DelayedRunner, DelayedStep
from tests.unit.engine.scheduler.test_scheduler_machine import SchedulerMachine


class PipelinedMachine(SchedulerMachine):
    """Each request must have the output and end that it has without pipelining."""

    launched: DelayedStep | None = None

    def make_runner(self) -> DelayedRunner:
        self.late = DelayedRunner()
        return self.late

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            batch = self.sched.schedule(self.now)
            launched = None
            if batch is not None:
                self.check_writes(batch)
                launched = self.late.launch(batch)
            elif self.launched is None:
                self.take_output(self.sched.drain())
                return
            self.settle()
            self.launched = launched
            if batch is not None and batch.saves_free_blocks:
                self.settle()
            for transfer_id in self.stale_writers:
                self.write_garbage(transfer_id)
            self.conserved()

    def settle(self) -> None:
        step, self.launched = self.launched, None
        if step is not None:
            self.take_output(self.sched.commit(step.batch, step.tokens()))

    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        """From now on the model yields only NaN for this request."""
        alive = (r for r in self.requests.values() if r.state in {RequestState.WAITING, RequestState.RUNNING})
        request = self.pick(data, alive)
        if isinstance(request, Request) and request not in self.reserved.values():
            self.late.poisoned.add(request.request_id)

    def check_writes(self, batch: Batch) -> None:
        """No block is written while another owner reads it, also in flight; copies read their source first."""
        pool = self.sched.blocks.pool
        read = Counter(copy.source for step in self.late.pending for copy in step.batch.copies)
        read.update(copy.source for copy in batch.copies)
        for item in batch.items:
            request = item.request
            assert item.start + item.num_tokens < end_rule(request, self.sched._config).max_tokens
            assert item.start + item.num_tokens <= request.num_tokens or not request.prefill_only
            table, end = item.request.block_table, item.start + item.num_tokens
            for i in range(item.start // ledger.BLOCK, -(-end // ledger.BLOCK)):
                assert pool.num_refs(table[i]) - read[table[i]] == 1

    @invariant()
    def pending_steps_use_own_blocks(self) -> None:
        for step in self.late.pending:
            blocks = step.blocks()
            assert all(self.sched.blocks.pool.num_refs(block) for block in blocks)
            for request in self.reserved.values():
                assert not blocks & {*request.block_table[request.num_computed_tokens // ledger.BLOCK :]}

    @invariant()
    def pending_steps_never_write_shared_sources(self) -> None:
        """Until its release; so no reader has to wait for the device."""
        alive = (RequestState.RUNNING, RequestState.HELD)
        outputs = {
            block
            for request_id, blocks in self.sources.items()
            if self.requests[request_id].state in alive
            for block in blocks
        }
        for step in self.late.pending:
            assert not outputs & step.written()

    @invariant()
    def finish_reasons_are_right(self) -> None:
        for request_id, reason in self.ended.items():
            request, outputs = self.requests[request_id], self.outputs[request_id]
            if reason is FinishReason.ERROR:
                assert request_id in self.late.poisoned
            elif reason not in {FinishReason.ABORT, FinishReason.DEADLINE}:
                rule_ = end_rule(request, self.sched._config)
                assert reason is reason_of(rule_, outputs[-1], request.num_prompt_tokens + len(outputs))

    def assert_same_answers(self) -> None:
        for request_id, outputs in self.outputs.items():
            expected = self.expected(self.requests[request_id])
            assert outputs == expected[: len(outputs)]
            cut_short = (None, FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.ERROR)
            if self.ended.get(request_id) not in cut_short:
                assert outputs == expected


PipelinedMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPipelined = PipelinedMachine.TestCase
