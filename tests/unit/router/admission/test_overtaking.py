"""A request that waits for KV memory: what it leaves free is used meanwhile, and it has its turn all the same."""

from collections import deque

import pytest
from msgspec.structs import replace

from router.admission.types import AdmissionEntry, RefusedMemory
from router.types.worker_view import WorkerLoad
from tandem.config.admission import LimitsConfig, TenantLimits
from tests.support.router.admission_world import AdmissionBench
from tests.support.router.overload_world import snapshot

POOL = 160_000
BLOCK = 16


class MemoryBench(AdmissionBench):
    """One decode worker, whose free memory a test sets."""

    def __init__(self, *, free: int, **more: object) -> None:
        super().__init__(max_queue_s=1000.0, **more)  # type: ignore[arg-type]
        self.set_free(free)

    def set_free(self, tokens: int, *, backlog: int = 0) -> None:
        load = WorkerLoad(num_free_blocks=tokens // BLOCK, prefill_tokens_per_s=1000.0)
        self.workers = [replace(snapshot(active=1, backlog=backlog), load=load)]

    def run(self) -> list[AdmissionEntry]:
        """Give turns, and place what had one."""
        found = self.turns()
        for entry in found:
            self.admission.placed(entry)
        return found


def test_large_request_waiting_for_memory_is_overtaken_by_those_that_fit_beside_it() -> None:
    bench = MemoryBench(free=64_000)
    large = bench.enter("a", tokens=100_000)
    assert large.waiting
    assert not any(bench.enter("b", tokens=100).waiting for _ in range(400))
    # They are 40,000 tokens and their answers: with 20,000 more the pool would never hold the large one as well.
    assert bench.enter("b", tokens=20_000).waiting
    assert not bench.enter("c", tokens=19_000).waiting
    assert bench.run() == []
    bench.set_free(100_016)
    assert bench.run()[0] is large


def test_large_request_is_overtaken_again_when_those_before_have_ended() -> None:
    bench = MemoryBench(free=64_000)
    bench.enter("a", tokens=100_000)
    first, second = bench.enter("b", tokens=30_000), bench.enter("b", tokens=29_000)
    third = bench.enter("b", tokens=30_000)
    assert (first.waiting, second.waiting, third.waiting) == (False, False, True)
    bench.admission.generated(first, 500)
    bench.admission.end(second)
    assert bench.run() == [], "the first one's answer takes the room"
    bench.admission.end(first)
    assert bench.run() == [third]


def test_queued_request_overtakes_large_one_in_fair_order() -> None:
    bench = MemoryBench(free=64_000, limits=LimitsConfig(default=TenantLimits(best_priority=-1)))
    bench.set_free(64_000, backlog=1000)
    large = bench.enter("a", tokens=100_000, priority=-1)
    many = [bench.enter("b") for _ in range(2)]
    few = bench.enter("c")
    assert all(entry.waiting for entry in (large, *many, few))
    bench.set_free(64_000, backlog=10)
    assert bench.turns() == [many[0]]
    bench.admission.placed(many[0])
    assert bench.turns() == [few]
    bench.admission.placed(few)
    assert bench.turns() == [many[1]]


def test_large_request_leaves_last_slot_to_itself() -> None:
    bench = MemoryBench(free=64_000)
    bench.enter("a", tokens=100_000)
    bench.places = 1
    small = bench.enter("b")
    assert small.waiting
    assert bench.run() == []
    bench.places = 2
    assert bench.run() == [small]


@pytest.mark.parametrize("num_large", [1, 3])
def test_large_requests_have_their_turn_under_steady_load(num_large: int) -> None:
    """Streams hold two thirds of the pool, and end one by one; requests of 2,000 tokens take what becomes free."""
    bench = MemoryBench(free=0)
    older = deque([2_000] * 53)
    small: deque[tuple[AdmissionEntry, int]] = deque()
    small_waiting: list[AdmissionEntry] = []
    large: list[AdmissionEntry] = []
    large_running: deque[tuple[AdmissionEntry, int]] = deque()
    num_overtakes = 0
    for step in range(400):
        held = sum(older) + sum(e.ticket.num_tokens for e, _ in [*small, *large_running])
        assert held <= POOL
        bench.set_free(POOL - held)
        if step == 5:
            large = [bench.enter(f"large{index}", tokens=80_000) for index in range(num_large)]
        entry = bench.enter("small", tokens=2_000)
        small_waiting.append(entry)
        if not entry.waiting:
            small.append((entry, step + 20))
            small_waiting.remove(entry)
            num_overtakes += any(one.waiting for one in large)
            bench.set_free(POOL - held - 2_000)
        for found in bench.run()[:1]:
            (large_running if found in large else small).append((found, step + 20))
            if found in small_waiting:
                small_waiting.remove(found)
        if older and step % 2:
            older.popleft()
        for line in (small, large_running):
            while line and line[0][1] <= step:
                bench.admission.end(line.popleft()[0])
        if large and not any(one.waiting for one in large):
            break
    assert not any(one.waiting for one in large)
    assert num_overtakes > 10


def test_refused_choice_blocks_only_what_needs_as_much_memory() -> None:
    bench = MemoryBench(free=64_000)
    bench.num_refused, bench.refused = 1, RefusedMemory(least_tokens=50_000, total_tokens=50_000)
    for tokens in (100, 49_000, 11_000):
        assert not bench.enter("a", tokens=tokens).waiting
    assert bench.enter("b", tokens=50_000).waiting
    # Beside the choice the pool has 110,000 tokens.
    assert bench.enter("c", tokens=49_999).waiting
    bench.num_refused = 0
    assert len(bench.turns()) == 1


def test_refused_choices_that_want_the_whole_pool_block_all() -> None:
    bench = MemoryBench(free=64_000)
    bench.num_refused, bench.refused = 9, RefusedMemory(least_tokens=20_000, total_tokens=180_000)
    assert bench.enter("a", tokens=100).waiting
