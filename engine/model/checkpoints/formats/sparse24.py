"""2:4 sparsity as earlier versions of compressed-tensors stored it (`sparse-24-bitmask`): of each four columns, two.

Of a matrix there are `compressed`, the values kept, `[rows, columns / 2]`, `bitmask`, a bit for each column, the first
one lowest, `[rows, columns / 8]`, and `shape`. Restored: no kernel of ours leaves out zeros.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.format import SCALES, WHERE, PartSpec, check_choice, check_settings, damaged, part
from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import DenseMatrix, StoredMatrix
from engine.model.config_fields import Fields

LAYOUT = "sparse-24-bitmask"
_KNOWN = "format targets ignore global_sparsity sparsity_structure registry_requires_subclass"
_RUN, _KEPT, _BYTE = 4, 2, 8


@dataclass(frozen=True, slots=True)
class Sparse24Format:
    """A checkpoint of float matrices with zeros in two of four places: it has no settings."""

    unused: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        return f"compressed-tensors {LAYOUT}"

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        if f"{module}.compressed" not in entries:
            return {}
        rows, columns = shape
        if columns % _RUN:
            raise damaged(
                module, "compressed", f"has {columns} columns by config.json, which are no multiple of {_RUN}"
            )
        return {
            "compressed": part(SCALES, (rows, columns // _RUN * _KEPT)),
            "bitmask": part("U8", (rows, -(-columns // _BYTE))),
            "shape": part(("I64", "I32"), (2, 1), (2,)),
        }

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        rows, columns = shape
        if (stored := parts["shape"].flatten().tolist()) != list(shape):
            raise damaged(module, "shape", f"is {stored}, config.json implies {list(shape)}")
        bits = (parts["bitmask"][:, :, None] >> torch.arange(_BYTE, dtype=torch.uint8)) & 1
        kept = bits.flatten(1)[:, :columns].bool()
        if bool((kept.view(rows, -1, _RUN).sum(2) != _KEPT).any()):
            raise damaged(module, "bitmask", f"does not keep {_KEPT} of every {_RUN} columns")
        values = torch.zeros(shape, dtype=parts["compressed"].dtype)
        values[kept] = parts["compressed"].flatten()
        return DenseMatrix(values=values)


def parse_sparse24(raw: Mapping[str, Any]) -> Sparse24Format:
    """Read a `sparsity_config` of this layout. Raises ConfigError."""
    fields = Fields(raw, f"{WHERE}: sparsity_config")
    check_settings(fields, raw, LAYOUT, _KNOWN)
    check_choice(fields, "sparsity_structure", ("2:4",), "2:4")
    return Sparse24Format()
