"""The prefix map against a model made of sets, and the rules that keep it bounded and correct."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from router.types.worker_view import PrefixChange
from router.workers.prefix_map import PrefixMap
from tandem.values.ids import BlockHash, WorkerId

NAMES = [BlockHash(bytes([i]) * 16) for i in range(12)]
A, B = WorkerId("a"), WorkerId("b")


def _stored(first: int, *names: int) -> PrefixChange:
    return PrefixChange(first_sequence=first, snapshot=False, changes=tuple((NAMES[n], True) for n in names))


def _evicted(first: int, *names: int) -> PrefixChange:
    return PrefixChange(first_sequence=first, snapshot=False, changes=tuple((NAMES[n], False) for n in names))


def _snapshot(following: int, *names: int) -> PrefixChange:
    return PrefixChange(first_sequence=following, snapshot=True, changes=tuple((NAMES[n], True) for n in names))


@pytest.fixture
def two() -> PrefixMap:
    """Workers a and b, empty, with room for 8 blocks each."""
    prefix_map = PrefixMap(expectation_s=10.0)
    for worker in (A, B):
        prefix_map.add_worker(worker, capacity=8)
        prefix_map.apply(worker, _snapshot(0))
    return prefix_map


def test_prefix_map_counts_leading_blocks_per_worker(two: PrefixMap) -> None:
    two.apply(A, _stored(0, 0, 1, 2))
    two.apply(B, _stored(0, 0, 2, 3))
    assert two.longest_prefix(NAMES[:4]) == {A: 3, B: 1}
    assert two.longest_prefix(NAMES[2:4]) == {A: 1, B: 2}
    assert two.longest_prefix(NAMES[5:]) == {}
    assert two.longest_prefix([]) == {}


def test_prefix_map_larger_blocks_match_by_last_name() -> None:
    """Worker b's blocks hold two hash blocks each."""
    prefix_map = PrefixMap(expectation_s=10.0)
    prefix_map.add_worker(A, capacity=8)
    prefix_map.add_worker(B, capacity=4, names_per_block=2)
    prefix_map.apply(A, _snapshot(0, 0, 1, 2))
    prefix_map.apply(B, _snapshot(0, 1, 3))
    assert prefix_map.longest_prefix(NAMES) == {A: 3, B: 4}
    assert prefix_map.longest_prefix(NAMES[:3]) == {A: 3, B: 2}
    assert prefix_map.longest_prefix(NAMES[:1]) == {A: 1}
    prefix_map.expect(B, NAMES[:9], now_s=0.0)
    assert prefix_map.num_blocks(B) == 4
    assert prefix_map.longest_prefix(NAMES) == {A: 3, B: 8}
    prefix_map.revoke(B, NAMES[:9])
    assert prefix_map.longest_prefix(NAMES) == {A: 3, B: 4}
    prefix_map.drop_worker(B)
    assert prefix_map.longest_prefix(NAMES) == {A: 3}


def test_prefix_map_repeated_events_change_nothing(two: PrefixMap) -> None:
    two.apply(A, _stored(0, 0, 1))
    two.apply(A, _evicted(2, 1))
    two.apply(A, _stored(0, 0, 1))
    assert two.longest_prefix(NAMES) == {A: 1}
    assert not two.is_approximate(A)


def test_prefix_map_overlapping_message_applies_new_part(two: PrefixMap) -> None:
    two.apply(A, _stored(0, 0, 1))
    two.apply(A, _stored(1, 1, 2))
    assert two.longest_prefix(NAMES) == {A: 3}
    assert not two.is_approximate(A)


def test_prefix_map_gap_drops_earlier_blocks(two: PrefixMap) -> None:
    two.apply(A, _stored(0, 0, 1))
    two.apply(A, _stored(5, 0))
    assert two.is_approximate(A)
    assert two.longest_prefix(NAMES) == {A: 1}
    two.apply(A, _stored(6, 1))
    assert two.longest_prefix(NAMES) == {A: 2}
    two.apply(A, _snapshot(7, 0, 1, 2))
    assert not two.is_approximate(A)
    assert two.longest_prefix(NAMES) == {A: 3}


def test_prefix_map_worker_without_snapshot_is_approximate() -> None:
    prefix_map = PrefixMap()
    prefix_map.add_worker(A, capacity=4)
    prefix_map.apply(A, _stored(40, 0))
    assert prefix_map.is_approximate(A)
    assert prefix_map.longest_prefix(NAMES) == {A: 1}


