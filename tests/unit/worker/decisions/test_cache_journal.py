"""Readers of the state and the log learn a worker's content, whatever Redis does to writes."""

from random import Random

from tandem.cluster_state.entries import Footprint
from tandem.values.ids import BlockHash
from worker.decisions.cache_journal import CacheJournal, Write


def name(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(16, "big"))


def stored(*numbers: int):
    return [(name(i), True) for i in numbers]


class PublishedState:
    """What Redis holds of one process."""

    def __init__(self) -> None:
        self.head: Footprint | None = None
        self.state: tuple[BlockHash, ...] | None = None
        self.log: list = []
        self._last_id = 0

    def write(self, write: Write) -> None:
        if write.is_fresh:
            self.log, self._last_id = [], 0
        for entry in write.entries:
            if entry.next_sequence > self._last_id:  # else Redis refuses it, and carries out the rest all the same
                self.log.append(entry)
                self._last_id = entry.next_sequence
        if write.state is not None:
            self.state = write.state
        if write.keep_from is not None:
            self.log = [entry for entry in self.log if entry.next_sequence > write.keep_from]
        self.head = write.after

    def found(self) -> Footprint | None:
        head = self.head
        holds_together = head is not None and self.state is not None and head.num_entries == len(self.log)
        return head if holds_together else None

    def read(self) -> tuple[int, set[BlockHash]]:
        """The state as a newly started router reads it."""
        assert self.head is not None
        assert self.state is not None
        known, due = set(self.state), self.head.state_sequence
        for entry in self.log:
            assert entry.first_sequence <= due or entry.next_sequence <= due, "a gap"
            for block, is_stored in entry.changes[max(0, due - entry.first_sequence) :]:
                (known.add if is_stored else known.discard)(block)
            due = max(due, entry.next_sequence)
        return due, known


def test_cache_journal_first_write_is_whole_state_then_changes() -> None:
    journal, published = CacheJournal(), PublishedState()
    assert journal.apply(0, stored(1)), "a snapshot is under way"
    assert journal.next_write() is None
    journal.restart(2, [name(1), name(2)])
    fresh = journal.next_write()
    assert fresh is not None
    assert fresh.is_fresh
    assert fresh.state == (name(1), name(2))
    assert journal.apply(2, stored(3)), "while the state is being written"
    assert journal.next_write() is None, "one at a time"
    published.write(fresh)
    journal.written(fresh)
    write = journal.next_write()
    assert write is not None
    assert write.state is None
    assert [entry.first_sequence for entry in write.entries] == [2]
    published.write(write)
    journal.written(write)
    assert published.read() == (3, {name(1), name(2), name(3)})
    assert not journal.is_behind
    assert journal.next_write() is None


def test_cache_journal_skips_old_events_and_needs_snapshot_after_gap() -> None:
    journal = CacheJournal()
    journal.restart(2, [name(1)])
    assert journal.apply(0, stored(8, 9, 3)), "two of them are old"
    write = journal.next_write()
    assert write is not None
    assert write.state == (name(1), name(3))
    assert not journal.apply(9, stored(4))
    assert journal.next_write() is None, "until it restarts"
    journal.written(write)
    journal.restart(10, [name(4)])
    again = journal.next_write()
    assert again is not None
    assert again.is_fresh
    assert again.state == (name(4),)


def test_cache_journal_too_many_pending_events_become_fresh_state() -> None:
    journal = CacheJournal(max_pending=10)
    journal.restart(0, [])
    journal.written(journal.next_write())
    for i in range(40):
        journal.apply(i, stored(i))
    write = journal.next_write()
    assert write is not None
    assert write.is_fresh
    assert not write.entries
    assert write.state is not None
    assert len(write.state) == 40


def test_cache_journal_lost_state_is_rewritten_intact_one_is_not() -> None:
    journal = CacheJournal()
    journal.restart(0, [name(1)])
    journal.written(journal.next_write())
    there = Footprint(next_sequence=0, state_sequence=0, num_entries=0)
    assert journal.on_read(there)
    assert journal.next_write() is None
    for lost in (None, Footprint(next_sequence=5, state_sequence=0, num_entries=1)):
        assert not journal.on_read(lost)
        write = journal.next_write()
        assert write is not None
        assert write.is_fresh
        journal.written(write)


