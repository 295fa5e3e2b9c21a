"""Where a model's tensors come from: the interface that the loader reads, and which source a model directory has."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from engine.model.checkpoints.gguf.file import GgufFile
from engine.model.checkpoints.gguf.source import GgufSource
from engine.model.checkpoints.registry import parse_format
from engine.model.checkpoints.restored import RestoredCheckpoint
from engine.model.checkpoints.safetensors_files import Checkpoint
from engine.model.checkpoints.stored_matrix import StoredMatrix
from engine.model.files import ModelDirectory
from engine.model.shard import TensorSlice
from engine.model.spec import ModelSpec


class TensorSource(Protocol):
    """Source of a model's tensors, by Hugging Face's names: a checkpoint, another program's memory, a generator."""

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        ...

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists with this shape; ConfigError otherwise."""
        ...

    def tensor(self, name: str, part: TensorSlice | None = None) -> Tensor:
        """A tensor, or a part of its rows or columns, of any float dtype on any device; used until it is forgotten."""
        ...

    def matrix(self, name: str, part: TensorSlice | None = None) -> StoredMatrix | None:
        """A matrix, or a part of it, as it is stored, which may view the mapped file; None where it is dense."""
        ...

    def forget(self, name: str) -> None:
        """Release a tensor that has been copied."""
        ...

    def fingerprint(self, config: ModelSpec) -> str:
        """Name of this model's computation: equal for equal configuration and tensors."""
        ...


class CheckpointSource(TensorSource, Protocol):
    """A TensorSource of files."""

    @property
    def summary(self) -> str | None:
        """One line for the log about weights that are restored; None where they are dense."""
        ...


@contextmanager
def open_source(
    directory: ModelDirectory, config: ModelSpec, shapes: Mapping[str, tuple[int, ...]], *, dtype: torch.dtype
) -> Iterator[CheckpointSource]:
    """Open a model directory's weights. Within the context their files are mapped.

    `shapes`: all tensors of the model; `dtype`: of those that are restored. Raises ConfigError.
    """
    if (path := directory.gguf_path()) is not None:
        with closing(GgufFile(path)) as file:
            yield GgufSource(file, config, shapes, dtype=dtype)
        return
    with Checkpoint(directory) as checkpoint:
        stored_format = parse_format(directory.read_json("config.json").get("quantization_config"))
        if stored_format is None:
            yield checkpoint
        else:
            yield RestoredCheckpoint(checkpoint, stored_format, shapes, dtype=dtype)
