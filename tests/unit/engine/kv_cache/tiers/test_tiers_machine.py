"""The scheduler's machines once more, with a cache below the pool: a disk that is slow, full or damaged included.

Every token depends on all KV before it, so a block that comes up as anything but what went down shows. What the
cluster is sent is replayed: at any moment it names just what this worker holds in any tier.
"""

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from engine.kv_cache.eviction import POLICIES
from engine.kv_cache.tiers.cache import CacheTiers, TierSpec
from engine.kv_cache.tiers.costs import MAX_WAIT_S, MeasuredRates
from engine.kv_cache.tiers.disk import DiskSpec
from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.kv_events import Cleared, Evicted, Stored
from engine.types.request import RequestState
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash
from tests.support.engine import ledger
from tests.support.engine.slow_disk import BLOCK_BYTES, SlowDisk
from tests.unit.engine.scheduler.test_lookahead_machine import PipelinedMachine
from tests.unit.engine.scheduler.test_scheduler_machine import SchedulerMachine

CHEAP_COPY = MeasuredRates(prefill_tokens_per_s=1.0, offload_bytes_per_s=1e9, load_bytes_per_s=1e9)
NAMES = ("hits", "misses", "stores", "evictions", "dropped", "damaged", "late")


class Tiers:
    """Rules and invariants of both machines."""

    sched: Scheduler

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        draw = random.Random(
            repr((config.num_blocks, config.prefill_chunk_tokens, config.eviction, self.tier.num_slots))
        )
        first = self.tier.num_slots
        num_places = draw.choice([1, 2, 5, 9, 30])
        capacity = draw.choice([0, 1, 6, 30])
        self.disk = SlowDisk(host=self.runner.host, capacity=capacity)
        self.told_names: set[BlockHash] = set()
        self.next_seq = 0
        sched = Scheduler(
            config,
            BlockHasher(ledger.SECRET),
            tier=self.tier,
            block_bytes=1,
            cache=TierSpec(
                slots=range(first, first + num_places),
                block_bytes=BLOCK_BYTES,
                copier=self.runner,
                moves_between_steps=draw.random() < 0.7,
                disk=DiskSpec(port=self.disk, capacity=capacity) if capacity else None,
            ),
        )
        sched.tiers.costs.rates = CHEAP_COPY
        return sched

    def step(self, steps: int, jobs: int = 1_000) -> None:
        for _ in range(steps):
            self.disk.work(jobs)
            self.now += 0.5
            super().step(1)

    def make_ask(self, prompt: list[int], draw: random.Random) -> None:
        num_choices, prefill_only = draw.choice([1, 1, 2]), draw.random() < 0.2
        self.add(prompt, draw.randint(1, 12), prefill_only, draw.choice([0, 0, 1]), 0, None, num_choices)

    def damage(self, draw: random.Random) -> None:
        if self.disk.files:
            self.disk.damaged.add(draw.choice(sorted(self.disk.files)))

    def abort_one(self, draw: random.Random) -> None:
        alive = [r for r in self.requests.values() if r.state in {RequestState.WAITING, RequestState.RUNNING}]
        alive = [r for r in alive if r not in self.reserved.values()]
        if alive:
            self.sched.abort(draw.choice(alive).request_id)

    def release_some(self) -> None:
        for request in list(self.requests.values()):
            self.sched.release_held(request.request_id)

    def end_hand_off(self, draw: random.Random) -> None:
        """A reservation is filled, in part or in whole, or given up."""
        if not self.reserved:
            return
        transfer_id, request = draw.choice(list(self.reserved.items()))
        total, held = request.num_tokens, request.num_computed_tokens
        outcome = draw.choice(["commit", "commit", "partial", "retry", "cancel"])
        self.sched.reservations.bind(transfer_id)
        landed = total if outcome == "commit" else draw.randint(held, total)
        self.runner.write_range(request.block_table, request.token_ids, held, landed)
        del self.reserved[transfer_id]
        self.finish_transfer(transfer_id, request, outcome, landed, quiet=True)

    def take_output(self, output: object) -> None:
        super().take_output(output)
        batch = output.kv_events
        assert batch.first_seq == self.next_seq
        self.next_seq = batch.next_seq
        for event in batch.events:
            match event:
                case Stored():
                    self.told_names.add(event.name)
                case Evicted():
                    assert event.name in self.told_names, "an unknown name is gone"
                    self.told_names.remove(event.name)
                case Cleared():
                    self.told_names.clear()

    def reported_blocks_equal_snapshot(self) -> None:
        next_seq, stored = self.sched.blocks.snapshot()
        names = [event.name for event in stored]
        assert len(names) == len(set(names))
        if next_seq == self.next_seq:
            assert self.told_names == set(names)

    def disk_files_equal_index(self) -> None:
        if not self.disk.writes and not self.disk.reads and not self.disk.done and self.disk.capacity:
            assert self.disk.files.keys() == set(self.sched.tiers._disk)

    def teardown(self) -> None:
        if not hasattr(self, "sched"):
            return
        super().teardown()
        while self.disk.reads or self.disk.writes or self.disk.done:
            self.disk.work()
            self.sched.tiers.collect()
        self.sched.check_invariants()
        self.disk_files_equal_index()
        assert not self.sched.tiers._host.num_pins
        assert not self.sched.tiers._waits
        assert all(counts.num_blocks <= counts.capacity_blocks for counts in self.sched.load().tiers)


