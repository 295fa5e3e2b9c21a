"""Quantizes float matrices while a model is loaded, to codes of floats: without calibration, each value for itself.

Only weights are quantized, so a product is that of the restored values. A rank's part has the very codes and scales of
the whole matrix: it reads as much as these depend on (`needed`), quantizes that, and takes its part.
"""

from enum import Enum

import torch
from torch import Tensor

from engine.model.checkpoints.packing import pack_nibbles
from engine.model.checkpoints.stored_matrix import Fp8Matrix, Table16Matrix, row_blocks
from engine.model.shard import TensorSlice
from tandem.errors import ConfigError

LARGEST_FP8 = 448.0
"""Largest value of E4M3."""
NF4_BLOCK = 64
"""Columns of a row with one scale, as bitsandbytes has them: its blocks are these where 64 divides the columns."""
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""4-bit NormalFloat (QLoRA: Dettmers et al., 2023, appendix E): quantiles of a normal distribution, with an exact 0."""


class WeightScheme(Enum):
    """What the projections of layers are quantized to while they are loaded; the values are `engine.quantization`'s."""

    FP8 = "fp8"
    """E4M3 with a scale for each row: its largest magnitude over 448."""
    NF4 = "nf4"
    """NF4 with a scale for each block of 64 columns of a row: its largest magnitude."""

    def needed(self, shape: tuple[int, ...], cut: TensorSlice | None) -> TensorSlice | None:
        """What to read of a stored matrix so that its quantized part at `cut` is that of the whole; None: all of it."""
        if cut is None or cut.dim == 0:
            return cut
        if self is WeightScheme.FP8:
            return None
        columns = shape[1]
        begin, end = cut.begin // NF4_BLOCK * NF4_BLOCK, -(-cut.end // NF4_BLOCK) * NF4_BLOCK
        return TensorSlice(dim=1, begin=begin, end=min(columns, end))

    def quantize(self, values: Tensor) -> Fp8Matrix | Table16Matrix:
        """Quantize `[rows, columns]` of any float dtype. Raises ConfigError for values that are not finite."""
        return _to_fp8(values) if self is WeightScheme.FP8 else _to_nf4(values)


def _to_fp8(values: Tensor) -> Fp8Matrix:
    rows, columns = values.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(rows)
    for begin, end in row_blocks(rows, columns):
        some = values[begin:end].float()
        largest = some.abs().amax(dim=1)
        _check_finite(largest)
        unit = largest / LARGEST_FP8
        unit[unit < torch.finfo(torch.float32).tiny] = 0.0  # whose inverse is not finite
        scaled = torch.where(unit[:, None] > 0.0, some / unit[:, None], 0.0)
        codes[begin:end] = scaled.clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        scale[begin:end] = unit
    return Fp8Matrix(codes=codes, scale=scale[:, None], block_rows=1, block_columns=max(1, columns))


def _to_nf4(values: Tensor) -> Table16Matrix:
    rows, columns = values.shape
    table = torch.tensor(NF4_VALUES)
    # Halfway between two values the lower one is taken, as bitsandbytes does.
    borders = (table[1:] + table[:-1]) / 2
    num_blocks = -(-columns // NF4_BLOCK)
    codes = torch.empty(rows, -(-columns // 2), dtype=torch.uint8)
    scale = torch.empty(rows, num_blocks)
    for begin, end in row_blocks(rows, columns):
        padded = torch.nn.functional.pad(values[begin:end].float(), (0, num_blocks * NF4_BLOCK - columns))
        blocks = padded.view(end - begin, num_blocks, NF4_BLOCK)
        largest = blocks.abs().amax(dim=2)
        _check_finite(largest)
        inverse = torch.where(largest >= torch.finfo(torch.float32).tiny, 1.0 / largest, 0.0)
        found = torch.bucketize(blocks * inverse[:, :, None], borders, out_int32=True).to(torch.uint8)
        codes[begin:end] = pack_nibbles(found.flatten(1)[:, :columns])
        scale[begin:end] = largest
    return Table16Matrix(num_columns=columns, codes=codes, table=table, scale=scale, group_size=NF4_BLOCK)


def _check_finite(largest: Tensor) -> None:
    if not bool(torch.isfinite(largest).all()):
        raise ConfigError("has values that are not finite")