def test_cache_journal_up_to_date_reader_continues_after_redis_loss() -> None:
    journal = CacheJournal(max_pending=10**6)
    journal.restart(0, [name(1)])
    journal.written(journal.next_write())
    for first, count, is_sent in ((0, 3, True), (3, 20_000, False)):
        journal.apply(first, stored(*range(100 + first, 100 + first + count)))
        assert not journal.on_read(None)
        write = journal.next_write()
        assert write is not None
        assert write.is_fresh
        assert [entry.first_sequence for entry in write.entries] == ([first] if is_sent else [])
        assert write.after == Footprint(
            next_sequence=first + count, state_sequence=first + count, num_entries=len(write.entries)
        )
        journal.written(write)
        assert not journal.is_behind


def test_cache_journal_uncertain_write_is_resolved_by_reading() -> None:
    for happened in (True, False):
        journal, published = CacheJournal(), PublishedState()
        journal.restart(0, [])
        published.write(write := journal.next_write())
        journal.written(write)
        journal.apply(0, stored(1))
        write = journal.next_write()
        if happened:
            published.write(write)
        journal.mark_in_doubt()
        assert journal.is_in_doubt
        assert journal.next_write() is None
        assert journal.on_read(published.found())
        assert not journal.is_in_doubt
        again = journal.next_write()
        assert (again is None) == happened
        if again is not None:
            assert not again.is_fresh
            published.write(again)
            journal.written(again)
        assert published.read() == (1, {name(1)})


def test_cache_journal_grown_log_is_compacted_and_bounded() -> None:
    journal, published = CacheJournal(min_log=20), PublishedState()
    journal.restart(0, [])
    states = 0
    for step in range(400):
        journal.apply(step, [(name(step % 10), step % 3 != 0)])
        write = journal.next_write()
        published.write(write)
        journal.written(write)
        states += write.state is not None
        assert len(published.log) <= 2 * 21 + 1
        assert write.after == published.found()
    assert 15 <= states <= 25
    assert min(entry.first_sequence for entry in published.log) <= published.head.state_sequence, (
        "readers a little behind"
    )


class Life:
    """One worker whose published state gets seeded random failures."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.journal = CacheJournal(max_pending=self.rng.choice([5, 50]), min_log=self.rng.choice([3, 30]))
        self.published = PublishedState()
        self.held: set[BlockHash] = set()
        self.sequence = 0
        self.late: Write | None = None
        self.journal.restart(0, [])

    def step(self) -> None:
        if self.rng.random() < 0.02:  # events were lost inside the worker
            self.sequence += 7
            self.journal.restart(self.sequence, list(self.held))
        self.change(self.rng.randrange(4))
        self.suffer()
        if self.rng.random() < 0.3 or self.journal.is_in_doubt:
            self.journal.on_read(self.published.found())
        if (write := self.journal.next_write()) is not None:
            self.try_to(write)

    def change(self, count: int) -> None:
        changes = [(name(self.rng.randrange(30)), self.rng.random() < 0.7) for _ in range(count)]
        for block, is_stored in changes:
            (self.held.add if is_stored else self.held.discard)(block)
        assert self.journal.apply(self.sequence, changes)
        self.sequence += count

    def suffer(self) -> None:
        fate = self.rng.random()
        if fate < 0.03:
            self.published = PublishedState()  # flushed
        elif fate < 0.06 and self.published.log:
            self.published.log.pop(self.rng.randrange(len(self.published.log)))
        elif fate < 0.08 and self.late is not None:
            self.published.write(self.late)  # nobody waited for it any more

    def try_to(self, write: Write) -> None:
        outcome = self.rng.random()
        if outcome < 0.9:
            self.published.write(write)
        else:
            self.late = write
        if outcome < 0.8:
            self.change(self.rng.randrange(2))  # while it is on the way
            self.journal.written(write)
        else:
            self.journal.mark_in_doubt()

    def settle(self) -> None:
        """Redis has recovered: two looks, a second apart."""
        for _ in range(2):
            self.journal.on_read(self.published.found())
            while (write := self.journal.next_write()) is not None:
                self.published.write(write)
                self.journal.written(write)


def test_cache_journal_redis_becomes_consistent_after_faults() -> None:
    for seed in range(100):
        life = Life(seed)
        for _ in range(200):
            life.step()
        life.settle()
        assert life.published.read() == (life.sequence, life.held), seed
