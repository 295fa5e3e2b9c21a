"""Writes safetensors checkpoints tensor by tensor, in any order: no more than one has to be in memory.

What will be written is declared first. Files are as `engine.model.checkpoints.safetensors_files` describes them; larger
ones than `max_file_bytes` are split, and named by an index.
"""

import json
import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO

import torch
from torch import Tensor

from engine.model.checkpoints.safetensors_files import STORED_DTYPES

_MAX_FILE_BYTES = 5 * 10**9
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredTensor:
    """A tensor that will be written."""

    name: str
    dtype: str
    """By safetensors' names."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORED_DTYPES[self.dtype].itemsize


@dataclass(slots=True)
class _OpenFile:
    """A file with its header, and where each of its tensors begins."""

    name: str
    tensors: list[DeclaredTensor]
    file: IO[bytes]
    offsets: dict[str, int] = field(default_factory=dict)

    def write_header(self) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begin = 0
        # Those with the widest values first: then all are aligned.
        for tensor in sorted(self.tensors, key=lambda one: -STORED_DTYPES[one.dtype].itemsize):
            end = begin + tensor.nbytes
            header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
            self.offsets[tensor.name] = begin
            begin = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self.file.write(len(text).to_bytes(8, "little") + text)
        start = 8 + len(text)
        self.offsets = {name: start + offset for name, offset in self.offsets.items()}
        self.file.truncate(start + begin)


class SafetensorsWriter:
    """The weights of one model directory. A context manager: leaving it without an error completes them."""

    def __init__(
        self, directory: Path, tensors: Iterable[DeclaredTensor], *, max_file_bytes: int = _MAX_FILE_BYTES
    ) -> None:
        """`tensors`: all that will be written; neighbours share a file."""
        self._directory = directory
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._missing = set(self._tensors)
        self._stack = ExitStack()
        self._file_of: dict[str, _OpenFile] = {}
        shards = _split(self._tensors.values(), max_file_bytes)
        with ExitStack() as stack:
            for number, shard in enumerate(shards, start=1):
                is_single = len(shards) == 1
                name = "model.safetensors" if is_single else f"model-{number:05}-of-{len(shards):05}.safetensors"
                file = _OpenFile(name, shard, stack.enter_context((directory / name).open("xb")))
                file.write_header()
                self._file_of |= {tensor.name: file for tensor in shard}
            self._stack = stack.pop_all()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            self._complete()

    @property
    def size_bytes(self) -> int:
        """Bytes of all declared tensors."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a declared tensor. Raises ValueError for another, or for other dtypes and shapes than declared."""
        declared = self._tensors[name] if name in self._missing else None
        if declared is None or (STORED_DTYPES[declared.dtype], declared.shape) != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} was not declared, or is written twice")
        self._missing.remove(name)
        file = self._file_of[name]
        file.file.seek(file.offsets[name])
        file.file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _complete(self) -> None:
        if self._missing:
            raise ValueError(f"{len(self._missing)} declared tensors were not written, such as {min(self._missing)}")
        weight_map = {name: file.name for name, file in self._file_of.items()}
        if len(set(weight_map.values())) > 1:
            index = {"metadata": {"total_size": self.size_bytes}, "weight_map": weight_map}
            (self._directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _split(tensors: Iterable[DeclaredTensor], max_bytes: int) -> list[list[DeclaredTensor]]:
    """Neighbouring tensors of at most so many bytes together, or one that is larger."""
    shards: list[list[DeclaredTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards
