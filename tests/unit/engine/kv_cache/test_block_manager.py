import pytest

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.pool import KVBlockPool, PoolExhausted
from engine.types.config import SchedulerConfig
from engine.types.kv_events import Evicted, KVEventLog, Stored
from tandem.errors import Code, ConfigError, InvariantError
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, BlockId
from tests.support.engine import ledger


def manager(num_blocks: int = 4) -> BlockManager:
    return BlockManager(
        num_blocks=num_blocks, block_size=16, hasher=BlockHasher(b"test"), events=KVEventLog(capacity=100)
    )


def test_pool_counts_references_and_keeps_idle_content() -> None:
    pool = KVBlockPool(2)
    block = pool.allocate()
    assert pool.acquire(block) == 2
    assert pool.release(block, keep=True) == 1
    assert (pool.num_free, pool.num_idle, pool.num_used) == (1, 0, 1)
    assert pool.release(block, keep=True) == 0
    assert (pool.num_free, pool.num_idle, pool.num_used) == (1, 1, 0)
    assert pool.acquire(block) == 1
    pool.release(block, keep=True)
    pool.reclaim(block)
    assert (pool.num_free, pool.num_idle, pool.num_used) == (2, 0, 0)
    pool.check_invariants()


def test_pool_misuse_is_refused() -> None:
    pool = KVBlockPool(1)
    with pytest.raises(InvariantError):
        pool.release(BlockId(0), keep=False)
    with pytest.raises(InvariantError):
        pool.acquire(BlockId(0))
    block = pool.allocate()
    with pytest.raises(InvariantError):
        pool.reclaim(block)
    with pytest.raises(PoolExhausted) as refusal:
        pool.allocate()
    assert refusal.value.retryable
    assert refusal.value.code is Code.RESOURCE_EXHAUSTED
    pool.check_invariants()


def test_pool_audit_finds_damage() -> None:
    pool = KVBlockPool(2)
    block = pool.allocate()
    pool._free.append(block)
    with pytest.raises(InvariantError):
        pool.check_invariants()


def test_block_manager_promises_are_exact() -> None:
    blocks = manager(4)
    blocks.promise(3)
    taken = blocks.allocate(1)
    with pytest.raises(PoolExhausted):
        blocks.allocate(1)
    with pytest.raises(PoolExhausted):
        blocks.promise(1)
    bound = blocks.allocate_promised(2)
    assert blocks.num_promised == 1
    assert blocks.num_available == 0
    blocks.unpromise(1)
    assert blocks.num_available == 1
    with pytest.raises(InvariantError):
        blocks.unpromise(1)
    blocks.release([*taken, *bound])
    blocks.check_invariants()
    assert blocks.num_available == 4


def test_block_manager_promised_prefix_cannot_be_pinned() -> None:
    sched = ledger.scheduler(num_blocks=4, max_model_len=64)
    prompt = list(range(33))
    sched.add(ledger.request(prompt))
    ledger.run(sched, ledger.LedgerRunner())
    assert sched.load().num_evictable_blocks == 2
    sched.blocks.promise(3)
    match = sched.blocks.match(ledger.request(prompt))
    assert (match.num_blocks, match.num_parked, match.num_missing) == (2, 2, 1)
    with pytest.raises(PoolExhausted):
        sched.blocks.take_prefix(ledger.request(prompt), match)
    sched.check_invariants()


def test_event_log_beyond_capacity_has_a_gap() -> None:
    log = KVEventLog(capacity=3)
    event = Evicted(name=BlockHash(b"x"))
    for _ in range(2):
        log.append(event)
    first = log.drain()
    assert (first.first_seq, len(first.events), first.next_seq) == (0, 2, 2)
    for _ in range(5):
        log.append(event)
    second = log.drain()
    assert second.first_seq > first.next_seq
    assert second.next_seq == log.next_seq == 7
    assert log.drain().events == ()


def test_block_manager_clear_cache_keeps_blocks_in_use() -> None:
    sched = ledger.scheduler()
    sched.add(ledger.request(range(40)))
    ledger.run(sched, ledger.LedgerRunner())
    held = ledger.request(range(100, 140), prefill_only=True)
    sched.add(held)
    ledger.run(sched, ledger.LedgerRunner())
    sched.drain()
    sched.blocks.clear_cache()
    sched.check_invariants()
    cleared, *stored = sched.drain().kv_events.events
    assert type(cleared).__name__ == "Cleared"
    assert [event.name for event in stored if isinstance(event, Stored)] == held.block_hashes[:2]
    assert sched.blocks.index.snapshot()[1] == stored
    sched.release_held(held.request_id)
    ledger.assert_empty(sched)


@pytest.mark.parametrize("change", [{"block_size": 24}, {"num_blocks": 0}, {"max_batched_tokens": -1}])
def test_scheduler_config_impossible_bounds_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ledger.config(**change)
    assert isinstance(ledger.config(block_size=32), SchedulerConfig)
