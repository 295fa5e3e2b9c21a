"""A pool's list of cached chains: hottest first, every block once, nothing without its root."""

from random import Random

import pytest

from engine.kv_cache.eviction import POLICIES
from engine.kv_cache.prefix_index import PrefixIndex
from engine.types.kv_events import KVEventLog
from tandem.values.ids import BlockHash, BlockId

ROOT = BlockHash(bytes(16))


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


class Cache:
    """Chains of blocks, block i under name i."""

    def __init__(self, policy: str = "lru") -> None:
        self.index = PrefixIndex(KVEventLog(10_000), POLICIES[policy]())
        self.paths: dict[int, list[int]] = {}

    def store(self, *numbers: int, after: int | None = None) -> None:
        """As by a request that computed them; they stay in use."""
        for number in numbers:
            parent = ROOT if after is None else name(after)
            self.index.insert(name(number), BlockId(number), parent=parent, is_first=after is None)
            self.paths[number] = [*(self.paths[after] if after is not None else []), number]
            after = number

    def end(self, *numbers: int) -> None:
        """The request ends: tail first."""
        for number in reversed(numbers):
            self.index.park(BlockId(number))

    def use(self, *numbers: int) -> None:
        """Another request finds them and ends."""
        for number in numbers:
            self.index.unpark(BlockId(number))
            self.index.use(BlockId(number))
        self.end(*numbers)

    def chains_of(self, most: int = 1000) -> list[tuple[int | None, list[int]]]:
        chains = self.index.chains(most)
        assert all(chain.after == ROOT for chain in chains if chain.from_root)
        return [(None if c.from_root else number_of(c.after), [number_of(n) for n in c.names]) for c in chains]


def number_of(of: BlockHash) -> int:
    return int.from_bytes(of, "big")


def test_cached_chains_are_hottest_first_and_share_blocks_once() -> None:
    cache = Cache()
    cache.store(1, 2, 3)
    cache.end(1, 2, 3)
    cache.store(11, 12)
    cache.end(11, 12)
    cache.use(1, 2)  # and computes 4 behind them
    cache.index.unpark(BlockId(1))
    cache.index.unpark(BlockId(2))
    cache.store(4, after=2)
    cache.end(1, 2, 4)
    assert cache.chains_of() == [(None, [1, 2, 4]), (None, [11, 12]), (2, [3])]
    assert cache.chains_of(4) == [(None, [1, 2, 4]), (None, [11])]
    assert cache.chains_of(0) == []


def test_cached_chains_referenced_blocks_come_first() -> None:
    cache = Cache()
    cache.store(1, 2)
    cache.store(11)
    cache.end(11)
    assert cache.chains_of() == [(None, [1, 2]), (None, [11])]


def test_cached_chains_of_empty_cache_are_none() -> None:
    assert Cache().chains_of() == []


@pytest.mark.parametrize("policy", POLICIES)
def test_cached_chains_last_is_evicted_first(policy: str) -> None:
    cache = Cache(policy)
    for first in range(0, 60, 3):
        cache.store(first + 1, first + 2, first + 3)
        cache.end(first + 1, first + 2, first + 3)
    rng = Random(3)
    for _ in range(40):
        first = 3 * rng.randrange(20)
        cache.use(first + 1, first + 2, first + 3)
    order = [names[-1] for _, names in cache.chains_of()]
    coldest = number_of_block(cache.index.evict())
    assert coldest == order[-1]


def number_of_block(block: BlockId) -> int:
    return int(block)


@pytest.mark.parametrize("policy", POLICIES)
def test_cached_chains_report_random_caches_completely(policy: str) -> None:
    rng = Random(11)
    for _ in range(30):
        cache = Cache(policy)
        for number in range(1, 60):
            cache.store(number, after=rng.choice([None, *cache.paths]))
        # A referenced block has referenced ancestors: park leaves only.
        for number in sorted(cache.paths, key=lambda n: -len(cache.paths[n])):
            if rng.random() < 0.7 and not any(
                path[:-1] and number in path[:-1] and not cache.index.is_parked(name(path[-1]))
                for path in cache.paths.values()
            ):
                cache.index.park(BlockId(number))
        cache.index.check_invariants()
        chains = cache.index.chains(1000)
        seen: dict[BlockHash, list[int]] = {}
        for chain in chains:
            path = [] if chain.from_root else list(seen[chain.after])
            for each in chain.names:
                assert each not in seen
                path.append(number_of(each))
                assert path == cache.paths[number_of(each)]
                seen[each] = list(path)
        assert len(seen) == len(cache.paths)
