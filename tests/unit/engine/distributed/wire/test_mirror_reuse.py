"""Freed and reused blocks: their next owner reads what was written last, cell by cell.

A transfer that fails, or whose blocks no step ever read, leaves them marked as newer at rank 0. The next owner computes
into them on the other node, or receives into them again.
"""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from engine.distributed.wire.mirror_state import MirrorState
from tests.unit.engine.distributed.wire.test_mirror_state import BLOCK_SIZE, NUM_BLOCKS, step


@dataclass(eq=False)
class Owner:
    """A sequence or future sequence: its blocks, and the expected content of its tokens' cells."""

    table: list[int] = field(default_factory=list)
    cells: list[int] = field(default_factory=list)


class Pool:
    """Both sides of one pool, whose free blocks are reused last in, first out."""

    def __init__(self) -> None:
        self.book = MirrorState(NUM_BLOCKS)
        self.here = [[0] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        self.there = [[0] * BLOCK_SIZE for _ in range(NUM_BLOCKS)]
        # Block 0 stands behind every row's end, and is a block as well.
        self.free = list(range(NUM_BLOCKS))
        self.sequences: list[Owner] = []
        self.transfers: list[Owner] = []
        self.now = 0
        self.num_reused_while_newer_here = 0

    def bind(self, number: int) -> None:
        """Reserve blocks for a transfer."""
        taken = [self.free.pop() for _ in range(min(1 + number % 3, len(self.free)))]
        if taken:
            self.book.mark_received(taken)
            self.transfers.append(Owner(taken))

    def land(self, number: int) -> None:
        """A peer writes the next cells of a transfer, here."""
        if self.transfers:
            owner = self.transfers[number % len(self.transfers)]
            for _ in range(min(1 + number % 6, len(owner.table) * BLOCK_SIZE - len(owner.cells))):
                self.write(self.here, owner)

    def commit(self, number: int) -> None:
        """Landed blocks become a sequence, whose last block may be partial."""
        if self.transfers:
            owner = self.transfers.pop(number % len(self.transfers))
            held = -(-len(owner.cells) // BLOCK_SIZE)
            self.free += owner.table[held:]
            del owner.table[held:]
            self.sequences.append(owner)

    def fail(self, number: int) -> None:
        """Landed blocks are freed."""
        if self.transfers:
            self.free += self.transfers.pop(number % len(self.transfers)).table

    def compute(self, number: int) -> None:
        """One token more of a sequence, or the first of a new one."""
        owner = Owner() if number % (len(self.sequences) + 1) == 0 else self.sequences[number % len(self.sequences)]
        if len(owner.cells) == len(owner.table) * BLOCK_SIZE:
            if not self.free:
                return
            owner.table.append(self.free.pop())
            self.num_reused_while_newer_here += bool(self.book._newer_here[owner.table[-1]])
        if owner not in self.sequences:
            self.sequences.append(owner)
        for block in self.book.step(step(owner.table, len(owner.cells), 1)).tolist():
            self.there[block] = list(self.here[block])
        assert self.read(self.there, owner) == owner.cells
        self.write(self.there, owner)

    def send(self, number: int) -> None:
        """A peer reads a sequence, here."""
        if self.sequences:
            owner = self.sequences[number % len(self.sequences)]
            for block in self.book.stale(owner.table).tolist():
                self.here[block] = list(self.there[block])
            assert self.read(self.here, owner) == owner.cells

    def end(self, number: int) -> None:
        """Its blocks are free again."""
        if self.sequences:
            self.free += self.sequences.pop(number % len(self.sequences)).table

    def write(self, side: list[list[int]], owner: Owner) -> None:
        self.now += 1
        block, cell = divmod(len(owner.cells), BLOCK_SIZE)
        side[owner.table[block]][cell] = self.now
        owner.cells.append(self.now)

    def read(self, side: list[list[int]], owner: Owner) -> list[int]:
        return [cell for block in owner.table for cell in side[block]][: len(owner.cells)]


KINDS = ("bind", "land", "land", "commit", "fail", "compute", "compute", "compute", "send", "end")


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 59)), max_size=60))
def test_mirror_reused_block_has_cells_of_new_owner(done: list[tuple[str, int]]) -> None:
    pool = Pool()
    for kind, number in done:
        getattr(pool, kind)(number)


def test_mirror_block_of_failed_transfer_is_reused_and_sent() -> None:
    pool = Pool()
    for kind, number in (("bind", 0), ("land", 3), ("fail", 0), *[("compute", 0)], *[("compute", 1)] * 3):
        getattr(pool, kind)(number)
    assert pool.num_reused_while_newer_here == 1, "else this test shows nothing"
    pool.send(0)
    assert pool.sequences[0].cells == [pool.now - 3, pool.now - 2, pool.now - 1, pool.now]
    assert pool.book.num_newer_here == 0, "its mark went with the first write"


def test_mirror_computed_block_is_received_into_and_sent() -> None:
    pool = Pool()
    for kind in ("compute", "end", "bind", "land", "commit", "send"):
        getattr(pool, kind)(0)
    assert len(pool.sequences[0].cells) == 1
