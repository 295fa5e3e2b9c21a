"""FP8 weights (E4M3 or E5M2: Micikevicius et al., 2022) with a scale for the tensor, each row, or each block.

`quant_method: fp8`, as DeepSeek-V3 and transformers write it, has `weight_scale_inv`, `[blocks of rows, blocks of
columns]`, by which a weight is multiplied, in spite of its name; AutoFP8's has one `weight_scale`. `fbgemm_fp8` has a
`weight_scale` for each row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.format import SCALES, PartSpec, check_choice, check_settings, missing, part
from engine.model.checkpoints.formats.mxfp4 import power_of_two
from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import Fp8Matrix, StoredMatrix
from engine.model.config_fields import Fields

FLOATS8 = ("F8_E4M3", "F8_E5M2")
_MAX_BLOCK = 2**20
_NAMES = ("weight_scale_inv", "weight_scale")
_EXPONENTS = "F8_E8M0"
_KNOWN = (
    "quant_method fmt scale_fmt weight_block_size modules_to_not_convert ignored_layers kv_cache_scheme "
    # Activations are not rounded here, and nothing else follows from these.
    "activation_scheme activation_scale_ub is_checkpoint_fp8_serialized dequantize"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """Settings of an FP8 checkpoint."""

    block: tuple[int, int] | None
    """Rows and columns of a block with one scale; None: a scale for a tensor or its rows, as each is stored."""
    unused: tuple[str, ...] = (".input_scale",)

    @property
    def description(self) -> str:
        scaled = "scales of tensors or rows" if self.block is None else "blocks of {}×{}".format(*self.block)
        return f"FP8, {scaled}"

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        weight = entries.get(f"{module}.weight")
        if weight is None or weight.dtype not in FLOATS8:
            return {}
        name = next((name for name in _NAMES if f"{module}.{name}" in entries), None)
        if name is None:
            raise missing(module, "weight_scale" if self.block is None else "weight_scale_inv")
        rows, columns = shape
        shapes: tuple[tuple[int, ...], ...]
        if self.block is not None:
            shapes = ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        else:
            shapes = ((), (1,), (1, 1), (rows,), (rows, 1))
        return {"weight": part(FLOATS8, shape), name: part((*SCALES, _EXPONENTS), *shapes)}

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        name = next(name for name in _NAMES if name in parts)
        scale = parts[name]
        if scale.element_size() == 1:
            scale = power_of_two(module, name, scale.view(torch.uint8))
        return fp8_matrix(parts["weight"], scale, self.block)


def parse_fp8(fields: Fields, raw: Mapping[str, Any]) -> Fp8Format:
    """Read the settings. Raises ConfigError."""
    check_settings(fields, raw, str(fields.get("quant_method")), _KNOWN)
    check_choice(fields, "fmt", ("e4m3", "float8_e4m3fn", "e5m2"), "e4m3")
    check_choice(fields, "scale_fmt", ("float", "ue8m0"), "float")
    return Fp8Format(block=parse_block(fields, "weight_block_size"))


def parse_block(fields: Fields, name: str) -> tuple[int, int] | None:
    """A field that is the rows and columns of a block, if there is one. Raises ConfigError."""
    if not fields.has(name):
        return None
    sizes = fields.get(name)
    if not isinstance(sizes, list) or len(sizes) != 2 or any(isinstance(size, bool) for size in sizes):
        raise fields.error(name, f"must be [rows, columns] of a block, is {sizes!r:.40}")
    if not all(isinstance(size, int) and 1 <= size <= _MAX_BLOCK for size in sizes):
        raise fields.error(name, f"must be [rows, columns] in [1, {_MAX_BLOCK}], is {sizes!r:.40}")
    return sizes[0], sizes[1]


def fp8_matrix(codes: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Fp8Matrix:
    """Make the matrix; without blocks, `scale` is one number or one for each row."""
    rows, columns = codes.shape
    if block is None:
        scale = scale.reshape(-1, 1)
        block = (1 if len(scale) > 1 else max(1, rows), max(1, columns))
    return Fp8Matrix(codes=codes, scale=scale.float(), block_rows=block[0], block_columns=block[1])
