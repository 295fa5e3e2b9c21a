"""What a model is quantized to, and how that is stored: compressed-tensors' layouts, as llm-compressor writes them.

https://github.com/vllm-project/compressed-tensors. Four bits are `pack-quantized` (W4A16), eight are `int-quantized`
with inputs rounded by row (W8A8).
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from engine.model.checkpoints.stored_matrix import GroupIntMatrix, Int8Matrix
from tandem.errors import ConfigError

GROUP_SIZES = (32, 64, 128)
_HEAD = "lm_head"


class Scheme(Enum):
    """Bits of the weights."""

    INT4 = "int4"
    """Four, with a scale for each group of columns; inputs are not rounded, unless whoever multiplies does so."""
    INT8 = "int8"
    """Eight, with a scale for each row, and inputs in eight bits with a scale for each of theirs."""


class Method(Enum):
    """How codes are chosen."""

    ROUND = "round"
    """Each value for itself: needs nothing but the weights."""
    GPTQ = "gptq"
    SMOOTH = "smooth"
    """SmoothQuant, then rounding."""


_METHODS = {Scheme.INT4: (Method.ROUND, Method.GPTQ), Scheme.INT8: (Method.ROUND, Method.SMOOTH)}
"""Methods of each scheme: the first needs no calibration, the other does, and is the default where there is any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSettings:
    """A scheme with its method."""

    scheme: Scheme
    method: Method
    group_size: int | None
    """Columns with one scale, for four bits; None for eight."""

    @classmethod
    def resolve(
        cls, scheme: Scheme, *, method: Method | None, group_size: int | None, is_calibrated: bool
    ) -> "QuantizationSettings":
        """Fill in what was not chosen. `is_calibrated`: whether there is a text for calibration.

        Raises ConfigError, naming the option, for choices that exclude each other.
        """
        plain, calibrated = _METHODS[scheme]
        method = method or (calibrated if is_calibrated else plain)
        if method not in _METHODS[scheme]:
            raise ConfigError(f"--method must be {plain.value} or {calibrated.value} for {scheme.value}")
        if method is calibrated and not is_calibrated:
            raise ConfigError(f"--method {method.value} needs a text: name a file with --calibrate")
        if method is plain and is_calibrated:
            raise ConfigError(f"--calibrate has no use with --method {plain.value}, which looks at weights alone")
        if scheme is Scheme.INT8:
            if group_size is not None:
                raise ConfigError("--group-size is for int4: int8 has one scale for each row")
            return cls(scheme=scheme, method=method, group_size=None)
        size = GROUP_SIZES[0] if group_size is None else group_size
        if size not in GROUP_SIZES:
            raise ConfigError(f"--group-size must be one of {', '.join(map(str, GROUP_SIZES))}, is {size}")
        return cls(scheme=scheme, method=method, group_size=size)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a matrix of this shape can be quantized: whether groups divide its columns."""
        return self.group_size is None or shape[1] % self.group_size == 0

    def stored_parts(self, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtypes, by safetensors' names, and shapes of what a matrix is stored as, by the ends of their names."""
        rows, columns = shape
        if self.group_size is None:
            return {"weight": ("I8", (rows, columns)), "weight_scale": ("F32", (rows, 1))}
        return {
            "weight_packed": ("I32", (rows, columns // 8)),
            "weight_scale": ("F16", (rows, columns // self.group_size)),
            "weight_shape": ("I64", (2,)),
        }

    def quantization_config(self, dense: Collection[str]) -> dict[str, Any]:
        """What config.json says of the weights; `dense`: modules that stay as they are, besides the head."""
        weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
        inputs: dict[str, Any] | None = weights | {"strategy": "token", "dynamic": True}
        if self.group_size is not None:
            weights = weights | {"num_bits": 4, "strategy": "group", "group_size": self.group_size}
            inputs = None
        group = {"targets": ["Linear"], "weights": weights | {"dynamic": False}, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if self.group_size is None else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group | {"output_activations": None}},
            "ignore": [_HEAD, *dense],
        }


def stored_tensors(matrix: GroupIntMatrix | Int8Matrix) -> dict[str, Tensor]:
    """What a matrix is stored as, by the ends of their names; as `QuantizationSettings.stored_parts` says."""
    if isinstance(matrix, Int8Matrix):
        return {"weight": matrix.codes, "weight_scale": matrix.scale[:, None]}
    return {
        # Canonical nibbles are the very bits of the words, the lowest first.
        "weight_packed": matrix.codes.contiguous().view(torch.int32),
        "weight_scale": matrix.scale,
        "weight_shape": torch.tensor(matrix.shape),
    }
