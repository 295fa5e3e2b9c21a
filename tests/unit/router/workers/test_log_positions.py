"""How a router handles log entries: apply, ignore or reload; the map is never wrong for long."""

from random import Random

import pytest

from router.types.worker_view import WorkerKey
from router.workers.log_positions import MOST_RETRY_S, RETRY_S, LogEntryAction, LogPositions, Reload
from router.workers.prefix_map import PrefixMap
from tandem.cluster_state.entries import MAX_CHANGES, CacheState, Changes, Footprint
from tandem.values.ids import BlockHash, Incarnation, WorkerId

ME = WorkerKey(WorkerId("d0"), Incarnation(5))


def name(i: int) -> BlockHash:
    return BlockHash(i.to_bytes(16, "big"))


def state(next_sequence: int, *numbers: int) -> CacheState:
    return CacheState(next_sequence=next_sequence, names=b"".join(map(name, numbers)))


def changes(first: int, *numbers: int) -> Changes:
    return Changes(first_sequence=first, changes=tuple((name(i), True) for i in numbers))


def head(next_sequence: int) -> Footprint:
    return Footprint(next_sequence=next_sequence, state_sequence=0, num_entries=0)


def followed(at: int = 10) -> LogPositions:
    view = LogPositions()
    view.follow(ME)
    list(view.load(ME, state(at, 1, 2), 0.0))
    return view


def test_log_positions_follow_from_loaded_state() -> None:
    view = LogPositions()
    view.follow(ME)
    assert view.due(0.0) == [(ME, Reload.START)]
    assert view.positions() == {}
    assert view.entry(ME, "3-0", changes(0, 1)) == (LogEntryAction.IGNORE, None), "before the state"
    assert list(view.load(ME, None, 0.0)) == []
    assert view.due(RETRY_S / 2) == [], "not in a busy loop"
    assert view.due(RETRY_S) == [(ME, Reload.START)]
    list(view.load(ME, state(10, 1, 2), RETRY_S))
    assert view.due(9.0) == []
    assert view.positions() == {ME: "10-0"}


def test_log_positions_missing_states_are_asked_for_ever_more_rarely_and_after_others() -> None:
    view, other = LogPositions(), WorkerKey(WorkerId("d9"), Incarnation(9))
    view.follow(ME)
    now_s, waits_s = 0.0, []
    for _ in range(6):
        list(view.load(ME, None, now_s))
        due_s = next(at_s for at_s in (now_s + n * RETRY_S for n in range(1, 99)) if view.due(at_s))
        waits_s.append(due_s - now_s)
        now_s = due_s
    assert waits_s == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S, MOST_RETRY_S, MOST_RETRY_S, MOST_RETRY_S]
    view.follow(other)
    assert [key for key, _ in view.due(now_s)] == [other, ME]
    list(view.load(ME, state(10, 1, 2), now_s))
    view.set_aside(ME, now_s)
    assert ME not in dict(view.due(now_s + MOST_RETRY_S / 2)), "its state says nothing about its log"
    list(view.load(ME, state(10, 1, 2), now_s))
    view.entry(ME, "12-0", changes(10, 3, 4))
    view.set_aside(ME, now_s)
    assert ME in dict(view.due(now_s + RETRY_S))


def test_log_positions_apply_new_and_ignore_known_entries() -> None:
    view = followed()
    verdict, change = view.entry(ME, "12-0", changes(10, 3, 4))
    assert verdict is LogEntryAction.APPLY
    assert change is not None
    assert (change.first_sequence, len(change.changes), change.snapshot) == (10, 2, False)
    assert view.entry(ME, "12-0", changes(10, 3, 4)) == (LogEntryAction.IGNORE, None)
    verdict, change = view.entry(ME, "14-0", changes(11, 4, 5, 6))
    assert verdict is LogEntryAction.APPLY
    assert change is not None
    assert (change.first_sequence, [n for n, _ in change.changes]) == (12, [name(5), name(6)])
    assert view.positions() == {ME: "14-0"}


def test_log_positions_gap_reloads_the_state() -> None:
    view = followed()
    assert view.entry(ME, "13-0", changes(12, 3)) == (LogEntryAction.RELOAD, None)
    assert view.due(RETRY_S) == [(ME, Reload.GAP)]
    assert view.entry(ME, "14-0", changes(13, 4)) == (LogEntryAction.IGNORE, None)
    list(view.load(ME, state(14, 3, 4), RETRY_S))
    assert view.positions() == {ME: "14-0"}


def test_log_positions_unauthentic_entry_is_ignored() -> None:
    view = followed()
    assert view.entry(ME, "99999-7", None) == (LogEntryAction.IGNORE, None)
    assert view.positions() == {ME: "99999-7"}, "it is not read again"
    assert view.entry(ME, "11-0", changes(10, 3))[0] is LogEntryAction.APPLY


