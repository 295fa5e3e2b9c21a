"""What one launch of `run_kernel` copies and sums, as a table of numbers. Imports neither torch nor triton."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.layout.runs import RunPair, RunPairs, Runs, pair_runs

ALIGNMENTS = (16, 4)
"""Bytes of which every offset and length must be a multiple, best first: the kernel has a variant for each."""
HEADER, ROW, PLANE = 4, 5, 2
"""Numbers at the table's beginning, of one run and of one plane."""
_MAX_BYTES = 1 << 31

Numbers = npt.NDArray[np.int64]
_Planes = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoveTable:
    """The runs of a layer, each with its source and target, and the planes that they are in. All numbers are bytes."""

    planes: Numbers
    """`[plane, 2]`: the beginnings of the source's and the target's plane, layer by layer."""
    rows: list[int]
    """For each run of a layer: the number of its plane in the layer, its offsets in the source's and in the target's
    plane and among the layer's bytes on the wire, and its length."""
    num_layers: int
    layer_bytes: int
    """Bytes of a layer on the wire."""
    longest: int
    """Length of the longest run."""
    alignment: int
    """One of ALIGNMENTS."""

    @classmethod
    def between(cls, reads: Runs | None, writes: Runs | None) -> "MoveTable | None":
        """Table of a copy from `reads` to `writes`, of equally many bytes; None is memory in the order of the wire.

        Returns None when the runs are not aligned.
        """
        shape = writes if reads is None else reads
        if shape is None or not shape.planes:
            return None
        sizes = tuple([sum([length for _, length in runs]) for runs in shape.plane_runs])
        whole = [((0, size),) for size in sizes]
        sources = whole if reads is None else reads.plane_runs
        targets = whole if writes is None else writes.plane_runs
        pairs = [pair_runs(source, target) for source, target in zip(sources, targets, strict=True)]
        here = _begins(shape.planes, sizes) if reads is None else _begins(reads.planes, reads.plane_bytes)
        there = _begins(shape.planes, sizes) if writes is None else _begins(writes.planes, writes.plane_bytes)
        return cls._of(here, there, [index for _, index in shape.planes], shape.num_layers, pairs)

    @classmethod
    def of_copies(cls, copies: RunPairs) -> "MoveTable | None":
        """Table of `copies`. Returns None when they are not aligned, or are none."""
        if not copies.planes:
            return None
        here = _begins(tuple((plane, 0) for plane, _, _ in copies.planes), copies.source_plane_bytes)
        there = _begins(tuple((plane, 0) for _, plane, _ in copies.planes), copies.destination_plane_bytes)
        indices = [index for _, _, index in copies.planes]
        return cls._of(here, there, indices, copies.num_layers, copies.plane_pairs)

    @classmethod
    def _of(
        cls,
        here: "tuple[Numbers, int]",
        there: "tuple[Numbers, int]",
        indices: list[int],
        num_layers: int,
        pairs: Sequence[Sequence[RunPair]],
    ) -> "MoveTable | None":
        rows: list[int] = []
        bits, wire, longest = here[1] | there[1], 0, 0
        for plane, index in enumerate(indices[: len(indices) // num_layers]):
            for source, target, length in pairs[index]:
                rows += (plane, source, target, wire, length)
                bits |= source | target | length
                wire += length
                longest = max(longest, length)
        alignment = next((bound for bound in ALIGNMENTS if not bits % bound), 0)
        if not alignment or wire >= _MAX_BYTES:
            return None
        planes = np.stack((here[0], there[0]), axis=1)
        return cls(
            planes=planes, rows=rows, num_layers=num_layers, layer_bytes=wire, longest=longest, alignment=alignment
        )

    @property
    def num_rows(self) -> int:
        return len(self.rows) // ROW

    @property
    def num_numbers(self) -> int:
        """Numbers that `write` writes."""
        return HEADER + len(self.rows) + self.planes.size

    def write(self, numbers: Numbers) -> None:
        """Write the table as the kernel reads it: a header that begins with a zero to count in, rows, planes."""
        rows_end = HEADER + len(self.rows)
        numbers[:rows_end] = [0, len(self.planes) // self.num_layers, self.layer_bytes, 0, *self.rows]
        numbers[rows_end : rows_end + self.planes.size] = self.planes.reshape(-1)


@functools.lru_cache(maxsize=256)
def _begins(planes: _Planes, sizes: int | tuple[int, ...]) -> tuple[Numbers, int]:
    """The beginnings of planes, and all of their bits together; cached, because chunks have theirs in common.

    `sizes`: the bytes of every plane of a pool; or those that each index has on the wire, where planes follow one
    another.
    """
    if isinstance(sizes, int):
        begins = np.array([plane for plane, _ in planes], np.int64) * sizes
    else:
        begins = np.cumsum([0, *(sizes[index] for _, index in planes[:-1])], dtype=np.int64)
    return begins, int(np.bitwise_or.reduce(begins))
