"""Everything in the cluster that belongs to one request, as one value.

A life is the request's ladder and receivers on its decode worker, its senders on both prefill workers, the bytes and
messages under way for it, the answers its shells still owe, and the blocks that the decode worker's pool gave it. Two
lives share nothing but that pool, the life and death of processes and links, and the number of faults (see `pairs.py`).

A hand-off dies with its decode worker: what the router does then is another hand-off, under another name, on either
decode worker. To this one it is a second request.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

DECODE = 2
"""Where a message goes: 0 and 1 are the prefill workers."""
OWNED = 0
"""Owner of blocks that the request itself holds; attempts count from 1."""
TORN = -1
"""What a cell holds is a number: this, or its place in the prompt, or that plus OTHER."""
OTHER = 1000
"""Whole, but computed from tokens that nobody asked for."""

NEW, OPEN, LOST, OVER, DONE = "new", "open", "decode worker died", "over", "done"


class Write(NamedTuple):
    """Bytes on their way, from the incarnation `epoch` of prefill worker `at`."""

    attempt: int
    at: int
    epoch: int
    lane: int
    seq: int
    rewrite: int
    slots: tuple[tuple[int, int], ...]
    """(block, position in it) of each cell."""
    phase: str
    """MOVING reads the sources; LOOSE no longer does, but may land; LANDED has not been reported yet."""
    content: tuple[int, ...]
    """Of each cell. It is its own checksum: no two contents have the same."""


MOVING, LOOSE, LANDED = "moving", "loose", "landed"


class SenderSlot(NamedTuple):
    """The sender of this request on a prefill worker."""

    attempt: int
    machine: int
    step: int
    """Of the engine; -1 before it has the job."""
    holds: bool
    """Whether the engine keeps the sources."""
    other: bool
    """Whether it computes other tokens than it was asked for."""
    thrown_out: int
    """Step at which it was preempted, and begun again in other blocks; -1 if it was not."""


class Worker(NamedTuple):
    """A prefill worker as far as this request is concerned."""

    epoch: int
    newest: int
    """Newest attempt it has heard of."""
    sender: SenderSlot | None


class Packed(NamedTuple):
    """A life at rest; equal where nothing that follows can differ."""

    decode_epoch: int
    request: str
    ladder: int
    attempt: int
    tokens: int
    kept: tuple[int, ...]
    receivers: tuple[Any, ...]
    workers: tuple[Worker, Worker]
    writes: tuple[Write, ...]
    messages: tuple[Any, ...]
    owed: tuple[Any, ...]
    blocks: tuple[Any, ...]
    grants: tuple[Any, ...]

    @property
    def ended(self) -> bool:
        """Whether nothing of it is left anywhere."""
        return (
            self.request in (OVER, DONE, LOST)
            and not (self.receivers or self.writes or self.messages or self.owed or self.blocks or self.grants)
            and all(worker.sender is None for worker in self.workers)
        )


@dataclass(slots=True)
class Life:
    """A life while a move is made."""

    decode_epoch: int
    request: str
    ladder: int
    attempt: int
    tokens: int
    kept: list[int]
    """Blocks of the held prefix, in order."""
    receivers: dict[int, tuple[int, int, int]]
    """attempt -> (machine, prefill worker, its epoch)."""
    workers: list[Worker]
    writes: set[Write]
    messages: set[tuple[int, int]]
    """(to, number of the envelope). Two equal messages under way are one: repeating costs a fault anyway."""
    owed: set[tuple[Any, ...]]
    blocks: dict[int, tuple[int, tuple[int, ...]]]
    """block -> (owner, content of its cells)."""
    grants: dict[tuple[int, int], tuple[tuple[int, ...], int, int]]
    """(attempt, lane) -> (destinations, the prefill worker that may write into them, its epoch)."""

    @classmethod
    def unpack(cls, packed: Packed) -> "Life":
        """The life, free to change."""
        return cls(
            packed[0],
            packed[1],
            packed[2],
            packed[3],
            packed[4],
            list(packed[5]),
            dict(packed[6]),
            list(packed[7]),
            set(packed[8]),
            set(packed[9]),
            set(packed[10]),
            dict(packed[11]),
            dict(packed[12]),
        )

    def pack(self) -> Packed:
        """The life at rest."""
        return Packed(
            self.decode_epoch,
            self.request,
            self.ladder,
            self.attempt,
            self.tokens,
            tuple(self.kept),
            tuple(sorted(self.receivers.items())),
            (self.workers[0], self.workers[1]),
            tuple(sorted(self.writes)),
            tuple(sorted(self.messages)),
            tuple(sorted(self.owed)),
            tuple(sorted(self.blocks.items())),
            tuple(sorted(self.grants.items())),
        )

    def routed_to(self, attempt: int) -> tuple[int, int]:
        """(prefill worker, its epoch) of an attempt."""
        _machine, at, epoch = self.receivers[attempt]
        return at, epoch

    def put(self, slots: tuple[tuple[int, int], ...], content: tuple[int, ...]) -> None:
        for (block, position), value in zip(slots, content, strict=True):
            owner, cells = self.blocks[block]
            self.blocks[block] = (owner, (*cells[:position], value, *cells[position + 1 :]))

    def read(self, slots: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        """What is in these cells now."""
        return tuple(self.blocks[block][1][position] if block in self.blocks else TORN for block, position in slots)


def unborn() -> Packed:
    """The life of a request that nobody has started."""
    worker = Worker(0, 0, None)
    return Packed(0, NEW, -1, 0, 0, (), (), (worker, worker), (), (), (), (), ())
