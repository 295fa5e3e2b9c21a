"""Rounds matrices of weights: to four bits in groups of columns, or to eight bits by row.

The choices are those of the CPU kernels that quantize at load (`engine/kernels/cpu/csrc/quantize.h`), so that a rounded
directory has the weights that `engine.quantization` would have made. Scales of groups may be negative: the value
farthest from zero, of either sign, then has the code -8, which codes of two's complement have and 8 not.
"""

import torch
from torch import Tensor

from engine.model.checkpoints.packing import pack_nibbles
from engine.model.checkpoints.stored_matrix import GroupIntMatrix, Int8Matrix, row_blocks
from tandem.errors import ConfigError

_LOWEST, _HIGHEST = -8, 7
_ZERO = 8
"""Code of zero: stored codes of four bits are unsigned."""
_CANDIDATES = tuple(-9.0 + 0.25 * i for i in range(13))
"""What the value farthest from zero may be, in units of a scale that is tried."""
_LARGEST_BYTE = 127.0


def best_scales(groups: Tensor) -> Tensor:
    """The scale of each group, float32 `[num_groups, size]`, that loses least: float16 `[num_groups]`.

    Of 13 scales around that at which the value farthest from zero is -8, the one with the least squared error; without
    it a single large value takes resolution from all others. Raises ConfigError for values that are not finite, or so
    large that no scale in half precision reaches them.
    """
    extreme = groups.gather(1, groups.abs().argmax(dim=1, keepdim=True))[:, 0]
    best = torch.zeros_like(extreme, dtype=torch.float16)
    least = torch.full_like(extreme, torch.inf)
    for candidate in _CANDIDATES:
        scale = (extreme / candidate).half()
        error = (groups - nearest_codes(groups, scale[:, None]) * scale.float()[:, None]).square().sum(dim=1)
        is_better = error < least  # never where it is not a number
        best, least = torch.where(is_better, scale, best), torch.where(is_better, error, least)
    if not bool(torch.isfinite(least).all()):
        raise ConfigError("has values that are not finite, or too large for scales in half precision")
    return best


def nearest_codes(values: Tensor, scale: Tensor) -> Tensor:
    """Values as whole numbers of float16 scales, from -8 to 7, ties to even; float32, of the shape of `values`."""
    unit = scale.float()
    inverse = torch.where(unit != 0.0, 1.0 / unit, 0.0)
    return (values * inverse).clamp_(_LOWEST, _HIGHEST).round_()


def round_groups(weight: Tensor, group_size: int) -> GroupIntMatrix:
    """Round `[rows, columns]` of any float dtype to four bits, each group of columns by its best scale.

    `group_size` divides the columns. Raises ConfigError as `best_scales`.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scale = torch.empty(rows, columns // group_size, dtype=torch.float16, device=weight.device)
    for begin, end in row_blocks(rows, columns):
        groups = weight[begin:end].float().reshape(-1, group_size)
        found = best_scales(groups)
        codes[begin:end] = nearest_codes(groups, found[:, None]).view(-1, columns)
        scale[begin:end] = found.view(end - begin, -1)
    return group_matrix(codes, scale)


def group_matrix(codes: Tensor, scale: Tensor) -> GroupIntMatrix:
    """The matrix of codes from -8 to 7, int8 `[rows, columns]`, and their scales, float16 `[rows, groups]`."""
    columns = codes.shape[1]
    return GroupIntMatrix(
        bits=4,
        num_columns=columns,
        codes=pack_nibbles((codes + _ZERO).to(torch.uint8)),
        scale=scale,
        zero=torch.full(scale.shape, _ZERO, dtype=torch.int16, device=scale.device),
        group_size=columns // scale.shape[1],
    )


def round_rows(weight: Tensor) -> Int8Matrix:
    """Round `[rows, columns]` of any float dtype to eight bits, each row in units of its largest magnitude over 127.

    The matrix is for products with inputs that are rounded to eight bits too. Raises ConfigError for values that are
    not finite.
    """
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    scale = torch.empty(rows, device=weight.device)
    for begin, end in row_blocks(rows, columns):
        values = weight[begin:end].float()
        largest = values.abs().amax(dim=1)
        if not bool(torch.isfinite(largest).all()):
            raise ConfigError("has values that are not finite")
        factor = torch.where(largest > torch.finfo(torch.float32).tiny, _LARGEST_BYTE / largest, 0.0)
        codes[begin:end] = (values * factor[:, None]).round_()
        scale[begin:end] = largest / _LARGEST_BYTE
    return Int8Matrix(codes=codes, scale=scale, rounds_inputs=True)
