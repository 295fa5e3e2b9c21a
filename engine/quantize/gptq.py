"""GPTQ: rounds a matrix to four bits so that its products with real inputs change least.

Frantar, Ashkboos, Hoefler and Alistarh, 2022 (https://arxiv.org/abs/2210.17323). Columns are rounded in order; what
rounding one of them does to the products, those that are still to be rounded make up for as well as the inputs'
correlations allow. A group's scale is chosen when its first column is reached, from values with all corrections so far.
"""

import torch
from torch import Tensor

from engine.model.checkpoints.stored_matrix import GroupIntMatrix
from engine.quantize.rounding import best_scales, group_matrix, nearest_codes
from tandem.errors import ConfigError

_BLOCK_COLUMNS = 128
"""Columns whose corrections reach the rest of the matrix together: one large product instead of many thin ones."""
_DAMPING = 0.01
"""Added to the Gram matrix's diagonal, as a part of its mean: fewer inputs than columns leave it singular."""
_MAX_DAMPING = 1.0


def correction_factor(gram: Tensor) -> Tensor:
    """The upper triangle U with `U.T @ U = inverse(gram + damping)`, float32 `[columns, columns]`.

    `gram`: sums of products of the inputs' columns, `[columns, columns]`. A column whose inputs were all zero is
    rounded on its own. Raises ConfigError when the matrix is not finite, or not that of any inputs.
    """
    diagonal = gram.diagonal().double()
    mean = diagonal.mean()
    if not bool(torch.isfinite(mean)):
        raise ConfigError("calibration: inputs of a projection are not finite")
    silent = torch.where(diagonal == 0.0, mean.clamp_min(torch.finfo(torch.float32).tiny), 0.0)
    damping = _DAMPING
    while damping <= _MAX_DAMPING:
        # Of the matrix with rows and columns reversed: the inverse of its lower factor, reversed back, is upper.
        damped = gram.flip(0, 1).double()
        damped.diagonal().add_((silent + damping * mean).flip(0))
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped  # large in wide MLPs
        if not failed:
            identity = torch.eye(len(lower), dtype=lower.dtype)
            inverse: Tensor = torch.linalg.solve_triangular(lower, identity, upper=False)
            return inverse.float().flip(0, 1)
        damping *= 10.0
    raise ConfigError("calibration: inputs of a projection have no positive definite Gram matrix")


def round_with_corrections(weight: Tensor, factor: Tensor, group_size: int) -> GroupIntMatrix:
    """Round `[rows, columns]` of any float dtype to four bits in groups.

    `factor`: of the inputs, from `correction_factor`. `group_size` divides the columns and 128. Raises ConfigError as
    `rounding.best_scales`.
    """
    rows, columns = weight.shape
    # Transposed, so that one column's values are neighbours.
    values = torch.empty(columns, rows).copy_(weight.t())
    codes = torch.empty(columns, rows, dtype=torch.int8)
    scales = torch.empty(columns // group_size, rows, dtype=torch.float16)
    for begin in range(0, columns, _BLOCK_COLUMNS):
        end = min(columns, begin + _BLOCK_COLUMNS)
        block, errors = values[begin:end], torch.empty(end - begin, rows)
        for column in range(begin, end):
            at = column - begin
            if column % group_size == 0:
                scales[column // group_size] = best_scales(block[at : at + group_size].t())
            scale = scales[column // group_size]
            found = nearest_codes(block[at], scale)
            codes[column] = found
            errors[at] = (block[at] - found * scale.float()) / factor[column, column]
            block[at + 1 :].addr_(factor[column, column + 1 : end], errors[at], alpha=-1.0)
        values[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1.0)
    return group_matrix(codes.t().contiguous(), scales.t().contiguous())
