"""The scheduler's state machine tests for a model whose windowed layers have blocks of their own."""

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.request import Request
from engine.types.windows import WindowSpec
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockId
from tests.support.engine import ledger
from tests.unit.engine.scheduler.test_lookahead_machine import PipelinedMachine
from tests.unit.engine.scheduler.test_scheduler_machine import SchedulerMachine
from tests.unit.engine.scheduler.test_speculation_machine import with_drafts

LIMITS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class _Windowed(SchedulerMachine):
    """Every token must find its window in the blocks of each group; a pool of few blocks makes all of them scarce."""

    max_drafts = 0

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return Scheduler(self.with_windows(config), BlockHasher(ledger.SECRET))

    def with_windows(self, config: SchedulerConfig) -> SchedulerConfig:
        chunk = min(config.prefill_chunk_tokens, config.max_batched_tokens)
        self.spec = WindowSpec(
            window=1 + (7 * chunk + config.max_batched_tokens) % 45,
            num_groups=1 + config.num_blocks % 3,
            block_size=ledger.BLOCK,
            ahead_tokens=2 * max(chunk, 1 + self.max_drafts),
        )
        self.runner.window = self.spec.window
        # As many as the longest sequence needs, and a few.
        num_blocks = config.num_blocks + self.spec.num_groups * self.spec.most_sets
        return replace(config, num_blocks=num_blocks, windows=self.spec)

    def land(self, request: Request, held: int, landed: int) -> None:
        super().land(request, held, landed)
        assert request.windows is not None
        entries = ledger.kv_of(request.token_ids)
        first = max(held, request.windows.first * ledger.BLOCK)
        for position in range(first, landed):
            self.runner.write_windows(ledger.windows_of(request), position, entries[position])

    def awaited(self, request: Request, blocks: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
        table = request.windows
        if table is None:
            return blocks
        begin = max(table.first, len(request.block_table) - len(blocks))
        return (*blocks, *(block for i in range(begin, len(table)) for block in table.set_at(i)))

    @invariant()
    def windows_are_bounded(self) -> None:
        for request in self.requests.values():
            table = request.windows
            if table is not None:
                assert table.num_held + table.num_credits <= self.spec.most_sets
                assert not table.num_held or len(table) <= len(request.block_table)


class WindowedMachine(_Windowed):
    pass


class PipelinedWindowedMachine(PipelinedMachine, _Windowed):
    pass


class SpeculatingWindowedMachine(_Windowed):
    max_drafts = 9

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return with_drafts(super().make_scheduler(config), self.expected)


class PipelinedSpeculatingWindowedMachine(PipelinedMachine, _Windowed):
    max_drafts = 9

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return with_drafts(super().make_scheduler(config), self.expected)


for machine in (
    WindowedMachine,
    PipelinedWindowedMachine,
    SpeculatingWindowedMachine,
    PipelinedSpeculatingWindowedMachine,
):
    machine.TestCase.settings = LIMITS
TestWindowed = WindowedMachine.TestCase
TestPipelinedWindowed = PipelinedWindowedMachine.TestCase
TestSpeculatingWindowed = SpeculatingWindowedMachine.TestCase
TestPipelinedSpeculatingWindowed = PipelinedSpeculatingWindowedMachine.TestCase
