"""Runs of bytes that make up cells, in a form whose cost does not grow with the number of layers. Pure.

A lane is one layer's share of one rank. The physical blocks of a prompt are the same in every layer, so the runs of a
lane are a pattern, shared by many lanes, moved to where the lane's plane begins.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Run = tuple[int, int]
"""(offset, length) in bytes."""
Copy = tuple[int, int, int]
"""(source offset, destination offset, length) in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of one region. Iterated over they are (offset, length), in the order of the wire."""

    lanes: tuple[tuple[int, int], ...]
    """(plane, index into `patterns`), equally many for each layer, and a layer's like the others' but for planes."""
    num_layers: int
    patterns: tuple[tuple[Run, ...], ...]
    """Offsets from the beginning of a plane; no run continues the one before it."""
    plane_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        sizes = [sum(length for _, length in pattern) for pattern in self.patterns]
        return sum(sizes[pattern] for _, pattern in self.lanes)

    def __len__(self) -> int:
        return sum(len(self.patterns[pattern]) for _, pattern in self.lanes)

    def __iter__(self) -> Iterator[Run]:
        for plane, pattern in self.lanes:
            base = plane * self.plane_bytes
            for offset, length in self.patterns[pattern]:
                yield base + offset, length


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Copies between two regions, or within one. Iterated over they are (source offset, destination offset, length)."""

    lanes: tuple[tuple[int, int, int], ...]
    """(source plane, destination plane, index into `patterns`), as in `Runs`."""
    num_layers: int
    patterns: tuple[tuple[Copy, ...], ...]
    """Offsets from the beginnings of the planes; no copy continues the one before it on both sides."""
    source_plane_bytes: int
    destination_plane_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        sizes = [sum(copy[2] for copy in pattern) for pattern in self.patterns]
        return sum(sizes[pattern] for _, _, pattern in self.lanes)

    def __len__(self) -> int:
        return sum(len(self.patterns[pattern]) for _, _, pattern in self.lanes)

    def __iter__(self) -> Iterator[Copy]:
        for source, destination, pattern in self.lanes:
            here, there = source * self.source_plane_bytes, destination * self.destination_plane_bytes
            for begin, end, length in self.patterns[pattern]:
                yield here + begin, there + end, length


def extend(runs: list[Run], more: Iterable[Run], base: int = 0) -> None:
    """Append `more`, moved by `base`; a run that continues the last one is joined with it."""
    begin, size = runs.pop() if runs else (0, 0)
    for offset, length in more:
        if base + offset == begin + size:
            size += length
        else:
            if size:
                runs.append((begin, size))
            begin, size = base + offset, length
    if size:
        runs.append((begin, size))


def paired(reads: Iterable[Run], writes: Iterable[Run]) -> tuple[Copy, ...]:
    """The same bytes as runs of one side and of the other, cut where either is; equal total lengths."""
    copies = []
    targets = iter(writes)
    there, room = 0, 0
    for start, length in reads:
        here, left = start, length
        while left:
            if not room:
                there, room = next(targets)
            size = left if left < room else room
            copies.append((here, there, size))
            here, left, there, room = here + size, left - size, there + size, room - size
    return tuple(copies)
