"""MXFP4 (OCP Microscaling Formats, version 1.0): 4-bit floats E2M1, one power of two for each 32 columns.

As gpt-oss stores it, `NAME_blocks`, uint8 `[rows, groups, 16]`, low half first, and `NAME_scales`, uint8
`[rows, groups]`, E8M0: an exponent with bias 127, of which 255 is not a number.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.format import PartSpec, check_settings, damaged, part
from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import StoredMatrix, Table16Matrix
from engine.model.config_fields import Fields

GROUP_SIZE = 32
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
_NOT_A_NUMBER = 255
_KNOWN = "quant_method modules_to_not_convert dequantize"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Format:
    """Settings of an MXFP4 checkpoint: it has none."""

    unused: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return f"MXFP4, groups of {GROUP_SIZE}"

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        if f"{module}.weight_blocks" not in entries:
            return {}
        rows, groups = shape[0], num_groups(module, "weight_blocks", shape[1])
        return {
            "weight_blocks": part("U8", (rows, groups, GROUP_SIZE // 2)),
            "weight_scales": part("U8", (rows, groups)),
        }

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        exponents = parts["weight_scales"]
        return fp4_matrix(shape, parts["weight_blocks"].flatten(1), power_of_two(module, "weight_scales", exponents))


def parse_mxfp4(fields: Fields, raw: Mapping[str, Any]) -> Mxfp4Format:
    """Read the settings. Raises ConfigError."""
    check_settings(fields, raw, "mxfp4", _KNOWN)
    return Mxfp4Format()


def num_groups(module: str, name: str, columns: int, group_size: int = GROUP_SIZE) -> int:
    """Groups of a row. Raises ConfigError where the columns are not whole groups."""
    if columns % group_size:
        raise damaged(module, name, f"has {columns} columns by config.json, which are no multiple of {group_size}")
    return columns // group_size


def power_of_two(module: str, name: str, exponents: Tensor) -> Tensor:
    """Scales, float32, of E8M0 exponents, uint8. Raises ConfigError for one that is not a number."""
    if bool((exponents == _NOT_A_NUMBER).any()):
        raise damaged(module, name, "has scales that are not finite")
    # Not by torch.exp2, which need not be exact.
    return torch.tensor([2.0 ** (e - _EXPONENT_BIAS) for e in range(_NOT_A_NUMBER)])[exponents.long()]


def fp4_matrix(shape: tuple[int, int], codes: Tensor, scale: Tensor, *, group_size: int = GROUP_SIZE) -> Table16Matrix:
    """Make the matrix of packed E2M1 `[rows, columns / 2]` and float32 scales `[rows, groups]`."""
    positive = torch.tensor(_POSITIVE)
    return Table16Matrix(
        num_columns=shape[1], codes=codes, table=torch.cat((positive, -positive)), scale=scale, group_size=group_size
    )