def test_prefix_map_expectations_are_confirmed_revoked_or_expire(two: PrefixMap) -> None:
    two.expect(A, NAMES[:4], now_s=0.0)
    assert two.longest_prefix(NAMES) == {A: 4}
    two.apply(A, _stored(0, 0))
    two.apply(A, _evicted(1, 3))
    assert two.longest_prefix(NAMES) == {A: 3}
    two.revoke(A, NAMES[2:4])
    assert two.longest_prefix(NAMES) == {A: 2}
    two.expire(9.9)
    assert two.longest_prefix(NAMES) == {A: 2}
    two.expire(10.0)
    assert two.longest_prefix(NAMES) == {A: 1}
    two.revoke(A, NAMES[:1])
    assert two.longest_prefix(NAMES) == {A: 1}


def test_prefix_map_revoke_keeps_others_expectations(two: PrefixMap) -> None:
    for length in (4, 6, 2):
        two.expect(A, NAMES[:length], now_s=0.0)
    two.revoke(A, NAMES[:4])
    assert two.longest_prefix(NAMES) == {A: 6}
    two.revoke(A, NAMES[:6])
    assert two.longest_prefix(NAMES) == {A: 2}
    two.revoke(A, NAMES[:2])
    assert len(two) == 0


def test_prefix_map_expectation_of_departed_worker_is_ignored(two: PrefixMap) -> None:
    two.drop_worker(A)
    two.expect(A, NAMES, now_s=0.0)
    two.revoke(A, NAMES)
    assert len(two) == 0


def test_prefix_map_expectations_never_evict_confirmed_blocks(two: PrefixMap) -> None:
    two.apply(A, _stored(0, *range(6)))
    two.expect(A, NAMES[6:], now_s=0.0)
    assert two.num_blocks(A) == 8
    assert two.longest_prefix(NAMES) == {A: 8}
    two.apply(A, _stored(6, 10, 11))
    assert two.num_blocks(A) == 8
    assert two.longest_prefix(NAMES) == {A: 6}


def test_prefix_map_capacity_bounds_a_lying_worker(two: PrefixMap) -> None:
    two.apply(A, _stored(0, *range(12)))
    assert two.num_blocks(A) == 8
    assert len(two) == 8
    assert two.longest_prefix(NAMES) == {A: 8}


def test_prefix_map_dropping_worker_keeps_others(two: PrefixMap) -> None:
    two.apply(A, _stored(0, 0, 1))
    two.apply(B, _stored(0, 0))
    two.drop_worker(A)
    assert two.longest_prefix(NAMES) == {B: 1}
    assert len(two) == 1
    two.add_worker(A, capacity=8)
    assert two.longest_prefix(NAMES) == {B: 1}
    assert two.is_approximate(A)


def test_prefix_map_holds_a_hundred_workers() -> None:
    prefix_map = PrefixMap()
    workers = [WorkerId(str(i)) for i in range(100)]
    for index, worker in enumerate(workers):
        prefix_map.add_worker(worker, capacity=12)
        prefix_map.apply(worker, _snapshot(0, *range(index % 12 + 1)))
    assert prefix_map.longest_prefix(NAMES) == {worker: i % 12 + 1 for i, worker in enumerate(workers)}


