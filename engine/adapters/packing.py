"""Lays an adapter out for the ranks of a worker: its matrices at each projection, as one flat tensor per rank.

A projection here may be several of the checkpoint's, stacked (queries, keys, values; gate, up), each with matrices of
its own. So an adapter has, at each projection, the stacked `A` of all, `[num_values, in_features]`, and for each part
its own `B`, transposed, `[rank, columns]`, which reads some of the values: those that its `A` has made of a row. The
scale is in `B`. Ranks divide both as they divide the projection (`engine.model.shard`).
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.adapters.peft_files import LowRankPair
from engine.model.parameters import StoredPart, parameter_table
from engine.model.shard import Shard
from engine.model.spec import ModelSpec

SITES = ("qkv", "output", "gate_up", "down")
"""Projections of a layer that adapters add to."""
MOST_ADAPTER_BYTES = 1000 << 20
"""Most that one message to another rank can hold: `engine.distributed.links.channel` accepts a GiB."""
_ALIGNMENT = 32
"""Elements: every matrix begins at a cache line in every dtype."""
_SIZE = struct.Struct("<I")
_BYTES = torch.uint8


class SitePart(NamedTuple):
    """Part of a projection's columns, and the matrix that adds to them."""

    first_column: int
    num_columns: int
    first_value: int
    """First of the values that it reads."""
    rank: int
    begin: int
    """Element of the flat tensor at which its `[rank, num_columns]` begin."""


class _Placed(NamedTuple):
    begin: int
    matrix: Tensor
    scale: float


class SiteMatrices(NamedTuple):
    """Matrices of one adapter at one projection."""

    site: int
    """Number of the projection: see `site_number`."""
    num_values: int
    begin: int
    """Element of the flat tensor at which the `[num_values, in_features]` begin."""
    depth: int
    """Number of `in_features`."""
    parts: tuple[SitePart, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankAdapter:
    """One rank's part of an adapter."""

    sites: tuple[SiteMatrices, ...]
    values: Tensor
    """All matrices, flat, in the model's dtype, in host memory."""


def site_number(layer: int, name: str) -> int:
    """Number of a projection of a layer, by its name in SITES."""
    return layer * len(SITES) + SITES.index(name)


def adapted_parts(spec: ModelSpec) -> dict[int, tuple[StoredPart, ...]]:
    """The stored tensors of every projection that adapters can add to, by its number: none of a mixture of experts."""
    table = parameter_table(spec)
    return {
        site_number(layer, name): table[key]
        for layer in range(spec.num_layers)
        for name in SITES
        if (key := f"layers.{layer}.{name}.weight") in table
    }


def pack_adapter(
    pairs: Mapping[str, LowRankPair], sites: Mapping[int, Sequence[StoredPart]], shard: Shard, dtype: torch.dtype
) -> RankAdapter:
    """Lay out the matrices of one rank; `pairs` are by the names of the stored tensors that they add to."""
    packer = _Packer(shard)
    found = tuple(
        packer.site(number, parts, pairs)
        for number, parts in sites.items()
        if any(part.name in pairs for part in parts)
    )
    return RankAdapter(sites=found, values=packer.flat(dtype))


class _Packer:
    """Collects matrices and their places in the flat tensor: views, of which one at a time is converted."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._matrices: list[_Placed] = []
        self._end = 0

    def site(self, number: int, parts: Sequence[StoredPart], pairs: Mapping[str, LowRankPair]) -> SiteMatrices:
        downs: dict[str, tuple[int, Tensor]] = {}
        found, column, num_values = [], 0, 0
        for part in parts:
            cut = self._shard.slice(part)
            shape = part.shape if cut is None else cut.shape(part.shape)
            pair = pairs.get(part.name)
            if pair is not None:
                if part.name not in downs:  # parts of one stored tensor share its values
                    down = pair.down if cut is None or part.dim == 0 else pair.down[:, cut.begin : cut.end]
                    downs[part.name] = num_values, down
                    num_values += len(down)
                up = pair.up if cut is None or part.dim == 1 else pair.up[cut.begin : cut.end]
                up = _in_kernel_order(part, up)
                first, rank = downs[part.name][0], up.shape[1]
                found.append(SitePart(column, shape[0], first, rank, self._add((up.T,), pair.scale)))
            column += shape[0]
        stacked = [each for _, each in downs.values()]
        return SiteMatrices(number, num_values, self._add(stacked), stacked[0].shape[1], tuple(found))

    def flat(self, dtype: torch.dtype) -> Tensor:
        values = torch.zeros(self._end, dtype=dtype)
        for placed in self._matrices:
            # Scaled before it is rounded to the model's dtype.
            scaled = placed.matrix.to(torch.float32) * placed.scale
            values[placed.begin : placed.begin + scaled.numel()] = scaled.reshape(-1)
        return values

    def _add(self, stacked: Sequence[Tensor], scale: float = 1.0) -> int:
        """Place matrices one below the other; returns where the first one begins."""
        begin = end = self._end
        for matrix in stacked:
            self._matrices.append(_Placed(end, matrix, scale))
            end += matrix.numel()
        self._end += -(-(end - begin) // _ALIGNMENT) * _ALIGNMENT
        return begin


def _in_kernel_order(part: StoredPart, up: Tensor) -> Tensor:
    """Rows as the projection's own are put in order: see `engine.model.parameters`."""
    if part.order is None:
        return up
    return up.reshape(-1, len(part.order), up.shape[1])[:, list(part.order)].flatten(0, 1)


def encode_adapter(slot: int, adapter: RankAdapter | None) -> bytes:
    """A message to another rank: what `slot` holds from now on; None: nothing."""
    header: dict[str, Any] = {"slot": slot, "dtype": None, "sites": ()}
    data = b""
    if adapter is not None:
        header |= {"dtype": str(adapter.values.dtype).removeprefix("torch."), "sites": adapter.sites}
        data = adapter.values.view(_BYTES).numpy().tobytes()
    text = json.dumps(header).encode()
    return _SIZE.pack(len(text)) + text + data


def decode_adapter(payload: memoryview) -> tuple[int, RankAdapter | None]:
    """Decode the output of `encode_adapter` into memory of its own."""
    (size,) = _SIZE.unpack_from(payload)
    header = json.loads(bytes(payload[_SIZE.size : _SIZE.size + size]))
    if header["dtype"] is None:
        return header["slot"], None
    data = torch.frombuffer(bytearray(payload[_SIZE.size + size :]), dtype=_BYTES)
    sites = tuple(
        SiteMatrices(site, num_values, begin, depth, tuple(SitePart(*part) for part in parts))
        for site, num_values, begin, depth, parts in header["sites"]
    )
    return header["slot"], RankAdapter(sites=sites, values=data.view(getattr(torch, header["dtype"])))