class TieredMachine(Tiers, SchedulerMachine):
    """Each step ends before the next begins."""


class TieredPipelinedMachine(Tiers, PipelinedMachine):
    """A step is always in flight, and the device is late."""


def prompts(draw: random.Random) -> Iterator[list[int]]:
    """Conversations in turn, so that each finds most of its past evicted."""
    talks = [[draw.randrange(90) for _ in range(draw.choice([16, 20, 33]))] for _ in range(8)]
    while True:
        talk = draw.choice(talks)
        talk += [draw.randrange(90) for _ in range(draw.choice([0, 1, 16, 17]))]
        if len(talk) > 90:
            del talk[20:]
        yield list(talk)


def history(machine: type[TieredMachine | TieredPipelinedMachine], seed: int, *, num_turns: int = 60) -> Counter[str]:
    """One worker's life; returns its tiers' counts."""
    draw = random.Random(seed)
    worker = machine()
    worker.start(
        num_blocks=draw.randint(10, 16),
        chunk=draw.choice([7, 20, 40]),
        budget=draw.choice([20, 60]),
        rows=draw.randint(1, 4),
        num_slots=draw.choice([0, 6]),
        with_decodes=draw.choice([5, 40]),
        policy=(draw.choice(sorted(POLICIES)), draw.choice([0, 3]), None),
    )
    coming = prompts(draw)
    for _ in range(num_turns):
        turn = draw.random()
        if turn < 0.35:
            worker.make_ask(next(coming), draw)
        elif turn < 0.45:
            worker.reserve(next(coming), draw.randint(1, 9), draw.random() < 0.5)
        elif turn < 0.55:
            worker.end_hand_off(draw)
        elif turn < 0.58:
            worker.abort_one(draw)
        elif turn < 0.61:
            worker.damage(draw)
        elif turn < 0.64:
            worker.disk.is_full = draw.random() < 0.3
        elif turn < 0.65:
            worker.sched.blocks.clear_cache()
        elif turn < 0.70:
            worker.release_some()
        else:
            worker.step(draw.randint(1, 12), draw.choice([0, 1, 3, 99]))
        worker.conserved()
        worker.reported_blocks_equal_snapshot()
        worker.disk_files_equal_index()
        worker.pinned_sources_keep_their_content()
    worker.disk.is_full = False
    worker.teardown()
    return Counter(
        {f"{counts.tier}.{name}": getattr(counts, name) for counts in worker.sched.load().tiers for name in NAMES}
    )


@pytest.mark.parametrize("seed", [1893, 3310, 3538])
def test_tiers_arriving_block_is_not_reported_early(seed: int) -> None:
    """A prompt was reported complete with a block that another request's unfinished step was to fill."""
    history(TieredPipelinedMachine, seed)


@pytest.mark.parametrize("machine", [TieredMachine, TieredPipelinedMachine])
@pytest.mark.parametrize("count", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_tiers_random_operations_do_not_change_results(machine, count):
    seen = sum((history(machine, seed) for seed in range(count)), Counter())
    assert all(
        seen[f"{tier}.{name}"] for tier in ("host", "disk") for name in ("hits", "misses", "stores", "evictions")
    )
    assert all(seen[name] for name in ("disk.damaged", "disk.dropped", "disk.late", "host.dropped"))


def test_tiers_ended_wait_wakes_engine_once():
    """The wait times out behind others that find no room, while the engine sleeps."""
    sched, runner = ledger.scheduler(), ledger.LedgerRunner()
    disk = SlowDisk(host=runner.host, capacity=9)
    request = ledger.request(range(40))
    found = sched.blocks.match(request)
    names = [sched.blocks.name(request, i) for i in range(2)]
    below = DiskSpec(port=disk, capacity=9, names=names)
    tiers = CacheTiers(sched.blocks, TierSpec(slots=range(8), block_bytes=BLOCK_BYTES, copier=runner, disk=below))
    tiers.costs.rates = CHEAP_COPY
    assert tiers.patience_s(0.0) is None
    assert tiers.must_wait(request, found.num_blocks, 0.0)
    assert 0.0 < tiers.patience_s(0.5) <= MAX_WAIT_S
    assert tiers.patience_s(9.0) == 0.0
    assert tiers.patience_s(9.0) is None
    assert not tiers.must_wait(request, found.num_blocks, 9.0)
    assert tiers.counts()[1].late == 1
    disk.work()
    tiers.collect()
    tiers.check_invariants()
    tiers.drop(request.request_id)
    assert tiers.counts()[1].num_blocks == 0, "there never were such files"
