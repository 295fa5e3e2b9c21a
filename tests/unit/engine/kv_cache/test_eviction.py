"""Three eviction policies for leaf blocks."""

import pytest

from engine.kv_cache.eviction import POLICIES, eviction_policy
from engine.kv_cache.prefix_index import PrefixIndex
from engine.types.config import EVICTION_POLICIES
from engine.types.kv_events import Evicted, KVEventLog
from tandem.errors import ConfigError, InvariantError
from tandem.values.ids import BlockHash, BlockId
from tests.support.engine import ledger

ROOT = BlockHash(b"root")


class Cache:
    """Chains of single-letter blocks, each named by the text up to it; all parked unless taken."""

    def __init__(self, policy: str) -> None:
        self.index = PrefixIndex(KVEventLog(capacity=1000), eviction_policy(policy))
        self._next = 0

    def touch(self, text: str) -> None:
        """Use a chain: reuse its cached part, compute the rest, and release it."""
        names = [BlockHash(text[: i + 1].encode()) for i in range(len(text))]
        blocks = []
        for i, name in enumerate(names):
            block = self.index.find(name)
            if block is None:
                block = BlockId(self._next)
                self._next += 1
                self.index.insert(name, block, parent=names[i - 1] if i else ROOT, is_first=i == 0)
            else:
                self.index.unpark(block)
                self.index.use(block)
            blocks.append(block)
        for block in reversed(blocks):
            self.index.park(block)
        self.index.check_invariants()

    def evict(self, count: int = 1) -> list[str]:
        for _ in range(count):
            self.index.evict()
            self.index.check_invariants()
        events = [event for event in self.index.events.drain().events if isinstance(event, Evicted)]
        return [event.name.decode() for event in events[-count:]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_eviction_takes_leaves_first_under_every_policy(policy: str) -> None:
    cache = Cache(policy)
    for text in ("abc", "abd", "abc", "x", "abd", "ae"):
        cache.touch(text)
    gone = cache.evict(6)
    for i, name in enumerate(gone):
        assert not any(later.startswith(name) for later in gone[i + 1 :])
    assert not len(cache.index)
    with pytest.raises(InvariantError):
        cache.index.evict()


def test_eviction_lru_forgets_popular_chain() -> None:
    cache = Cache("lru")
    for text in ("p", "p", "p", "q"):
        cache.touch(text)
    assert cache.evict() == ["p"]


def test_eviction_lfu_keeps_popular_chain_until_aged() -> None:
    cache = Cache("lfu")
    for text in ("p", "p", "p", "q"):
        cache.touch(text)
    assert cache.evict() == ["q"]
    # Each eviction raises the floor from which newcomers start: in the end they are worth more than an old favourite.
    gone = []
    for k in range(5):
        cache.touch(f"{k}")
        gone += cache.evict()
    assert gone[0] == "0"
    assert "p" in gone


def test_eviction_prefix_policy_keeps_shared_roots() -> None:
    cache = Cache("prefix")
    cache.touch("sys-one")
    cache.touch("sys-two")
    cache.touch("other")
    gone = cache.evict(15)
    # The ends of the longer chains go first; what two shared outlives what one had, at every depth.
    assert set(gone[:2]) == {"sys-one", "sys-two"}
    for shared, own in (("sys-", "othe"), ("sys", "oth"), ("sy", "ot"), ("s", "o")):
        assert gone.index(own) < gone.index(shared)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_eviction_any_policy_yields_the_same_tokens(policy: str) -> None:
    sched, runner = ledger.scheduler(num_blocks=16, eviction=policy), ledger.LedgerRunner()
    for k in range(40):
        prompt = [*([k % 3] * 40), *([k % 7] * 30)]
        request = ledger.request(prompt)
        sched.add(request)
        assert ledger.run(sched, runner)[request.request_id] == ledger.continuation(prompt, request.params)
    ledger.assert_empty(sched)
    sched.blocks.clear_cache()
    sched.check_invariants()
    assert sched.load().num_evictable_blocks == 0


def test_eviction_every_configurable_policy_can_be_created() -> None:
    assert tuple(POLICIES) == EVICTION_POLICIES


def test_eviction_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="one of lru, lfu, prefix, not 'fifo'"):
        eviction_policy("fifo")


def test_eviction_audit_finds_unevictable_leaf() -> None:
    cache = Cache("lfu")
    cache.touch("ab")
    cache.index._policy.clear()
    with pytest.raises(InvariantError, match="not the parked leaves"):
        cache.index.check_invariants()
