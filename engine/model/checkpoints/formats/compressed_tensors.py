"""compressed-tensors, as llm-compressor writes it: integers packed or plain, FP8, MXFP8, MXFP4, NVFP4.

https://github.com/vllm-project/compressed-tensors. `pack-quantized` stores `weight_packed`, int32 `[out, words]`,
integers of 2 to 8 bits with the lowest first and half of their range added; `int-quantized` an int8 `weight`;
`float-quantized` one in E4M3; `naive-quantized` either; `mxfp8-quantized` one in E4M3 with exponents as scales;
`mxfp4-pack-quantized` pairs of E2M1 in bytes, likewise; `nvfp4-pack-quantized` these with scales in E4M3, which are
divided by `weight_global_scale`. All have a `weight_scale` for the tensor, each row ("channel"), group of columns, or
block. Rounding of activations, which a scheme may ask for, is not done by restored weights: they are exact, the
products finer than the scheme's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.format import (
    SCALES,
    WHERE,
    PartSpec,
    check_choice,
    check_settings,
    damaged,
    missing,
    part,
)
from engine.model.checkpoints.formats.fp8 import fp8_matrix, parse_block
from engine.model.checkpoints.formats.gptq import column_groups, groups_text
from engine.model.checkpoints.formats.mxfp4 import fp4_matrix, num_groups, power_of_two
from engine.model.checkpoints.formats.sparse24 import LAYOUT, Sparse24Format, parse_sparse24
from engine.model.checkpoints.packing import canonical_codes, unpack_words
from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import GroupIntMatrix, Int8Matrix, StoredMatrix
from engine.model.config_fields import Fields

_PACKED, _INT, _FLOAT, _NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
_MXFP8, _MXFP4, _NVFP4 = "mxfp8-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_FORMATS = (_PACKED, _INT, _FLOAT, _NAIVE, _MXFP8, _MXFP4, _NVFP4)
_INTEGERS = (_PACKED, _INT)
_INTEGER_BITS = (2, 3, 4, 5, 6, 7, 8)
_BITS: Mapping[str, tuple[int, ...]] = {
    _PACKED: _INTEGER_BITS,
    _INT: _INTEGER_BITS,
    _FLOAT: (8,),
    _MXFP8: (8,),
    _MXFP4: (4,),
    _NVFP4: (4,),
}
_STRATEGIES = {
    _PACKED: ("channel", "group"),
    _INT: ("tensor", "channel", "group"),
    _FLOAT: ("tensor", "channel", "group", "block"),
    _MXFP8: ("group",),
    _MXFP4: ("group",),
    _NVFP4: ("tensor_group",),
}
_GROUPS = {_MXFP8: 32, _MXFP4: 32, _NVFP4: 16}
"""The one size of groups that a layout has."""
_UNUSED = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")
_MAX_GROUP = 2**20
_KNOWN = "quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio version"
_GROUP_KNOWN = "targets weights input_activations output_activations format"
_WEIGHTS_KNOWN = (
    "num_bits type symmetric strategy group_size block_structure actorder observer observer_kwargs scale_dtype zp_dtype"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensorsFormat:
    """Settings of the weights of a compressed-tensors checkpoint."""

    layout: str
    bits: int
    strategy: str
    group_size: int | None
    """Columns with one scale; None: all of them."""
    block: tuple[int, int] | None
    is_symmetric: bool
    has_activation_order: bool
    rounds_activations: bool
    rounds_rows: bool = False
    """Whether inputs are rounded to signed bytes, each row by a scale of its own."""
    unused: tuple[str, ...] = _UNUSED

    @property
    def description(self) -> str:
        size = "blocks of {}×{}".format(*self.block) if self.block else groups_text(self.group_size)
        scaled = "one scale per tensor" if self.strategy == "tensor" else size
        rounding = "; its rounding of activations is left out where it is restored" if self.rounds_activations else ""
        return f"compressed-tensors {self.layout}, {self.bits} bits, {scaled}{rounding}"

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        rows, columns = shape
        if self.layout in (_PACKED, _MXFP4, _NVFP4):
            if f"{module}.weight_packed" not in entries:
                return {}
            return self._packed_parts(module, shape, entries)
        stored = "I8" if self.layout == _INT else "F8_E4M3"
        weight = entries.get(f"{module}.weight")
        if weight is None or weight.dtype != stored:
            return {}
        if self.layout == _MXFP8:
            return {
                "weight": part(stored, shape),
                "weight_scale": part("U8", (rows, num_groups(module, "weight", columns))),
            }
        found = {"weight": part(stored, shape), "weight_scale": part(SCALES, *self._scale_shapes(rows, columns))}
        if not self.is_symmetric:
            found["weight_zero_point"] = part("I8", *self._scale_shapes(rows, columns))
        return found

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        rows, columns = shape
        if self.layout == _MXFP4:
            scale = power_of_two(module, "weight_scale", parts["weight_scale"])
            return fp4_matrix(shape, parts["weight_packed"], scale)
        if self.layout == _NVFP4:
            scale = parts["weight_scale"].float() / parts["weight_global_scale"].float()
            if not bool(torch.isfinite(scale).all()):
                raise damaged(module, "weight_scale", "has scales that are not finite")
            return fp4_matrix(shape, parts["weight_packed"], scale, group_size=_GROUPS[_NVFP4])
        if self.layout == _PACKED:
            return self._packed(module, shape, parts)
        codes, scale = parts["weight"], parts["weight_scale"]
        if self.layout == _MXFP8:
            return fp8_matrix(codes, power_of_two(module, "weight_scale", scale), (1, _GROUPS[_MXFP8]))
        if self.layout == _FLOAT:
            block = (1, self.group_size) if self.strategy == "group" and self.group_size else self.block
            return fp8_matrix(codes, scale, block)
        scale = scale.reshape(-1, 1).expand(rows, 1) if self.strategy == "tensor" else scale.reshape(rows, -1)
        if self.is_symmetric and self.group_size is None:
            return Int8Matrix(codes=codes, scale=scale[:, 0].float(), rounds_inputs=self.rounds_rows)
        zero = torch.zeros((), dtype=torch.int16).expand(scale.shape)
        if not self.is_symmetric:
            zero = parts["weight_zero_point"].reshape(-1, scale.shape[1]).expand(scale.shape).to(torch.int16)
        return GroupIntMatrix(
            bits=8,
            num_columns=columns,
            codes=codes.view(torch.uint8) ^ 128,  # adds 128 to a signed byte
            scale=scale.contiguous(),
            zero=zero + 128,
            group_size=self.group_size or columns,
        )

    def _packed_parts(
        self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]
    ) -> Mapping[str, PartSpec]:
        rows, columns = shape
        if self.layout != _PACKED:
            groups = num_groups(module, "weight_packed", columns, _GROUPS[self.layout])
            codes = {"weight_packed": part("U8", (rows, columns // 2))}
            if self.layout == _MXFP4:
                return codes | {"weight_scale": part("U8", (rows, groups))}
            scales = {"weight_scale": part("F8_E4M3", (rows, groups)), "weight_global_scale": part("F32", (1,), ())}
            return codes | scales
        groups = -(-columns // (self.group_size or columns))
        found = {
            "weight_packed": part("I32", (rows, -(-columns * self.bits // 32))),
            "weight_scale": part(SCALES, (rows, groups)),
            "weight_shape": part(("I64", "I32"), (2,)),
        }
        if not self.is_symmetric:
            found["weight_zero_point"] = part("I32", (-(-rows * self.bits // 32), groups))
        if f"{module}.weight_g_idx" in entries:
            found["weight_g_idx"] = part("I32", (columns,))
        elif self.has_activation_order:
            raise missing(module, "weight_g_idx")
        return found

    def _packed(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> GroupIntMatrix:
        rows, columns = shape
        if parts["weight_shape"].tolist() != list(shape):
            stored = parts["weight_shape"].tolist()
            raise damaged(module, "weight_shape", f"is {stored}, config.json implies {list(shape)}")
        scale = parts["weight_scale"]
        if self.is_symmetric:
            zero = torch.full(scale.shape, 1 << (self.bits - 1), dtype=torch.int16)
        else:
            zero = unpack_words(parts["weight_zero_point"].t(), self.bits, rows).t().to(torch.int16).contiguous()
        size = self.group_size or columns
        codes = canonical_codes(parts["weight_packed"], self.bits, columns)
        if 4 < self.bits < 8:  # around the middle of a byte, where kernels have them
            codes, zero = codes + _shift(self.bits), zero + _shift(self.bits)
        return GroupIntMatrix(
            bits=4 if self.bits <= 4 else 8,
            num_columns=columns,
            codes=codes,
            scale=scale,
            zero=zero,
            group_size=size,
            group_of_column=column_groups(module, "weight_g_idx", parts.get("weight_g_idx"), size, scale.shape[1]),
        )

    def _scale_shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        if self.strategy == "tensor":
            return ((1,), (), (1, 1))
        if self.block is not None:
            return ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        if self.group_size is not None:
            return ((rows, -(-columns // self.group_size)),)
        return ((rows, 1), (rows,))


def _shift(bits: int) -> int:
    """What is added to codes of fewer bits than eight, so that the middle of their range is that of a byte."""
    return 128 - (1 << (bits - 1))


def _rounds_rows(inputs: Any) -> bool:
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token"}
    usual = {"type": "int", "symmetric": True}
    return isinstance(inputs, Mapping) and all(
        (usual | dict(inputs)).get(name) == value for name, value in wanted.items()
    )


def parse_compressed_tensors(fields: Fields, raw: Mapping[str, Any]) -> "CompressedTensorsFormat | Sparse24Format":
    """Read the settings. Raises ConfigError, also where groups of layers differ in how their weights are stored, and
    where quantized weights are sparse as well.
    """
    sparsity = fields.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") == LAYOUT and not raw.get("config_groups"):
        check_settings(fields, {**raw, "sparsity_config": None}, "compressed-tensors", _KNOWN)
        return parse_sparse24(sparsity)
    check_settings(fields, {**raw, **_without_sparsity(fields)}, "compressed-tensors", _KNOWN)
    check_choice(fields, "quantization_status", ("compressed",), "compressed")
    layout = check_choice(fields, "format", _FORMATS, _NAIVE)
    groups = fields.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise fields.error("config_groups", "must be a non-empty object")
    found = [_parse_group(str(name), group, layout) for name, group in groups.items()]
    if any(other != found[0] for other in found):
        raise fields.error("config_groups", "must store all weights alike: several schemes are not supported")
    return found[0]


def _without_sparsity(fields: Fields) -> dict[str, Any]:
    """The setting of sparsity, emptied where it says that there is none."""
    sparsity = fields.get("sparsity_config")
    return {"sparsity_config": None} if isinstance(sparsity, dict) and sparsity.get("format") == "dense" else {}


def _parse_group(name: str, raw: Any, layout: str) -> CompressedTensorsFormat:
    where = f"{WHERE}: config_groups: {name:.40}"
    if not isinstance(raw, dict) or not isinstance(raw.get("weights"), dict):
        raise Fields({}, where).error("weights", "must be an object")
    group, weights = Fields(raw, where), Fields(raw["weights"], f"{where}: weights")
    check_settings(group, raw, "compressed-tensors", _GROUP_KNOWN)
    check_settings(weights, raw["weights"], "compressed-tensors", _WEIGHTS_KNOWN)
    if group.has("format"):
        layout = check_choice(group, "format", _FORMATS, layout)
    kind = check_choice(weights, "type", ("int", "float"), "int")
    if layout == _NAIVE:
        layout = _INT if kind == "int" else _FLOAT
    if kind != ("int" if layout in _INTEGERS else "float"):
        raise weights.error("type", f"is {kind}, which is not stored as {layout}")
    group_size = weights.get("group_size")
    default = "channel" if group_size in (None, -1) else "group"
    strategy = check_choice(weights, "strategy", _STRATEGIES[layout], default)
    size = weights.integer("group_size", 1, _MAX_GROUP) if strategy in ("group", "tensor_group") else None
    block = parse_block(weights, "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise weights.error("block_structure", "is missing")
    is_symmetric = weights.boolean("symmetric", True)
    if layout not in _INTEGERS and not is_symmetric:
        raise weights.error("symmetric", f"must be true for {layout}")
    if size != _GROUPS.get(layout, size):
        raise weights.error("group_size", f"must be {_GROUPS[layout]} for {layout}, is {size}")
    return CompressedTensorsFormat(
        layout=layout,
        bits=check_choice(weights, "num_bits", _BITS[layout], 8),
        strategy=strategy,
        group_size=size,
        block=block,
        is_symmetric=is_symmetric,
        has_activation_order=strategy == "group" and weights.get("actorder") in ("group", "dynamic"),
        rounds_activations=group.has("input_activations"),
        rounds_rows=_rounds_rows(group.get("input_activations")),
        # Of the others as before: it is part of the model's name.
        unused=(*_UNUSED, ".input_global_scale") if layout == _NVFP4 else _UNUSED,
    )
