"""GPTQ (Frantar et al., 2022) as AutoGPTQ and GPTQModel write it: 2, 3, 4 or 8 bits, groups of input features.

Stored of each matrix: `qweight`, int32 `[in × bits / 32, out]`, packed along the input features from the lowest bit on;
`qzeros`, int32 `[groups, out × bits / 32]`, packed alike along the outputs; `scales` `[groups, out]`; `g_idx`, int32
`[in]`, the group of each input feature, which is arbitrary in activation order. In the first version of the format
(`checkpoint_format: gptq`) a zero is stored one too small.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.format import SCALES, PartSpec, check_choice, check_settings, damaged, missing, part
from engine.model.checkpoints.packing import canonical_codes, unpack_words
from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import GroupIntMatrix, StoredMatrix
from engine.model.config_fields import Fields

BITS = (2, 3, 4, 8)
_MAX_GROUP = 2**20
_ZERO_SHIFTS = {"gptq": 1, "gptq_v2": 0}
_KNOWN = (
    "quant_method method bits group_size desc_act sym checkpoint_format format pack_dtype lm_head "
    # How the file was made, or by which kernels its authors run it.
    "damp_percent damp_auto_increment static_groups true_sequential mse act_group_aware quantizer meta version "
    "dataset tokenizer batch_size model_seqlen pad_token_id max_input_length model_name_or_path model_file_base_name "
    "module_name_preceding_first_block block_name_to_quantize modules_in_block_to_quantize cache_block_outputs "
    "use_cuda_fp16 use_exllama disable_exllama exllama_config backend task pack_impl"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat:
    """Settings of a GPTQ checkpoint."""

    bits: int
    group_size: int | None
    """None: one group of all input features."""
    zero_shift: int
    """What is added to a stored zero."""
    has_activation_order: bool
    unused: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        order = ", activation order" if self.has_activation_order else ""
        return f"GPTQ, {self.bits} bits, {groups_text(self.group_size)}{order}"

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        if f"{module}.qweight" not in entries:
            return {}
        rows, columns = shape
        groups = -(-columns // (self.group_size or columns))
        found = {
            "qweight": part("I32", (_words(columns, self.bits), rows)),
            "qzeros": part("I32", (groups, _words(rows, self.bits))),
            "scales": part(SCALES, (groups, rows)),
        }
        if f"{module}.g_idx" in entries:
            found["g_idx"] = part("I32", (columns,))
        elif self.has_activation_order and groups > 1:
            raise missing(module, "g_idx")
        return found

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        rows, columns = shape
        group_size = self.group_size or columns
        zeros = unpack_words(parts["qzeros"], self.bits, rows).t().to(torch.int16) + self.zero_shift
        return GroupIntMatrix(
            bits=8 if self.bits == 8 else 4,
            num_columns=columns,
            codes=canonical_codes(parts["qweight"].t(), self.bits, columns),
            scale=parts["scales"].t().contiguous(),
            zero=zeros.contiguous(),
            group_size=group_size,
            group_of_column=column_groups(module, "g_idx", parts.get("g_idx"), group_size, len(parts["scales"])),
        )


def parse_gptq(fields: Fields, raw: Mapping[str, Any]) -> GptqFormat:
    """Read the settings. Raises ConfigError."""
    check_settings(fields, raw, "gptq", _KNOWN)
    version = check_choice(fields, "checkpoint_format", tuple(_ZERO_SHIFTS), fields.get("format") or "gptq")
    check_choice(fields, "pack_dtype", ("int32",), "int32")
    return GptqFormat(
        bits=check_choice(fields, "bits", BITS, 0),
        group_size=parse_group_size(fields, "group_size"),
        zero_shift=_ZERO_SHIFTS[version],
        has_activation_order=fields.boolean("desc_act", False),
    )


def parse_group_size(fields: Fields, name: str) -> int | None:
    """A field that is a number of columns; None where it is -1, all of them. Raises ConfigError."""
    if fields.get(name) == -1:
        return None
    return fields.integer(name, 1, _MAX_GROUP, 128)


def groups_text(group_size: int | None) -> str:
    """The size of groups for a log."""
    return "one scale per row" if group_size is None else f"groups of {group_size}"


def column_groups(module: str, name: str, stored: Tensor | None, group_size: int, num_groups: int) -> Tensor | None:
    """Check a stored group of each column. Returns None where the groups are runs of `group_size`."""
    if stored is None:
        return None
    groups = stored.to(torch.int64)
    if not groups.numel():
        return None
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= num_groups:
        raise damaged(module, name, f"names groups {low} to {high}, there are {num_groups}")
    return None if torch.equal(groups, torch.arange(len(groups)) // group_size) else groups


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)
