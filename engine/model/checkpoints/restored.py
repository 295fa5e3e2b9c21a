"""A quantized checkpoint as a source of matrices: as they are stored, or restored when they are read.

Restored, a model in any of the formats runs on every backend, in the memory of a dense one.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor

from engine.model.checkpoints.format import PartSpec, QuantizedFormat
from engine.model.checkpoints.safetensors_files import Checkpoint
from engine.model.checkpoints.stored_matrix import StoredMatrix
from engine.model.shard import TensorSlice
from engine.model.spec import ModelSpec
from tandem.errors import ConfigError

_WEIGHT = ".weight"


class RestoredCheckpoint:
    """Implements `sources.CheckpointSource`: a matrix that is stored in parts has one name, its dense one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        stored_format: QuantizedFormat,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        dtype: torch.dtype,
    ) -> None:
        """`shapes`: all tensors of the model, by their dense names; `dtype`: of restored matrices.

        Raises ConfigError where no matrix, or only a part of one, is stored in the format.
        """
        self._checkpoint = checkpoint
        self._format = stored_format
        self._dtype = dtype
        self._shapes = {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}
        entries = checkpoint.entries
        self._parts: dict[str, Mapping[str, PartSpec]] = {}
        for name, shape in self._shapes.items():
            if parts := stored_format.parts(name.removesuffix(_WEIGHT), shape, entries):
                self._parts[name] = parts
        if not self._parts:
            raise ConfigError(
                "config.json: quantization_config declares "
                f"{stored_format.description}, but no tensor is stored that way"
            )
        used = {self._stored(name, part) for name, parts in self._parts.items() for part in parts}
        rest = {name for name in checkpoint.names - used if not name.endswith(stored_format.unused or "\0")}
        self.names = frozenset(rest - self._surplus_biases(rest, shapes)) | self._parts.keys()

    @property
    def summary(self) -> str:
        """One line for the log: from what the weights are restored, and how many of them."""
        size = self._checkpoint.size_bytes
        return (
            f"weights are restored to {str(self._dtype).removeprefix('torch.')} from {self._format.description}: "
            f"{len(self._parts)} of {len(self._shapes)} matrices, {size / 2**20:.1f} MiB of files"
        )

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists with this shape, and all parts of a matrix as its format stores them. Raises
        ConfigError.
        """
        if name not in self._parts:
            self._checkpoint.require(name, shape)
            return
        if self._shapes[name] != shape:
            raise ConfigError(f"checkpoint: {name} has shape {list(self._shapes[name])}, expected {list(shape)}")
        for part, spec in self._parts[name].items():
            self._checkpoint.require_stored(self._stored(name, part), spec.dtypes, spec.shapes)

    def matrix(self, name: str, part: TensorSlice | None = None) -> StoredMatrix | None:
        """See TensorSource. Raises ConfigError, naming a damaged tensor."""
        if name not in self._parts:
            return None
        matrix = self._whole(name)
        return matrix if part is None else matrix.part(part)

    def _whole(self, name: str) -> StoredMatrix:
        tensors = {}
        for part, spec in self._parts[name].items():
            stored = self._stored(name, part)
            self._checkpoint.require_stored(stored, spec.dtypes, spec.shapes)
            tensors[part] = self._checkpoint.tensor(stored)
            # Of codes the loader finds what is not finite, in the restored matrix.
            if part != "weight" and tensors[part].is_floating_point() and tensors[part].element_size() > 1:
                _check_finite(stored, tensors[part])
        return self._format.matrix(name.removesuffix(_WEIGHT), self._shapes[name], tensors)

    def tensor(self, name: str, part: TensorSlice | None = None) -> Tensor:
        """A tensor, or a part of it; of a matrix in parts, only that part is restored. Raises ConfigError."""
        matrix = self.matrix(name, part)
        return self._checkpoint.tensor(name, part) if matrix is None else matrix.dequantized(self._dtype)

    def forget(self, name: str) -> None:
        """Release a tensor that has been copied."""
        if name not in self._parts:
            self._checkpoint.forget(name)
        for part in self._parts.get(name, ()):
            self._checkpoint.forget(self._stored(name, part))

    def fingerprint(self, config: ModelSpec) -> str:
        """Name of this model's computation; covers the stored bytes, as Checkpoint's, and the format's settings."""
        fields = asdict(self._format)  # type: ignore[call-overload]
        fields.pop("rounds_rows", None)  # says nothing of the weights, and previous versions do not know it
        settings = json.dumps([type(self._format).__name__, fields], sort_keys=True)
        return hashlib.sha256(f"{self._checkpoint.fingerprint(config)} {settings}".encode()).hexdigest()[:32]

    def _stored(self, name: str, part: str) -> str:
        return f"{name.removesuffix(_WEIGHT)}.{part}"

    def _surplus_biases(self, names: set[str], shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
        """Biases of zeros that the model does not have: some tools store one with every matrix."""
        found = set()
        for name in self._parts:
            bias = f"{name.removesuffix(_WEIGHT)}.bias"
            if bias in names and bias not in shapes and not self._checkpoint.tensor(bias).any():
                found.add(bias)
        return found


def _check_finite(name: str, values: Tensor) -> None:
    if values.numel() and not bool(torch.isfinite(values).all()):
        raise ConfigError(f"checkpoint: {name} has values that are not finite")
