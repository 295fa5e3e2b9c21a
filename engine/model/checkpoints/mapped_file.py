"""A file of weights: mapped, so that bytes come without a copy and go once they have been used; or read into memory."""

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from tandem.errors import ConfigError

_SAMPLE_BYTES = 4096


class HeldFile:
    """A file that was read into memory, whatever becomes of it on its disk."""

    def __init__(self, data: mmap.mmap | bytearray, *, name: str, kind: str, min_bytes: int) -> None:
        """`kind`: for errors, what it should be. Raises ConfigError for fewer bytes than `min_bytes`, at least one."""
        if len(data) < min_bytes:
            raise ConfigError(f"{name}: too short to be a {kind} file")
        self.name = name
        self.data = data

    def raw(self, begin: int, end: int) -> Tensor:
        """The bytes of a range that is not empty, uint8, without a copy; valid until `close`."""
        return torch.frombuffer(self.data, dtype=torch.uint8, offset=begin, count=end - begin)

    def forget(self, begin: int, end: int) -> None:
        """Release the memory of a range that has been copied, where it can be had again."""

    def sample(self, begin: int, end: int) -> bytes:
        """A few of a range's bytes: from its beginning, middle and end."""
        size = end - begin
        if size <= 3 * _SAMPLE_BYTES:
            return bytes(self.data[begin:end])
        starts = (begin, begin + size // 2, end - _SAMPLE_BYTES)
        sampled = b"".join(self.data[start : start + _SAMPLE_BYTES] for start in starts)
        self.forget(begin, end)  # reading a page brings its neighbours into memory
        return sampled

    def close(self) -> None:
        """Release what the system gave; tensors made from it must no longer be used."""


class MappedFile(HeldFile):
    """A private mapping of a whole file."""

    def __init__(self, path: Path, *, kind: str, min_bytes: int) -> None:
        """Raises ConfigError as HeldFile."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < min_bytes:  # a mapping of nothing cannot be made
                raise ConfigError(f"{path.name}: too short to be a {kind} file")
            # A private mapping: torch wants writable memory, and nothing here ever writes to it.
            self.mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        super().__init__(self.mapping, name=path.name, kind=kind, min_bytes=min_bytes)

    def forget(self, begin: int, end: int) -> None:
        """Release the memory of a range that has been copied; reading it again reads the file again.

        Mapped pages count as this process's memory: without this, loading takes every weight twice.
        """
        if hasattr(mmap, "MADV_DONTNEED") and begin < end:
            first = begin - begin % mmap.PAGESIZE
            self.mapping.madvise(mmap.MADV_DONTNEED, first, end - first)

    def close(self) -> None:
        """Unmap the file; tensors made from it must no longer be used."""
        self.mapping.close()
