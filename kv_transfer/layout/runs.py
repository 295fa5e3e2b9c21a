"""Runs of bytes that make up cells, in a form whose cost does not grow with the number of layers. Pure.

A plane is one layer of one rank. The physical blocks of a prompt are the same in every layer, so the runs of a plane
are computed once, relative to the plane's beginning, and shared by all planes that are alike.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

Run = tuple[int, int]
"""(offset, length) in bytes."""
RunPair = tuple[int, int, int]
"""(source offset, destination offset, length) in bytes of a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs of one region; iteration yields (offset, length) in the order of the wire."""

    planes: tuple[tuple[int, int], ...]
    """(plane, index into `plane_runs`); each layer has equally many, with the same indices."""
    num_layers: int
    plane_runs: tuple[tuple[Run, ...], ...]
    """Runs with offsets from the beginning of a plane; adjacent ones are joined."""
    plane_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        sizes = [sum([length for _, length in runs]) for runs in self.plane_runs]
        if len(sizes) == 1:
            return len(self.planes) * sizes[0]
        return sum([sizes[index] for _, index in self.planes])

    def __len__(self) -> int:
        return sum(len(self.plane_runs[index]) for _, index in self.planes)

    def __iter__(self) -> Iterator[Run]:
        for plane, index in self.planes:
            base = plane * self.plane_bytes
            for offset, length in self.plane_runs[index]:
                yield base + offset, length


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPairs:
    """Copies between two regions, or within one; iteration yields (source offset, destination offset, length)."""

    planes: tuple[tuple[int, int, int], ...]
    """(source plane, destination plane, index into `plane_pairs`), as in `Runs`."""
    num_layers: int
    plane_pairs: tuple[tuple[RunPair, ...], ...]
    """Copies with offsets from the beginnings of the planes; those adjacent on both sides are joined."""
    source_plane_bytes: int
    destination_plane_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs of one side."""
        sizes = [sum(pair[2] for pair in pairs) for pairs in self.plane_pairs]
        return sum(sizes[index] for _, _, index in self.planes)

    def __len__(self) -> int:
        return sum(len(self.plane_pairs[index]) for _, _, index in self.planes)

    def __iter__(self) -> Iterator[RunPair]:
        for source, destination, index in self.planes:
            here, there = source * self.source_plane_bytes, destination * self.destination_plane_bytes
            for begin, end, length in self.plane_pairs[index]:
                yield here + begin, there + end, length


def extend(runs: list[Run], more: Iterable[Run], base: int = 0) -> None:
    """Append `more`, shifted by `base`; a run that continues the last one is joined with it."""
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


def pair_runs(reads: Iterable[Run], writes: Iterable[Run]) -> tuple[RunPair, ...]:
    """Pair the runs of two sides, cut wherever either is; the total lengths must be equal."""
    pairs = []
    targets = iter(writes)
    there, room = 0, 0
    for start, length in reads:
        here, left = start, length
        while left:
            if not room:
                there, room = next(targets)
            size = left if left < room else room
            pairs.append((here, there, size))
            here, left, there, room = here + size, left - size, there + size, room - size
    return tuple(pairs)
