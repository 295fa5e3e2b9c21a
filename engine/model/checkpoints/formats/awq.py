"""AWQ (Lin et al., 2023) as AutoAWQ writes it for its `gemm` kernels: 4 bits, with zeros, groups of input features.

Stored of each matrix: `qweight`, int32 `[in, out / 8]`; `qzeros`, int32 `[groups, out / 8]`; `scales` `[groups, out]`.
The nibbles of a word, from the lowest on, are outputs 0, 2, 4, 6, 1, 3, 5, 7 of its eight.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.format import SCALES, PartSpec, check_choice, check_settings, damaged, part
from engine.model.checkpoints.formats.gptq import groups_text, parse_group_size
from engine.model.checkpoints.packing import pack_nibbles, unpack_words
from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import GroupIntMatrix, StoredMatrix
from engine.model.config_fields import Fields

_BITS = 4
_PER_WORD = 8
_NIBBLE_OF_OUTPUT = (0, 4, 1, 5, 2, 6, 3, 7)
_KNOWN = (
    "quant_method bits w_bit group_size q_group_size zero_point version modules_to_not_convert backend do_fuse "
    "fuse_max_seq_len modules_to_fuse exllama_config method checkpoint_format format pack_dtype desc_act lm_head sym "
    "meta"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqFormat:
    """Settings of an AWQ checkpoint."""

    group_size: int | None
    """None: one group of all input features."""
    unused: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return f"AWQ, {_BITS} bits, {groups_text(self.group_size)}"

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        if f"{module}.qweight" not in entries:
            return {}
        rows, columns = shape
        if rows % _PER_WORD:
            raise damaged(module, "qweight", f"has {rows} outputs by config.json, which are no multiple of {_PER_WORD}")
        groups = -(-columns // (self.group_size or columns))
        return {
            "qweight": part("I32", (columns, rows // _PER_WORD)),
            "qzeros": part("I32", (groups, rows // _PER_WORD)),
            "scales": part(SCALES, (groups, rows)),
        }

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        return GroupIntMatrix(
            bits=_BITS,
            num_columns=shape[1],
            codes=pack_nibbles(_unpack(parts["qweight"], shape[0]).t().contiguous()),
            scale=parts["scales"].t().contiguous(),
            zero=_unpack(parts["qzeros"], shape[0]).t().to(torch.int16).contiguous(),
            group_size=self.group_size or shape[1],
        )


def parse_awq(fields: Fields, raw: Mapping[str, Any]) -> AwqFormat:
    """Read the settings. Raises ConfigError."""
    check_settings(fields, raw, "awq", _KNOWN)
    check_choice(fields, "w_bit" if fields.has("w_bit") else "bits", (_BITS,), _BITS)
    if not fields.boolean("zero_point", True):
        raise fields.error("zero_point", "must be true")
    for name in ("version", "format", "checkpoint_format"):  # AutoAWQ's name, and GPTQModel's
        found = fields.get(name)
        if found is not None and str(found).lower() != "gemm":
            raise fields.error(name, f"must be gemm, is {found!r:.40}")
    check_choice(fields, "pack_dtype", ("int32",), "int32")
    return AwqFormat(
        group_size=parse_group_size(fields, "q_group_size" if fields.has("q_group_size") else "group_size")
    )


def _unpack(words: Tensor, count: int) -> Tensor:
    """Codes `[rows, count]` of words `[rows, count / 8]`."""
    codes = unpack_words(words, _BITS, count).view(len(words), -1, _PER_WORD)
    return codes[:, :, list(_NIBBLE_OF_OUTPUT)].flatten(1)
