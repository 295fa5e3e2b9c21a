"""AQLM (Egiazarian et al., "Extreme Compression of Large Language Models via Additive Quantization", 2024).

A group of weights, `out_group_size` × `in_group_size`, is the sum of one vector from each codebook, times a scale of
its rows. Stored are `codebooks` `[codebooks, 2^bits, out group, in group]`, `codes` `[out groups, in groups,
codebooks]`, signed integers modulo 2^bits, and `scales` `[out groups, 1, 1, 1]` (https://github.com/Vahe1994/AQLM).
Restored: no kernel of ours looks up vectors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.format import SCALES, PartSpec, check_settings, damaged, part
from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import DenseMatrix, StoredMatrix
from engine.model.config_fields import Fields

_KNOWN = (
    "quant_method in_group_size out_group_size num_codebooks nbits_per_codebook linear_weights_not_to_quantize "
    "modules_to_not_convert"
)
_MAX_GROUP, _MAX_CODEBOOKS, _MAX_BITS = 1024, 64, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AqlmFormat:
    """Settings of an AQLM checkpoint."""

    in_group_size: int
    """Columns of a group."""
    out_group_size: int
    """Rows of a group."""
    num_codebooks: int
    bits: int
    """Of a code."""
    unused: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return (
            f"AQLM, {self.num_codebooks} codebooks of {self.bits} bits, "
            f"groups of {self.out_group_size}×{self.in_group_size}"
        )

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        if f"{module}.codes" not in entries:
            return {}
        rows, columns = shape
        if rows % self.out_group_size or columns % self.in_group_size:
            size = f"{self.out_group_size}×{self.in_group_size}"
            raise damaged(
                module, "codes", f"is of {rows}×{columns} by config.json, which are no whole groups of {size}"
            )
        out_groups, in_groups = rows // self.out_group_size, columns // self.in_group_size
        return {
            "codes": part("I8" if self.bits <= 8 else "I16", (out_groups, in_groups, self.num_codebooks)),
            "codebooks": part(SCALES, (self.num_codebooks, 1 << self.bits, self.out_group_size, self.in_group_size)),
            "scales": part(SCALES, (out_groups, 1, 1, 1)),
        }

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        codebooks, scales = parts["codebooks"].float(), parts["scales"].float()
        for name, values in (("codebooks", codebooks), ("scales", scales)):
            if not bool(torch.isfinite(values).all()):
                raise damaged(module, name, "has values that are not finite")
        codes = parts["codes"].long() % (1 << self.bits)
        groups = codebooks[0][codes[:, :, 0]]
        for index in range(1, self.num_codebooks):
            groups += codebooks[index][codes[:, :, index]]
        groups *= scales
        return DenseMatrix(values=groups.transpose(1, 2).reshape(shape))


def parse_aqlm(fields: Fields, raw: Mapping[str, Any]) -> AqlmFormat:
    """Read the settings. Raises ConfigError."""
    check_settings(fields, raw, "aqlm", _KNOWN)
    return AqlmFormat(
        in_group_size=fields.integer("in_group_size", 1, _MAX_GROUP, 8),
        out_group_size=fields.integer("out_group_size", 1, _MAX_GROUP, 1),
        num_codebooks=fields.integer("num_codebooks", 1, _MAX_CODEBOOKS, 1),
        bits=fields.integer("nbits_per_codebook", 1, _MAX_BITS, 16),
    )
