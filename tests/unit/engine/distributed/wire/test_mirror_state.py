"""After any operations of a worker, its steps and its peers read what was written last."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.distributed.wire import mirror_state
from engine.distributed.wire.mirror_state import MirrorState
from engine.types.step_inputs import StepInputs

NUM_BLOCKS = 8
BLOCK_SIZE = 4
blocks = st.integers(0, NUM_BLOCKS - 1)
events = st.one_of(
    st.tuples(st.just("comes"), st.lists(blocks, min_size=1, max_size=4, unique=True)),
    st.tuples(st.just("leaves"), st.lists(blocks, min_size=1, max_size=4, unique=True)),
    # A sequence's table, how many of its tokens are computed before the step, and by it.
    st.tuples(st.just("step"), st.lists(blocks, min_size=1, max_size=4, unique=True), st.integers(0, 15)),
    st.tuples(st.just("copy"), st.lists(blocks, min_size=2, max_size=2, unique=True)),
    st.tuples(st.just("load"), st.lists(blocks, min_size=1, max_size=1)),
    st.tuples(st.just("offload"), st.lists(blocks, min_size=1, max_size=1)),
)


def step(table: list[int], start: int, count: int, **moves: list[tuple[int, int]]) -> StepInputs:
    positions = np.arange(start, start + count)
    # One more column than the sequence needs: zero, which is a block as well.
    tables = np.array([[*table, 0]], dtype=np.int64)
    return StepInputs(
        token_ids=np.zeros(count, dtype=np.int64),
        positions=positions,
        slots=tables[0, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        tables=tables,
        starts=np.array([start]),
        counts=np.array([count]),
        num_single=0,
        sample_rows=np.empty(0, dtype=np.int64),
        block_size=BLOCK_SIZE,
        **{name: np.array(pairs, dtype=np.int64).reshape(-1, 2) for name, pairs in moves.items()},
    )


class Sides:
    """What each block holds on either side, as a number that grows with every write."""

    def __init__(self) -> None:
        self.here = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.there = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.last = dict.fromkeys(range(NUM_BLOCKS), 0)
        self.book = MirrorState(NUM_BLOCKS)
        self.now = 0

    def write(self, side: dict[int, int], block: int) -> None:
        self.now += 1
        side[block] = self.last[block] = self.now

    def run(self, inputs: StepInputs, reads: list[int], writes: list[int]) -> None:
        for block in self.book.step(inputs).tolist():
            self.there[block] = self.here[block]
        assert [block for block in reads if self.there[block] != self.last[block]] == []
        for block in writes:
            self.write(self.there, block)


@given(st.lists(events, max_size=30))
def test_mirror_read_returns_last_write(done: list[tuple]) -> None:
    sides = Sides()
    for kind, table, *more in done:
        if kind == "comes":
            sides.book.mark_received(table)
            for block in table:
                sides.write(sides.here, block)
        elif kind == "leaves":
            for block in sides.book.stale(table).tolist():
                sides.here[block] = sides.there[block]
            assert [block for block in table if sides.here[block] != sides.last[block]] == []
        elif kind == "step":
            start = more[0] % (len(table) * BLOCK_SIZE)
            sides.run(step(table, start, 1), table[: start // BLOCK_SIZE + 1], [table[start // BLOCK_SIZE]])
        else:
            # Beside a sequence of its own, which reads and writes block 0.
            moves = {
                "copy": ({"copies": [tuple(table)]}, [table[0]], table[1:]),
                "load": ({"loads": [(5, table[0])]}, [], table),
                "offload": ({"offloads": [(table[0], 5)]}, table, []),
            }
            pairs, reads, writes = moves[kind]
            sides.run(step([0], 0, 1, **pairs), [*reads, 0], [*writes, 0])


def test_mirror_copies_only_read_blocks_and_once() -> None:
    book = MirrorState(NUM_BLOCKS)
    book.mark_received([2, 3, 0])
    assert book.step(step([2, 5], 2, 4)).tolist() == [2], "3 is read by nobody, 0 only fills the row"
    assert book.step(step([2, 5], 6, 1)).tolist() == []
    assert book.stale([2, 5, 3]).tolist() == [2, 5]
    assert book.stale([2, 5, 3]).tolist() == []
    assert book.step(step([3], 0, 1)).tolist() == [3]


def test_mirror_step_sorts_only_blocks_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_sizes: list[int] = []
    unique = np.unique

    def counted(values: np.ndarray) -> np.ndarray:
        sorted_sizes.append(len(values))
        return unique(values)

    monkeypatch.setattr(mirror_state.np, "unique", counted)
    book = MirrorState(NUM_BLOCKS)
    book.mark_received([3])
    assert book.step(step([1, 2, 4, 5], 12, 4)).tolist() == []
    assert book.step(step([1, 3], 4, 4)).tolist() == [3]
    assert sorted_sizes == [0, 1]


def test_mirror_overwritten_unread_block_is_dropped() -> None:
    book = MirrorState(NUM_BLOCKS)
    book.mark_received([2, 3])
    book.step(step([0], 0, 1, loads=[(5, 3)]))
    assert book.num_newer_here == 1
    book.step(step([0], 0, 1, copies=[(0, 2)]))
    assert book.num_newer_here == 0
