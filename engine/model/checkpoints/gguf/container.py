"""Reads the container of GGUF files, version 2 and 3: memory-mapped, with every length checked before it is used.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): the magic, a version, the numbers of tensors and of
metadata; then metadata, key, type, value; then each tensor's name, sizes with the innermost first, type, and offset
from the start of the data, which begins at the next multiple of the alignment. All numbers are little-endian. The
`gguf` package reads such files as well, but trusts lengths: an array may claim to have 2⁶³ elements.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from torch import Tensor

from engine.model.checkpoints.mapped_file import MappedFile
from tandem.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_HEADER_BYTES = 24
_MAX_NAME_BYTES = 1024
_MAX_TEXT_BYTES = 2**26
_MAX_DIMS = 4
_MAX_DEPTH = 4
_MAX_ALIGNMENT = 2**20
_DEFAULT_ALIGNMENT = 32
_TEXT, _ARRAY = 8, 9
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """A type of stored values: blocks of a fixed number of them, in a fixed number of bytes."""

    name: str
    num_values: int
    num_bytes: int


BLOCK_TYPES = {
    number: BlockType(name=name, num_values=num_values, num_bytes=num_bytes)
    for number, name, num_values, num_bytes in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (20, "IQ4_NL", 32, 18),
        (30, "BF16", 1, 2),
    )
}
"""The types that are read, by their numbers in ggml."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Position, type and shape of a tensor in its file."""

    name: str
    block_type: BlockType
    shape: tuple[int, ...]
    """Rows first, as everywhere but in the file."""
    begin: int
    """Offset from the start of the file."""
    end: int


class GgufFile:
    """One checked, memory-mapped file."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that is damaged, or that has tensors of types that are not read."""
        self._file = MappedFile(path, kind="GGUF", min_bytes=_HEADER_BYTES)
        self.name = path.name
        cursor = _Cursor(self._file.data, self.name)
        version = cursor.start()
        if version not in _VERSIONS:
            raise ConfigError(f"{self.name}: version must be one of {_VERSIONS}, in little-endian order, is {version}")
        num_tensors, num_metadata = cursor.unsigned(8), cursor.unsigned(8)
        self.metadata: dict[str, int | str] = {}
        """Unsigned integers and texts of the metadata; other kinds are skipped."""
        for _ in range(num_metadata):
            key = cursor.text(_MAX_NAME_BYTES)
            if (value := cursor.value(cursor.unsigned(4), depth=0)) is not None:
                self.metadata[key] = value
        found = [cursor.tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ConfigError(f"{self.name}: general.alignment must be an integer in [1, {_MAX_ALIGNMENT}]")
        start = -(-cursor.position // alignment) * alignment
        self.tensors = _placed(found, start, len(self._file.data), self.name)

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


class _Cursor:
    """Reads the beginning of a file, never past its end."""

    def __init__(self, data: mmap.mmap, where: str) -> None:
        self._data = data
        self._where = where
        self.position = 0

    def start(self) -> int:
        """Check the magic. Returns the version."""
        if self._bytes(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{self._where}: not a GGUF file")
        return self.unsigned(4)

    def unsigned(self, num_bytes: int) -> int:
        return int.from_bytes(self._bytes(num_bytes), "little")

    def text(self, most: int) -> str:
        size = self.unsigned(8)
        if size > most:
            raise ConfigError(f"{self._where}: a text has {size} bytes, at most {most} are read")
        try:
            return self._bytes(size).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._where}: a text is not UTF-8") from error

    def value(self, kind: int, *, depth: int) -> int | str | None:
        """One value of metadata; None for what is neither an unsigned integer nor a text."""
        if kind == _TEXT:
            return self.text(_MAX_TEXT_BYTES)
        if kind == _ARRAY:
            self._skip_array(depth)
            return None
        if kind not in _SCALAR_BYTES:
            raise ConfigError(f"{self._where}: a value has unknown type {kind}")
        number = self.unsigned(_SCALAR_BYTES[kind])
        return number if kind in (0, 2, 4, 10) else None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape with rows first, type and offset."""
        name = self.text(_MAX_NAME_BYTES)
        num_dims = self.unsigned(4)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ConfigError(f"{self._where}: tensor {name!r:.120} has {num_dims} dimensions")
        shape = tuple(self.unsigned(8) for _ in range(num_dims))[::-1]
        return name, shape, self.unsigned(4), self.unsigned(8)

    def _skip_array(self, depth: int) -> None:
        if depth == _MAX_DEPTH:
            raise ConfigError(f"{self._where}: arrays are nested more than {_MAX_DEPTH} deep")
        kind, count = self.unsigned(4), self.unsigned(8)
        if kind in _SCALAR_BYTES:
            self._skip(count * _SCALAR_BYTES[kind])
            return
        for _ in range(count):  # each takes at least eight bytes
            if kind == _TEXT:
                self._skip(self.unsigned(8))
            else:
                self.value(kind, depth=depth + 1)

    def _bytes(self, count: int) -> bytes:
        begin = self.position
        self._skip(count)
        return self._data[begin : self.position]

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self.position:
            raise ConfigError(f"{self._where}: ends within its header")
        self.position += count


def _placed(
    found: Sequence[tuple[str, tuple[int, ...], int, int]], start: int, size: int, where: str
) -> dict[str, GgufTensor]:
    """Check that all tensors lie in the file, apart from each other."""
    tensors: dict[str, GgufTensor] = {}
    for name, shape, number, offset in found:
        label = f"{where}: tensor {name!r:.120}"
        if name in tensors:
            raise ConfigError(f"{label} is there twice")
        if number not in BLOCK_TYPES:
            supported = ", ".join(block_type.name for block_type in BLOCK_TYPES.values())
            raise ConfigError(f"{label} has type {number} of ggml; {supported} are read")
        block_type = BLOCK_TYPES[number]
        if not all(shape) or shape[-1] % block_type.num_values:
            raise ConfigError(f"{label} has shape {list(shape)}, rows must be whole blocks of {block_type.num_values}")
        begin = start + offset
        end = begin + prod(shape) // block_type.num_values * block_type.num_bytes
        if end > size:
            raise ConfigError(f"{label} ends at byte {end}, the file at {size}")
        tensors[name] = GgufTensor(name=name, block_type=block_type, shape=shape, begin=begin, end=end)
    for one, other in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.begin)):
        if one.end > other.begin:
            raise ConfigError(f"{where}: tensor {other.name!r:.120} overlaps another tensor")
    return tensors
