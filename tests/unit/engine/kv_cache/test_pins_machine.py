"""The scheduler's machine once more, with pinned prefixes: the pool stays sound, pins stay within their bounds and
keep what they hold, and whatever is pinned every request comes to its end."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import invariant, rule

from engine.kv_cache.lower_tiers import HostTier
from engine.kv_cache.pins import PinBounds
from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.request import RequestState
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome
from tests.support.engine import ledger
from tests.unit.engine.scheduler.test_lookahead_machine import PipelinedMachine
from tests.unit.engine.scheduler.test_scheduler_machine import SchedulerMachine
from tests.unit.engine.scheduler.test_windows_machine import PipelinedWindowedMachine, WindowedMachine


class Pins:
    """Rules and invariants of both machines."""

    sched: Scheduler
    now: float
    is_ending = False

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return self.with_pins(config, tier=self.tier)

    def with_pins(self, config: SchedulerConfig, *, tier: HostTier | None) -> Scheduler:
        self.held: dict[PinKey, BlockHash] = {}
        self.bounds = PinBounds(max_blocks=config.num_blocks // 2, max_tenant_blocks=config.num_blocks // 3)
        return Scheduler(config, BlockHasher(ledger.SECRET), tier=tier, block_bytes=1, pins=self.bounds)

    @rule(data=st.data(), tenant=st.sampled_from("ab"), lasts=st.booleans())
    def pin_prefix(self, data: st.DataObject, tenant: str, lasts: bool) -> None:
        names = list(self.sched.blocks.index.names())
        if not names:
            return
        name = data.draw(st.sampled_from(names))
        order = PinOrder(key=PinKey(tenant, name.hex()), last_block=name, ttl_s=100_000.0 if lasts else 5.0)
        if self.sched.pins.pin(order, self.now).outcome is PinOutcome.HELD:
            self.held.pop(order.key, None)
            self.held[order.key] = name

    @rule(data=st.data())
    def unpin_prefix(self, data: st.DataObject) -> None:
        key = self.pick(data, self.held)
        if key is not None:
            self.sched.pins.unpin(key)
            del self.held[key]

    def take_output(self, output: object) -> None:
        for key in output.lost_pins:  # type: ignore[attr-defined]
            self.held.pop(key, None)
        super().take_output(output)  # type: ignore[misc]

    @invariant()
    def pins_are_bounded_and_keep_blocks(self) -> None:
        if not hasattr(self, "sched"):
            return
        totals = self.sched.pins.totals()
        assert totals.num_blocks <= self.bounds.max_blocks
        references = self.sched.pins.references()
        assert len(set(references)) == totals.num_blocks
        assert all(self.sched.blocks.pool.num_refs(block) for block in references)

    def teardown(self) -> None:
        self.is_ending = True
        super().teardown()  # type: ignore[misc]

    def settle(self) -> None:
        """All requests end beside the pins; only then are these removed."""
        super().settle()  # type: ignore[misc]
        if self.is_ending and all(request.state is RequestState.FINISHED for request in self.requests.values()):
            self.sched.pins.expire(float("inf"))


class PinnedMachine(Pins, SchedulerMachine):
    pass


class PinnedPipelinedMachine(Pins, PipelinedMachine):
    pass


class PinnedWindowedMachine(Pins, WindowedMachine):
    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return self.with_pins(self.with_windows(config), tier=None)


class PinnedPipelinedWindowedMachine(Pins, PipelinedWindowedMachine):
    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return self.with_pins(self.with_windows(config), tier=None)


_SETTINGS = settings(SchedulerMachine.TestCase.settings, max_examples=60)
PinnedMachine.TestCase.settings = _SETTINGS
PinnedPipelinedMachine.TestCase.settings = _SETTINGS
PinnedWindowedMachine.TestCase.settings = _SETTINGS
PinnedPipelinedWindowedMachine.TestCase.settings = _SETTINGS
TestPinned = PinnedMachine.TestCase
TestPinnedPipelined = PinnedPipelinedMachine.TestCase
TestPinnedWindowed = PinnedWindowedMachine.TestCase
TestPinnedPipelinedWindowed = PinnedPipelinedWindowedMachine.TestCase