def test_log_positions_head_staying_ahead_reloads_the_state() -> None:
    view = followed()
    assert view.head(ME, head(10)) is LogEntryAction.IGNORE
    assert view.head(ME, head(12)) is LogEntryAction.IGNORE, "its entry may be on the way"
    assert view.entry(ME, "11-0", changes(10, 3))[0] is LogEntryAction.APPLY
    assert view.head(ME, head(12)) is LogEntryAction.IGNORE, "something came"
    assert view.head(ME, head(12)) is LogEntryAction.RELOAD
    assert view.due(RETRY_S) == [(ME, Reload.BEHIND)]
    assert followed().head(ME, head(3)) is LogEntryAction.IGNORE, "an older backup: the worker will see to it"


def test_log_positions_unreadable_log_is_retried_later() -> None:
    view = followed()
    view.set_aside(ME, 5.0)
    assert view.positions() == {}
    assert view.due(5.0) == []
    assert view.due(5.0 + RETRY_S) == [(ME, Reload.GAP)]


def test_log_positions_restarted_worker_is_read_from_its_start() -> None:
    view = followed()
    reborn = WorkerKey(ME.worker_id, Incarnation(6))
    view.drop(ME)
    view.follow(reborn)
    assert view.followed == {reborn}
    assert view.entry(ME, "11-0", changes(10, 3)) == (LogEntryAction.IGNORE, None)
    assert view.head(ME, head(99)) is LogEntryAction.IGNORE
    assert list(view.load(ME, state(1, 1), 0.0)) == []
    view.set_aside(ME, 0.0)
    assert view.due(0.0) == [(reborn, Reload.START)]


@pytest.mark.parametrize("count", [0, 1, MAX_CHANGES, MAX_CHANGES + 1, 3 * MAX_CHANGES + 5])
@pytest.mark.parametrize("sequence", [0, 7, 10**9])
def test_log_positions_state_pieces_make_one_snapshot(count: int, sequence: int) -> None:
    view, prefix_map = LogPositions(), PrefixMap()
    view.follow(ME)
    prefix_map.add_worker(ME.worker_id, capacity=10**6)
    for piece in view.load(ME, state(sequence, *range(count)), 0.0):
        assert len(piece.changes) <= MAX_CHANGES
        prefix_map.apply(ME.worker_id, piece)
    assert prefix_map.num_blocks(ME.worker_id) == count
    assert not prefix_map.is_approximate(ME.worker_id)
    _, change = view.entry(ME, f"{sequence + 1}-0", changes(sequence, count))
    assert change is not None
    prefix_map.apply(ME.worker_id, change)
    assert prefix_map.num_blocks(ME.worker_id) == count + 1
    assert not prefix_map.is_approximate(ME.worker_id)


class Life:
    """A worker, and a fake Redis that loses and corrupts entries; the view must notice by itself."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.held: set[BlockHash] = set()
        self.log: list[Changes] = []
        self.state = CacheState(next_sequence=0, names=b"")
        self.sequence = 0
        self.view, self.prefix_map = LogPositions(), PrefixMap()
        self.view.follow(ME)
        self.prefix_map.add_worker(ME.worker_id, capacity=1000)

    def publish(self) -> None:
        made = tuple((name(self.rng.randrange(40)), self.rng.random() < 0.6) for _ in range(self.rng.randrange(1, 4)))
        for block, is_stored in made:
            (self.held.add if is_stored else self.held.discard)(block)
        self.log.append(Changes(first_sequence=self.sequence, changes=made))
        self.sequence += len(made)
        if self.rng.random() < 0.1:
            self.state, self.log = CacheState(next_sequence=self.sequence, names=b"".join(self.held)), self.log[-2:]

    def read(self, now_s: float, *, lossy: bool) -> None:
        for key, _ in self.view.due(now_s):
            for piece in self.view.load(key, self.state, now_s):
                self.prefix_map.apply(ME.worker_id, piece)
        for position in self.view.positions().values():
            start = int(position.partition("-")[0])
            for entry in [each for each in self.log if each.next_sequence > start]:
                if lossy and self.rng.random() < 0.1:
                    continue
                believed = None if lossy and self.rng.random() < 0.1 else entry
                _, change = self.view.entry(ME, f"{entry.next_sequence}-0", believed)
                if change is not None:
                    self.prefix_map.apply(ME.worker_id, change)
        self.view.head(ME, head(self.sequence))


def test_prefix_map_after_lost_or_damaged_entries_converges() -> None:
    for seed in range(60):
        life = Life(seed)
        for step in range(120):
            life.publish()
            life.read(float(step), lossy=life.rng.random() < 0.5)
        for step in range(200, 206):
            life.read(float(step), lossy=False)
        known = {block for block in map(name, range(40)) if life.prefix_map.longest_prefix([block])}
        assert known == life.held, seed
