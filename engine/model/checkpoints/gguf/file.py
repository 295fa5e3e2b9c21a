"""A GGUF file whose tensors are read: its header, and the bytes of its tensors, memory-mapped."""

from math import prod
from pathlib import Path

from torch import Tensor

from engine.model.checkpoints.mapped_file import MappedFile
from tandem.gguf.container import MIN_BYTES, GgufHeader, GgufTensor


class GgufFile:
    """One checked, memory-mapped file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is damaged, or that has tensors of types that are not read."""
        self._file = MappedFile(path, kind="GGUF", min_bytes=MIN_BYTES)
        self.header = GgufHeader(self._file.mapping, path.name)

    @property
    def name(self) -> str:
        return self.header.name

    def raw(self, tensor: GgufTensor) -> Tensor:
        """The stored bytes, uint8 `[rows, bytes of a row]`, without a copy; valid until `close`."""
        rows = prod(tensor.shape[:-1])
        return self._file.raw(tensor.begin, tensor.end).view(rows, -1)

    def forget(self, tensor: GgufTensor) -> None:
        """Release the memory of a tensor that has been copied; see MappedFile."""
        self._file.forget(tensor.begin, tensor.end)

    def sample(self, tensor: GgufTensor) -> bytes:
        """A few of the tensor's bytes: from its beginning, middle and end."""
        return self._file.sample(tensor.begin, tensor.end)

    def close(self) -> None:
        """Unmap the file; tensors made from it must no longer be used."""
        self._file.close()
