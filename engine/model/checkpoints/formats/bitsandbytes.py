"""bitsandbytes: NF4 and FP4 (QLoRA: Dettmers et al., 2023), and LLM.int8 (Dettmers et al., 2022).

Four bits: `weight`, uint8 `[values / 2, 1]`, the flattened matrix, high half first; `weight.quant_map`, the table of
16 values; `weight.absmax`, one scale for each block of the flattened matrix, which may be quantized itself (`uint8`,
with `nested_absmax` and `nested_quant_map`); and a JSON object of the rest, as bytes, in `weight.quant_state.
bitsandbytes__nf4`. Eight bits: `weight`, int8 `[out, in]`, and `SCB`, 127 times the scale of each row. The columns
that LLM.int8 computes apart are chosen by activations when it runs: they are stored like all others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, isfinite
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.format import PartSpec, check_choice, check_settings, damaged, missing, part
from engine.model.checkpoints.packing import pack_nibbles
from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import Int8Matrix, StoredMatrix, Table16Matrix
from engine.model.config_fields import Fields
from tandem.model_files import parse_json_object

_TABLES = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 2**16
_MAX_BLOCK = 2**20
_BYTE_VALUES = 256
_INT8_MAX = 127.0
_KNOWN = (
    "quant_method load_in_4bit _load_in_4bit load_in_8bit _load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage "
    # How the file was made, and how its authors compute with it.
    "bnb_4bit_use_double_quant bnb_4bit_compute_dtype llm_int8_threshold llm_int8_skip_modules "
    "llm_int8_enable_fp32_cpu_offload"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FourBitFormat:
    """Settings of a checkpoint in NF4 or FP4."""

    table: str
    """Name of the table, "nf4" or "fp4"; its values are stored."""
    unused: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return f"bitsandbytes {self.table.upper()}"

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        state, scales = entries.get(f"{module}.{_STATE}{self.table}"), entries.get(f"{module}.weight.absmax")
        if state is None and scales is None:
            return {}
        if state is None or scales is None:
            raise missing(module, "weight.absmax" if scales is None else _STATE + self.table)
        size = min(state.shape[0] if state.shape else 0, _MAX_STATE_BYTES)
        num_blocks = scales.shape[0] if scales.shape else 0
        found = {
            "weight": part("U8", (-(-shape[0] * shape[1] // 2), 1)),
            "weight.quant_map": part("F32", (16,)),
            _STATE + self.table: part("U8", (size,)),
        }
        nested = entries.get(f"{module}.weight.nested_absmax")
        if scales.dtype != "U8":
            return found | {"weight.absmax": part("F32", (num_blocks,))}
        if nested is None:
            raise missing(module, "weight.nested_absmax")
        return found | {
            "weight.absmax": part("U8", (num_blocks,)),
            "weight.nested_absmax": part("F32", (nested.shape[0] if nested.shape else 0,)),
            "weight.nested_quant_map": part("F32", (_BYTE_VALUES,)),
        }

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        rows, columns = shape
        state = self._state(module, shape, parts[_STATE + self.table])
        block = state.integer("blocksize", 1, _MAX_BLOCK)
        scales = _scales(module, parts, state)
        if len(scales) != -(-rows * columns // block):
            raise damaged(module, "weight.absmax", f"has {len(scales)} scales, not one for each block of {block}")
        # A block of the flattened matrix that goes on in the next row is two groups here.
        size = gcd(block, columns)
        starts = torch.arange(0, rows * columns, size)
        return Table16Matrix(
            num_columns=columns,
            codes=_codes(parts["weight"].flatten(), rows, columns),
            table=parts["weight.quant_map"].clone(),
            scale=scales[starts // block].view(rows, columns // size),
            group_size=size,
        )

    def _state(self, module: str, shape: tuple[int, int], stored: Tensor) -> Fields:
        where = f"checkpoint: {module}.{_STATE}{self.table}"
        state = Fields(parse_json_object(stored.numpy().tobytes(), where), where)
        check_choice(state, "quant_type", (self.table,), self.table)
        if state.get("shape") != list(shape):
            raise state.error("shape", f"is {state.get('shape')!r:.60}, config.json implies {list(shape)}")
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class Int8Format:
    """Settings of a checkpoint of LLM.int8: it has none that concern weights."""

    unused: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return "bitsandbytes LLM.int8"

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        weight = entries.get(f"{module}.weight")
        if weight is None or weight.dtype != "I8":
            return {}
        found = {"weight": part("I8", shape), "SCB": part("F32", (shape[0],))}
        if f"{module}.weight_format" in entries:
            found["weight_format"] = part("U8", (), (1,))
        return found

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        if "weight_format" in parts and int(parts["weight_format"]) != 0:
            raise damaged(module, "weight_format", f"must be 0, by rows, is {int(parts['weight_format'])}")
        return Int8Matrix(codes=parts["weight"], scale=parts["SCB"] / _INT8_MAX)


def parse_bitsandbytes(fields: Fields, raw: Mapping[str, Any]) -> FourBitFormat | Int8Format:
    """Read the settings. Raises ConfigError."""
    check_settings(fields, raw, "bitsandbytes", _KNOWN)
    is_4bit = fields.boolean("load_in_4bit", False) or fields.boolean("_load_in_4bit", False)
    is_8bit = fields.boolean("load_in_8bit", False) or fields.boolean("_load_in_8bit", False)
    if is_4bit == is_8bit:
        raise fields.error("load_in_4bit", "or load_in_8bit must be true, and not both")
    if is_8bit:
        return Int8Format()
    check_choice(fields, "bnb_4bit_quant_storage", ("uint8",), "uint8")
    return FourBitFormat(table=check_choice(fields, "bnb_4bit_quant_type", _TABLES, "fp4"))


def _scales(module: str, parts: Mapping[str, Tensor], state: Fields) -> Tensor:
    """Scales of the blocks, float32, restored where they are quantized."""
    stored = parts["weight.absmax"]
    if stored.dtype != torch.uint8:
        return stored
    nested = parts["weight.nested_absmax"]
    block = state.integer("nested_blocksize", 1, _MAX_BLOCK)
    offset = state.number("nested_offset", -3e38, 3e38)
    if len(nested) != -(-len(stored) // block) or not isfinite(offset):
        raise damaged(module, "weight.nested_absmax", f"has {len(nested)} scales, not one for each block of {block}")
    scaled = parts["weight.nested_quant_map"][stored.long()] * nested[torch.arange(len(stored)) // block]
    return scaled + offset


def _codes(stored: Tensor, rows: int, columns: int) -> Tensor:
    """Canonical nibbles `[rows, ceil(columns / 2)]` of the flattened ones."""
    if columns % 2 == 0:
        return ((stored >> 4) | (stored << 4)).view(rows, columns // 2)
    flat = torch.stack((stored >> 4, stored & 15), dim=-1).flatten()
    return pack_nibbles(flat[: rows * columns].view(rows, columns))
