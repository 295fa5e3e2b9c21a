import pytest

from engine.kv_cache.prefix_index import PrefixIndex
from engine.types.kv_events import Evicted, KVEventLog, Stored
from tandem.errors import InvariantError
from tandem.values.ids import BlockHash, BlockId

ROOT = BlockHash(b"root")
A, B, C = BlockHash(b"a"), BlockHash(b"b"), BlockHash(b"c")


def chain() -> PrefixIndex:
    """Root -> A -> B -> C in blocks 0, 1, 2, all referenced."""
    index = PrefixIndex(KVEventLog(capacity=100))
    index.insert(A, BlockId(0), parent=ROOT, is_first=True)
    index.insert(B, BlockId(1), parent=A, is_first=False)
    index.insert(C, BlockId(2), parent=B, is_first=False)
    return index


def test_prefix_index_evicts_leaves_first_and_reports_in_order() -> None:
    index = chain()
    for block in (2, 1, 0):
        index.park(BlockId(block))
    index.check_invariants()
    index.unpark(BlockId(0))
    index.park(BlockId(0))
    assert [index.evict() for _ in range(3)] == [2, 1, 0]
    stored, evicted = [], []
    for event in index.events.drain().events:
        (stored if isinstance(event, Stored) else evicted).append(event.name)  # type: ignore[union-attr]
    assert (stored, evicted) == ([A, B, C], [C, B, A])
    with pytest.raises(InvariantError):
        index.evict()


def test_prefix_index_evicts_least_recently_used_chain() -> None:
    index = chain()
    index.insert(BlockHash(b"z"), BlockId(9), parent=ROOT, is_first=True)
    for block in (9, 2, 1, 0):
        index.park(BlockId(block))
    index.unpark(BlockId(9))
    index.park(BlockId(9))
    assert [index.evict() for _ in range(4)] == [2, 1, 0, 9]


def test_prefix_index_orphans_and_duplicates_are_refused() -> None:
    index = chain()
    with pytest.raises(InvariantError):
        index.insert(BlockHash(b"orphan"), BlockId(7), parent=BlockHash(b"unknown"), is_first=False)
    with pytest.raises(InvariantError):
        index.insert(BlockHash(b"alias"), BlockId(0), parent=ROOT, is_first=True)
    with pytest.raises(InvariantError):
        index.insert(A, BlockId(7), parent=ROOT, is_first=True)


def test_prefix_index_rebind_replaces_parked_block() -> None:
    index = chain()
    index.park(BlockId(2))
    assert index.rebind(C, BlockId(8)) == 2
    assert index.find(C) == 8
    assert not index.holds(BlockId(2))
    assert not index.is_parked(C)
    index.check_invariants()
    assert [type(e) for e in index.events.drain().events].count(Evicted) == 0


def test_prefix_index_audit_finds_referenced_child_of_parked_parent() -> None:
    index = chain()
    index.park(BlockId(0))
    with pytest.raises(InvariantError, match="its parent is not"):
        index.check_invariants()


def test_prefix_index_audit_finds_wrong_eviction_order() -> None:
    index = chain()
    for block in (0, 1, 2):
        index.park(BlockId(block))
    with pytest.raises(InvariantError, match="after its parent"):
        index.check_invariants()
