"""The interface of a quantized format: which stored tensors make up a matrix, and how they become a StoredMatrix."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from engine.model.checkpoints.safetensors_files import TensorEntry
from engine.model.checkpoints.stored_matrix import StoredMatrix
from engine.model.config_fields import Fields
from tandem.errors import ConfigError

WHERE = "config.json: quantization_config"
SCALES = ("F16", "BF16", "F32")
"""Stored dtypes of scales, by safetensors' names."""
_NOT_SET: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True)
class PartSpec:
    """How a tensor has to be stored."""

    dtypes: tuple[str, ...]
    """Dtypes by safetensors' names, of which it has one."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes, of which it has one; the usual one first."""


def part(dtypes: str | tuple[str, ...], *shapes: tuple[int, ...]) -> PartSpec:
    """A stored tensor of one of some dtypes and one of some shapes."""
    return PartSpec((dtypes,) if isinstance(dtypes, str) else dtypes, shapes)


class QuantizedFormat(Protocol):
    """The settings of one quantized checkpoint. A frozen dataclass: its fields are part of the model's fingerprint."""

    @property
    def description(self) -> str:
        """The format with its settings, for logs: "GPTQ, 4 bits, groups of 128"."""
        ...

    @property
    def unused(self) -> tuple[str, ...]:
        """Endings of names of tensors that weights do not depend on, such as scales of activations."""
        ...

    def parts(self, module: str, shape: tuple[int, int], entries: Mapping[str, TensorEntry]) -> Mapping[str, PartSpec]:
        """Stored tensors of the matrix `module + ".weight"`, by what follows `module + "."` in their names.

        Empty where the matrix is stored dense. `shape`: as config.json implies. Raises ConfigError.
        """
        ...

    def matrix(self, module: str, shape: tuple[int, int], parts: Mapping[str, Tensor]) -> StoredMatrix:
        """Make the matrix of stored tensors that are as `parts` says. Raises ConfigError, naming a damaged tensor."""
        ...


def damaged(module: str, part: str, problem: str) -> ConfigError:
    """The error to raise about a stored tensor."""
    return ConfigError(f"checkpoint: {module}.{part} {problem}")


def missing(module: str, part: str) -> ConfigError:
    """The error to raise about a tensor that should be stored."""
    return ConfigError(f"checkpoint: tensor {module}.{part} is missing")


def check_settings(fields: Fields, raw: Mapping[str, Any], method: str, known: str) -> None:
    """Check that nothing is set but `known` names, between spaces: it might change what the weights mean.

    Raises ConfigError. Null, false and empty settings are those that are not used.
    """
    names = known.split()
    for name, value in raw.items():
        if name not in names and value not in _NOT_SET:
            raise fields.error(f"{name!r:.60}", f"is not a setting of {method} that is supported")


def check_choice(fields: Fields, name: str, supported: Collection[Any], default: Any) -> Any:
    """A field that has one of a few values. Raises ConfigError, naming those that are supported."""
    value = fields.get(name)
    value = default if value is None else value
    # By type as well: JSON's 4.0 and true equal 4 and 1, and bits cannot be shifted by them.
    if not any(type(value) is type(one) and value == one for one in supported):
        raise fields.error(name, f"must be one of {', '.join(map(str, supported))}, is {value!r:.40}")
    return value
