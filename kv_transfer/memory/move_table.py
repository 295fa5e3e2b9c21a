"""What one launch of `run_kernel` copies and sums, as a table of numbers. Imports neither torch nor triton."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.layout.runs import RunPair, RunPairs, Runs, pair_runs

ALIGNMENTS = (16, 4)
"""Bytes of which every offset and length must be a multiple, best first: the kernel has a variant for each."""
HEADER, ROW, PLANE = 4, 4, 2
"""Numbers at the table's beginning, where the kernel leaves the sum, of one run and of one plane."""
_MAX_BYTES = 1 << 31

Numbers = npt.NDArray[np.int64]
_Planes = tuple[tuple[int, int], ...]


@dataclass(slots=True, kw_only=True, eq=False)
class MoveTable:
    """The runs of a layer, each with its source and target, and the planes that they are in. All numbers are bytes."""

    planes: Numbers
    """Two for each plane, layer by layer: where it begins in the source and in the target."""
    rows: list[int]
    """Four for each run of a layer: its offsets in the source's and in the target's plane; its offset among the layer's
    bytes on the wire, shifted by 32, plus its length; the number of its plane in the layer."""
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
        planes = _begins(
            (shape.planes, sizes) if reads is None else (reads.planes, reads.plane_bytes),
            (shape.planes, sizes) if writes is None else (writes.planes, writes.plane_bytes),
        )
        per_layer = len(shape.planes) // shape.num_layers
        return cls._of(planes, [pairs[index] for _, index in shape.planes[:per_layer]], shape.num_layers)

    @classmethod
    def of_copies(cls, copies: RunPairs) -> "MoveTable | None":
        """Table of `copies`. Returns None when they are not aligned, or are none."""
        if not copies.planes:
            return None
        planes = _begins(
            (tuple((source, 0) for source, _, _ in copies.planes), copies.source_plane_bytes),
            (tuple((target, 0) for _, target, _ in copies.planes), copies.destination_plane_bytes),
        )
        per_layer = len(copies.planes) // copies.num_layers
        pairs = [copies.plane_pairs[index] for _, _, index in copies.planes[:per_layer]]
        return cls._of(planes, pairs, copies.num_layers)

    @classmethod
    def _of(
        cls, planes: tuple[Numbers, int], layer: Sequence[Sequence[RunPair]], num_layers: int
    ) -> "MoveTable | None":
        """`layer`: the copies in each plane of a layer."""
        numbers, bits = planes
        rows: list[int] = []
        lengths: list[int] = []
        wire = 0
        for plane, pairs in enumerate(layer):
            for source, target, length in pairs:
                rows += (source, target, wire << 32 | length, plane)
                bits |= source | target | length
                wire += length
                lengths.append(length)
        if bits % ALIGNMENTS[-1] or wire >= _MAX_BYTES:
            return None
        return cls(
            planes=numbers,
            rows=rows,
            num_layers=num_layers,
            layer_bytes=wire,
            longest=max(lengths),
            alignment=next(bound for bound in ALIGNMENTS if not bits % bound),
        )

    @property
    def num_rows(self) -> int:
        return len(self.rows) // ROW

    @property
    def planes_per_layer(self) -> int:
        return self.planes.size // (PLANE * self.num_layers)

    @property
    def num_numbers(self) -> int:
        """Numbers that `write` writes."""
        return HEADER + len(self.rows) + self.planes.size

    def write(self, numbers: Numbers) -> None:
        """Write rows and planes where the kernel reads them, behind the header."""
        rows_end = HEADER + len(self.rows)
        numbers[HEADER:rows_end] = self.rows
        numbers[rows_end : rows_end + self.planes.size] = self.planes


@functools.lru_cache(maxsize=256)
def _begins(*sides: tuple[_Planes, int | tuple[int, ...]]) -> tuple[Numbers, int]:
    """`MoveTable.planes`, and the bits of all of them; cached, because the chunks of a hand-off have them in common.

    sides: planes as in `Runs`, and the bytes of each in a pool; or those of each index on the wire, where the planes
    follow one another.
    """
    begins = []
    for planes, sizes in sides:
        if isinstance(sizes, int):
            begins.append(np.array([plane for plane, _ in planes], np.int64) * sizes)
        else:
            begins.append(np.cumsum([0, *(sizes[index] for _, index in planes[:-1])], dtype=np.int64))
    numbers = np.stack(begins, axis=1).reshape(-1)
    return numbers, int(np.bitwise_or.reduce(numbers))
