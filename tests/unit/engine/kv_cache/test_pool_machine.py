"""Random histories of the pool with its index, under every eviction policy."""

from typing import ClassVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.eviction import eviction_policy
from engine.kv_cache.pool import PoolExhausted
from engine.types.kv_events import Cleared, Evicted, KVEventLog, Stored
from engine.types.request import Request
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, BlockId, RequestId
from tests.support.engine import ledger

# Few different prompts with long common beginnings, so that prefixes are found, shared, evicted and found again.
prompts = st.builds(
    lambda family, length, own: [family] * length + own,
    st.integers(0, 1),
    st.integers(0, 70),
    st.lists(st.integers(0, 1), min_size=1, max_size=3),
)


class PoolMachine(RuleBasedStateMachine):
    """Tables are added, computed, pinned and freed in any order; reservations are made, cancelled and used."""

    tables = Bundle("tables")
    eviction: ClassVar[str] = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.events = KVEventLog(capacity=100_000)
        self.blocks = BlockManager(
            num_blocks=12,
            block_size=ledger.BLOCK,
            hasher=BlockHasher(ledger.SECRET),
            events=self.events,
            policy=eviction_policy(self.eviction),
        )
        self.live: list[Request] = []
        self.pins: list[RequestId] = []
        self.mirror: dict[BlockHash, BlockHash] = {}

    @rule(target=tables, prompt=prompts)
    def take(self, prompt: list[int]) -> object:
        request = ledger.request(prompt)
        match = self.blocks.match(request)
        if match.cost > self.blocks.num_available:
            return multiple()
        self.blocks.take_prefix(request, match)
        self.blocks.grow(request, self.blocks.allocate(match.num_missing))
        self.live.append(request)
        return request

    @rule(request=tables, num_tokens=st.integers(1, 80))
    def compute(self, request: Request, num_tokens: int) -> None:
        if request not in self.live:
            return
        first = request.num_computed_tokens // ledger.BLOCK
        request.num_computed_tokens = min(request.num_tokens, request.num_computed_tokens + num_tokens)
        self.blocks.release_after_use(request.request_id, self.blocks.index_computed(request, first))

    @rule(target=tables, source=tables, data=st.data())
    def fork(self, source: Request, data: st.DataObject) -> object:
        """A twin shares all full blocks that are computed and gets its own copy of the block after them."""
        if source not in self.live or not self.blocks.num_available:
            return multiple()
        twin = ledger.request(source.token_ids)
        match = self.blocks.match(twin)
        if match.cost > self.blocks.num_available or match.num_blocks >= len(source.block_table):
            return multiple()
        self.blocks.take_prefix(twin, match)
        (copy,) = self.blocks.fork(twin, source, match.num_blocks)
        assert copy.source != copy.target
        assert self.blocks.pool.num_refs(copy.target) == 1
        self.blocks.grow(twin, self.blocks.allocate(match.num_missing - 1))
        self.live.append(twin)
        if data.draw(st.booleans()):
            self.live.remove(source)
            self.blocks.release_after_use(source.request_id, source.block_table.clear())
        self.blocks.begin_step()
        self.blocks.end_step()
        return twin

    @rule(request=tables)
    def pin(self, request: Request) -> None:
        if request in self.live:
            self.blocks.pin(request.request_id)
            self.pins.append(request.request_id)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            self.blocks.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(request=consumes(tables))
    def give_up(self, request: Request) -> None:
        if request not in self.live:
            return
        self.live.remove(request)
        self.blocks.release_after_use(request.request_id, request.block_table.clear())

    @rule(n=st.integers(1, 6))
    def promise(self, n: int) -> None:
        room = self.blocks.num_available
        try:
            self.blocks.promise(n)
        except PoolExhausted:
            assert n > room
        else:
            assert n <= room

    @rule(n=st.integers(1, 6))
    def unpromise(self, n: int) -> None:
        self.blocks.unpromise(min(n, self.blocks.num_promised))

    @rule(n=st.integers(1, 6))
    def allocate_from_promised(self, n: int) -> None:
        self.blocks.release(self.blocks.allocate_promised(min(n, self.blocks.num_promised)))

    @rule()
    def clear(self) -> None:
        self.blocks.clear_cache()

    @invariant()
    def conserved(self) -> None:
        self.blocks.check_invariants()
        owned = [block for request in self.live for block in request.block_table] + self.blocks.pinned_blocks()
        refs = [self.blocks.pool.num_refs(BlockId(i)) for i in range(12)]
        assert refs == [owned.count(BlockId(i)) for i in range(12)]

    @invariant()
    def events_match_index(self) -> None:
        for event in self.events.drain().events:
            match event:
                case Stored(name=name, parent=parent):
                    assert parent == ledger.ROOT or parent in self.mirror
                    self.mirror[name] = parent
                case Evicted(name=name):
                    assert name not in self.mirror.values()
                    del self.mirror[name]
                case Cleared():
                    self.mirror.clear()
        assert self.mirror == {entry.name: entry.parent for entry in self.blocks.index.snapshot()[1]}


class LfuPoolMachine(PoolMachine):
    """The same with least-frequently-used eviction."""

    eviction = "lfu"


class PrefixPoolMachine(PoolMachine):
    """The same with the deepest and least shared evicted first."""

    eviction = "prefix"


PoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
for machine in (LfuPoolMachine, PrefixPoolMachine):
    machine.TestCase.settings = settings(PoolMachine.TestCase.settings, max_examples=60)
TestPool = PoolMachine.TestCase
TestLfuPool = LfuPoolMachine.TestCase
TestPrefixPool = PrefixPoolMachine.TestCase