class PrefixMapMachine(RuleBasedStateMachine):
    """Events in order, repeated, and with gaps; expectations; workers that come and go. Capacity never binds."""

    def __init__(self) -> None:
        super().__init__()
        self.map = PrefixMap(expectation_s=5.0)
        self.now_s = 0.0
        self.known: dict[WorkerId, set[BlockHash]] = {}
        self.expected: dict[WorkerId, dict[BlockHash, tuple[float, int]]] = {}
        self.next: dict[WorkerId, int] = {}

    workers = st.sampled_from([A, B, WorkerId("c")])
    # Names are chained: none comes twice in one prompt.
    names = st.lists(st.sampled_from(NAMES), max_size=6, unique=True)

    @rule(worker=workers)
    def join(self, worker: WorkerId) -> None:
        self.map.add_worker(worker, capacity=len(NAMES))
        self.known[worker], self.expected[worker] = set(), {}
        self.next.pop(worker, None)

    @rule(worker=workers)
    def leave(self, worker: WorkerId) -> None:
        self.map.drop_worker(worker)
        self.known.pop(worker, None)

    @rule(worker=workers, names=names, following=st.integers(0, 9))
    def reset(self, worker: WorkerId, names: Sequence[BlockHash], following: int) -> None:
        if worker in self.known:
            changes = tuple((name, True) for name in names)
            self.map.apply(worker, PrefixChange(first_sequence=following, snapshot=True, changes=changes))
            self.known[worker], self.expected[worker], self.next[worker] = set(names), {}, following

    @rule(
        worker=workers,
        changes=st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=6),
        skip=st.sampled_from([0, 0, 0, 0, -3, -1, 1, 2]),
    )
    def event(self, worker: WorkerId, changes: list[tuple[BlockHash, bool]], skip: int) -> None:
        if worker not in self.known:
            return
        due = self.next.get(worker)
        first = max(0, (0 if due is None else due) + skip)
        self.map.apply(worker, PrefixChange(first_sequence=first, snapshot=False, changes=tuple(changes)))
        if due is not None and first > due:
            self.known[worker], self.expected[worker] = set(), {}
        for number, (name, stored) in enumerate(changes, first):
            if due is not None and number < due:
                continue
            self.expected[worker].pop(name, None)
            (self.known[worker].add if stored else self.known[worker].discard)(name)
        if due is None or first + len(changes) > due:
            self.next[worker] = first + len(changes)

    @rule(worker=workers, names=names)
    def expect(self, worker: WorkerId, names: Sequence[BlockHash]) -> None:
        self.map.expect(worker, names, now_s=self.now_s)
        for name in names if worker in self.known else ():
            if name not in self.known[worker]:
                _, num_prompts = self.expected[worker].get(name, (0.0, 0))
                self.expected[worker][name] = self.now_s + 5.0, num_prompts + 1

    @rule(worker=workers, names=names)
    def revoke(self, worker: WorkerId, names: Sequence[BlockHash]) -> None:
        self.map.revoke(worker, names)
        for name in names if worker in self.known else ():
            lapses_s, num_prompts = self.expected[worker].pop(name, (0.0, 0))
            if num_prompts > 1:
                self.expected[worker][name] = lapses_s, num_prompts - 1

    @rule(elapsed_s=st.floats(0.0, 4.0))
    def time_passes(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.map.expire(self.now_s)
        for expected in self.expected.values():
            for name in [n for n, (lapses_s, _) in expected.items() if lapses_s <= self.now_s]:
                del expected[name]

    @rule(names=names)
    def look_up(self, names: Sequence[BlockHash]) -> None:
        model = {}
        for worker, known in self.known.items():
            held = known | self.expected[worker].keys()
            depth = next((i for i, name in enumerate(names) if name not in held), len(names))
            if depth:
                model[worker] = depth
        assert self.map.longest_prefix(names) == model

    @invariant()
    def sizes_agree(self) -> None:
        held = {w: known | self.expected[w].keys() for w, known in self.known.items()}
        assert len(self.map) == len(set().union(*held.values()))
        for worker, names in held.items():
            assert self.map.num_blocks(worker) == len(names)


TestPrefixMapMachine = PrefixMapMachine.TestCase
TestPrefixMapMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def names_of(count: int, salt: int = 0) -> list[BlockHash]:
    return [BlockHash((salt << 32 | i).to_bytes(16, "big")) for i in range(count)]


def test_prefix_map_lru_order_matches_worker() -> None:
    prefix_map, old, new = PrefixMap(), names_of(4, 1), names_of(4, 2)
    prefix_map.add_worker(A, capacity=8)
    for names in (old, new):
        changes = tuple((name, True) for name in names)
        prefix_map.apply(A, PrefixChange(first_sequence=4, snapshot=names is old, changes=changes))
    # Asked for again, though it came first: what came later gives way, and of that the leaf before its parents.
    prefix_map.expect(A, old, now_s=0.0)
    more = tuple((name, True) for name in names_of(2, 3))
    prefix_map.apply(A, PrefixChange(first_sequence=8, snapshot=False, changes=more))
    assert prefix_map.longest_prefix(old) == {A: 4}
    assert prefix_map.longest_prefix(new) == {A: 2}
    prefix_map.use(A, new[:2])
    more = tuple((name, True) for name in names_of(2, 4))
    prefix_map.apply(A, PrefixChange(first_sequence=10, snapshot=False, changes=more))
    assert prefix_map.longest_prefix(new) == {A: 2}
    assert prefix_map.longest_prefix(old) == {A: 2}
    assert prefix_map.longest_prefix(names_of(2, 3)) == {A: 2}


def test_prefix_map_silent_worker_becomes_approximate() -> None:
    prefix_map = PrefixMap(expectation_s=30.0, silence_s=10.0)
    prefix_map.add_worker(A, capacity=8)
    prefix_map.apply(A, _snapshot(0))
    prefix_map.expect(A, NAMES[:4], now_s=0.0)
    # A long queue is no silence.
    assert not prefix_map.lacks_snapshot(A, 25.0)
    prefix_map.computed(A, NAMES[:4], now_s=25.0)
    assert not prefix_map.lacks_snapshot(A, 34.9)
    assert not prefix_map.is_approximate(A)
    assert prefix_map.lacks_snapshot(A, 35.0)
    assert prefix_map.is_approximate(A)
    assert prefix_map.num_approximate == 1
    # Asked once, and again when that did not help.
    assert not prefix_map.lacks_snapshot(A, 36.0)
    assert prefix_map.lacks_snapshot(A, 45.0)
    # Meanwhile what it was asked to compute counts as cached, within its capacity, and is not promised to others.
    prefix_map.expire(1e9)
    assert prefix_map.longest_prefix(NAMES) == {A: 4}
    prefix_map.expect(A, NAMES[6:12], now_s=50.0)
    assert prefix_map.num_blocks(A) == 8
    assert prefix_map.longest_prefix(NAMES) == {A: 2}
    assert prefix_map.longest_prefix(NAMES[6:]) == {A: 6}
    assert prefix_map.num_confirmed(A, NAMES[6:12]) == 0
    prefix_map.apply(A, _snapshot(7, 0))
    assert prefix_map.num_approximate == 0
    assert prefix_map.longest_prefix(NAMES) == {A: 1}
    assert prefix_map.num_confirmed(A, NAMES[:1]) == 1


def test_prefix_map_any_event_ends_silence() -> None:
    prefix_map = PrefixMap(silence_s=10.0)
    prefix_map.add_worker(A, capacity=8)
    prefix_map.apply(A, _snapshot(0))
    prefix_map.expect(A, NAMES[:4], now_s=0.0)
    prefix_map.computed(A, NAMES[:4], now_s=1.0)
    prefix_map.apply(A, _stored(0, 0, 1, 2, 3))
    assert not prefix_map.lacks_snapshot(A, 1e6)
    # Nothing new was computed: nothing need be reported.
    prefix_map.expect(A, NAMES[:4], now_s=2.0)
    prefix_map.computed(A, NAMES[:4], now_s=3.0)
    assert not prefix_map.lacks_snapshot(A, 1e6)


def test_prefix_map_gap_requests_a_snapshot() -> None:
    prefix_map = PrefixMap(silence_s=10.0)
    prefix_map.add_worker(A, capacity=8)
    prefix_map.apply(A, _snapshot(0))
    prefix_map.apply(A, _stored(5, 0))
    assert [prefix_map.lacks_snapshot(A, now_s) for now_s in (1.0, 10.9, 11.0, 12.0, 21.0)] == [
        False, False, True, False, True,
    ]  # fmt: skip
    prefix_map.apply(A, _snapshot(6, 0))
    assert not prefix_map.lacks_snapshot(A, 99.0)


def test_prefix_map_dropping_worker_touches_only_its_blocks() -> None:
    prefix_map, shared = PrefixMap(), names_of(50)
    workers = [WorkerId(f"w{i}") for i in range(70)]
    for number, name in enumerate(workers):
        prefix_map.add_worker(name, capacity=100)
        changes = tuple((block, True) for block in [*shared[: number % 50 + 1], *names_of(3, number + 1)])
        prefix_map.apply(name, PrefixChange(first_sequence=0, snapshot=True, changes=changes))
    expected = {name: number % 50 + 1 for number, name in enumerate(workers)}
    assert prefix_map.longest_prefix(shared) == expected
    for name in workers[::2]:
        prefix_map.drop_worker(name)
        del expected[name]
        assert prefix_map.longest_prefix(shared) == expected
    # Slots are used again, and say nothing of who had them.
    slot = prefix_map.add_worker(WorkerId("new"), capacity=5)
    assert slot < 70
    assert prefix_map.longest_prefix(shared) == expected
    assert prefix_map.match(shared)[slot] == 0
