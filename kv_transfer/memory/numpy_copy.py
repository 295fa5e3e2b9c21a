"""Copies runs with numpy, for all layers at once: per copy, Python costs as much for a kilobyte as for a megabyte.

A prompt's blocks are the same in every layer, so the runs of one layer, with a plane for each layer, describe all of
them. Regions are flat and begin with their first plane; payloads are in the order of the wire.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kv_transfer.layout.runs import RunPairs, Runs
from tandem.errors import TransferError

Bytes = npt.NDArray[np.uint8]
_Rows = tuple[slice | list[int], slice]


def gather(runs: Runs, region: Bytes, payload: Bytes) -> None:
    """Copy the bytes that `runs` name in `region` into `payload`. Raises TransferError when sizes disagree."""
    planes = _planes(region, runs.plane_bytes)
    for rows, part in _rows(runs, payload):
        part[...] = planes[rows]


def scatter(runs: Runs, payload: Bytes, region: Bytes) -> None:
    """Copy `payload` into the bytes that `runs` name in `region`. Raises TransferError when sizes disagree."""
    planes = _planes(region, runs.plane_bytes)
    for rows, part in _rows(runs, payload):
        planes[rows] = part


def copy(copies: RunPairs, source: Bytes, destination: Bytes) -> None:
    """Perform `copies` between two regions or within one. Raises TransferError when sizes disagree."""
    if not copies.planes:
        return
    here, there = _planes(source, copies.source_plane_bytes), _planes(destination, copies.destination_plane_bytes)
    per_layer = len(copies.planes) // copies.num_layers
    for i, (_, _, index) in enumerate(copies.planes[:per_layer]):
        alike = copies.planes[i::per_layer]
        sources, targets = _steps([plane[0] for plane in alike]), _steps([plane[1] for plane in alike])
        for begin, end, length in copies.plane_pairs[index]:
            there[targets, end : end + length] = here[sources, begin : begin + length]


def rows_of(runs: Runs) -> Iterator[tuple[_Rows, slice]]:
    """Yield each run of a layer in all layers: (planes and columns in the region, columns in a layer's payload)."""
    per_layer, begin = len(runs.planes) // runs.num_layers, 0
    for i, (_, index) in enumerate(runs.planes[:per_layer]):
        planes = _steps([plane for plane, _ in runs.planes[i::per_layer]])
        for offset, length in runs.plane_runs[index]:
            yield (planes, slice(offset, offset + length)), slice(begin, begin + length)
            begin += length


def _rows(runs: Runs, payload: Bytes) -> Iterator[tuple[_Rows, Bytes]]:
    """Like `rows_of`, with views `[layer, byte]` of the payload instead of its columns."""
    if payload.nbytes != runs.num_bytes:
        raise TransferError(f"payload of {payload.nbytes} bytes for cells of {runs.num_bytes}")
    layers = payload.reshape(runs.num_layers, -1, copy=False)
    for rows, columns in rows_of(runs):
        yield rows, layers[:, columns]


def _planes(region: Bytes, plane_bytes: int) -> Bytes:
    if region.nbytes % plane_bytes:
        raise TransferError(f"region of {region.nbytes} bytes is not whole planes of {plane_bytes}")
    return region.reshape(-1, plane_bytes, copy=False)


def _steps(planes: Sequence[int]) -> slice | list[int]:
    """The planes as an index: a slice where they are evenly spaced, which numpy handles faster."""
    step = planes[1] - planes[0] if len(planes) > 1 else 1
    if step > 0 and all(b - a == step for a, b in pairwise(planes)):
        return slice(planes[0], planes[-1] + 1, step)
    return list(planes)
