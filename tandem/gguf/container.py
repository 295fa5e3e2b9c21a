"""Reads the header of GGUF files, version 2 and 3, with every count and length checked before it is used.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): the magic, a version, the numbers of tensors and of
metadata; then metadata, key, type, value; then each tensor's name, sizes with the innermost first, type, and offset
from the start of the data, which begins at the next multiple of the alignment. All numbers are little-endian. The
`gguf` package reads such files as well, but trusts lengths: an array may claim to have 2⁶³ elements.
"""

import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from tandem.errors import ConfigError

MIN_BYTES = 24
"""Size of the shortest file: magic, version and two counts."""
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_METADATA = 2**16
_MAX_TENSORS = 2**20
_MAX_NAME_BYTES = 1024
_MAX_TEXT_BYTES = 2**26
_MAX_ELEMENTS = 2**22
"""Of an array that is decoded: no vocabulary and no list of merges is near it."""
_MAX_ELEMENT_BYTES = 2**16
_MAX_DIMS = 4
_MAX_DEPTH = 4
_MAX_ALIGNMENT = 2**20
_DEFAULT_ALIGNMENT = 32
_FLOAT32, _BOOL, _TEXT, _ARRAY = 6, 7, 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_SCALAR_BYTES = {kind: struct.calcsize(code) for kind, code in _SCALARS.items()}
_SIZE = struct.Struct("<Q")
_OPEN_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArray:
    """Position, type and length of an array in the metadata."""

    kind: int
    """Type of its elements, as numbered in the format."""
    count: int
    begin: int


Scalar = int | float | bool | str


class GgufHeader:
    """Checked metadata and tensors of one mapped file. Every error names the file and the key or tensor."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        """`data`: the whole file; arrays and tensors are read from it later. `name`: of the file, for errors.

        Raises ConfigError for a file that is damaged, or that has tensors of types that are not read.
        """
        self.name = name
        self._data = data
        cursor = _Cursor(data, name)
        version = cursor.start()
        if version not in _VERSIONS:
            raise ConfigError(f"{name}: version must be one of {_VERSIONS}, in little-endian order, got {version}")
        num_tensors = cursor.count("tensors", _MAX_TENSORS)
        num_metadata = cursor.count("entries of metadata", _MAX_METADATA)
        found: dict[str, Scalar | GgufArray] = {}
        for _ in range(num_metadata):
            key = cursor.text(_MAX_NAME_BYTES)
            if key in found:
                raise ConfigError(f"{name}: {key!r:.120} appears twice")
            found[key] = cursor.value(cursor.unsigned(4))
        self.metadata: Mapping[str, Scalar | GgufArray] = found
        tensors = [cursor.tensor() for _ in range(num_tensors)]
        alignment = self.integer("general.alignment", _DEFAULT_ALIGNMENT, low=1, high=_MAX_ALIGNMENT)
        start = -(-cursor.position // alignment) * alignment
        self.tensors: Mapping[str, GgufTensor] = _placed(tensors, start, len(data), name)

    def has(self, key: str) -> bool:
        return key in self.metadata

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**31 - 1) -> int:
        """An integer in [low, high]; `default` stands in for one that is absent."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"must be an integer in [{low}, {high}], is {_quoted(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number; `default` stands in for one that is absent."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(key, f"must be a finite number, is {_quoted(value)}")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        """A truth value; `default` stands in for one that is absent."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, is {_quoted(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text; `default` stands in for one that is absent."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"must be a text, is {_quoted(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """All elements of an array of texts."""
        array = self._array(key)
        if array.kind != _TEXT:
            raise self.error(key, "must be an array of texts")
        stored: list[bytes] = []
        position = array.begin
        for _ in range(array.count):  # they were found to lie in the file
            (size,) = _SIZE.unpack_from(self._data, position)
            if size > _MAX_ELEMENT_BYTES:
                raise self.error(key, f"has a string of {size} bytes; at most {_MAX_ELEMENT_BYTES} are supported")
            position += _SIZE.size + size
            stored.append(self._data[position - size : position])
        try:
            return [text.decode() for text in stored]
        except UnicodeDecodeError as error:
            raise self.error(key, "has a text that is not UTF-8") from error

    def numbers(self, key: str) -> Sequence[float]:
        """All elements of an array of numbers."""
        array = self._array(key)
        if array.kind not in _SCALARS or array.kind == _BOOL:
            raise self.error(key, "must be an array of numbers")
        code = f"<{array.count}{_SCALARS[array.kind][1]}"
        return struct.unpack_from(code, self._data, array.begin)

    def floats(self, tensor: GgufTensor) -> Sequence[float]:
        """All values of a small tensor of type F32."""
        count = prod(tensor.shape)
        if tensor.block_type.name != "F32" or count > _MAX_ELEMENTS:
            raise ConfigError(f"{self.name}: {tensor.name} must be F32, and at most {_MAX_ELEMENTS} values")
        return tuple(map(_shortest, struct.unpack_from(f"<{count}f", self._data, tensor.begin)))

    def error(self, key: str, problem: str) -> ConfigError:
        """The error to raise about a key."""
        return ConfigError(f"{self.name}: {key} {problem}")

    def _value(self, key: str, default: Scalar | None) -> Scalar | GgufArray:
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def _array(self, key: str) -> GgufArray:
        array = self._value(key, None)
        if not isinstance(array, GgufArray):
            raise self.error(key, f"must be an array, is {_quoted(array)}")
        if array.count > _MAX_ELEMENTS:
            raise self.error(key, f"has {array.count} elements; at most {_MAX_ELEMENTS} are supported")
        return array


@contextmanager
def open_header(path: Path) -> Iterator[GgufHeader]:
    """Read a file's header; its arrays may be read within the context.

    Raises ConfigError for anything but a regular file, and as GgufHeader does.
    """
    try:
        fd = os.open(path, _OPEN_FLAGS)  # opening a FIFO would wait for a writer
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: not a regular file")
        if status.st_size < MIN_BYTES:
            raise ConfigError(f"{path.name}: too short to be a GGUF file")
        data = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    with data:
        yield GgufHeader(data, path.name)


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

    def count(self, what: str, most: int) -> int:
        if (count := self.unsigned(8)) > most:
            raise ConfigError(f"{self._where}: has {count} {what}; at most {most} are supported")
        return count

    def unsigned(self, num_bytes: int) -> int:
        return int.from_bytes(self._bytes(num_bytes), "little")

    def text(self, most: int) -> str:
        size = self.unsigned(8)
        if size > most:
            raise ConfigError(f"{self._where}: a string has {size} bytes; at most {most} are supported")
        try:
            return self._bytes(size).decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._where}: a string is not UTF-8") from error

    def value(self, kind: int) -> Scalar | GgufArray:
        if kind == _TEXT:
            return self.text(_MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(depth=0)
        if kind not in _SCALARS:
            raise ConfigError(f"{self._where}: a value has unknown type {kind}")
        number: int | float = struct.unpack(_SCALARS[kind], self._bytes(_SCALAR_BYTES[kind]))[0]
        if kind == _BOOL:
            return bool(number)
        return _shortest(number) if kind == _FLOAT32 else number

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape with rows first, type and offset."""
        name = self.text(_MAX_NAME_BYTES)
        num_dims = self.unsigned(4)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ConfigError(f"{self._where}: tensor {name!r:.120} has {num_dims} dimensions")
        shape = tuple(self.unsigned(8) for _ in range(num_dims))[::-1]
        return name, shape, self.unsigned(4), self.unsigned(8)

    def _array(self, depth: int) -> GgufArray:
        """Skip an array, so that it may be read later."""
        if depth == _MAX_DEPTH:
            raise ConfigError(f"{self._where}: arrays are nested more than {_MAX_DEPTH} deep")
        kind, count = self.unsigned(4), self.unsigned(8)
        array = GgufArray(kind=kind, count=count, begin=self.position)
        if kind in _SCALARS:
            self._skip(count * _SCALAR_BYTES[kind])
        elif kind == _TEXT:
            self._skip_texts(count)
        elif kind == _ARRAY:
            for _ in range(count):  # each takes at least twelve bytes
                self._array(depth + 1)
        else:
            raise ConfigError(f"{self._where}: an array has elements of unknown type {kind}")
        return array

    def _skip_texts(self, count: int) -> None:
        """Skip texts of an array. A vocabulary and its merges are half a million of them, so this is one plain loop."""
        data, position = self._data, self.position
        last = len(data) - _SIZE.size
        for _ in range(count):
            if position > last:
                break
            position += _SIZE.size + _SIZE.unpack_from(data, position)[0]
        else:
            self._skip(position - self.position)
            return
        raise ConfigError(f"{self._where}: ends within its header")

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
            raise ConfigError(f"{label} appears twice")
        if number not in BLOCK_TYPES:
            supported = ", ".join(block_type.name for block_type in BLOCK_TYPES.values())
            raise ConfigError(f"{label} has ggml type {number}; supported are {supported}")
        block_type = BLOCK_TYPES[number]
        if not all(shape) or shape[-1] % block_type.num_values:
            raise ConfigError(f"{label} has shape {list(shape)}: rows must be whole blocks of {block_type.num_values}")
        begin = start + offset
        end = begin + prod(shape) // block_type.num_values * block_type.num_bytes
        if end > size:
            raise ConfigError(f"{label} ends at byte {end}, but the file has {size} bytes")
        tensors[name] = GgufTensor(name=name, block_type=block_type, shape=shape, begin=begin, end=end)
    for one, other in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.begin)):
        if one.end > other.begin:
            raise ConfigError(f"{where}: tensor {other.name!r:.120} overlaps another tensor")
    return tensors


def _shortest(number: float) -> float:
    """The shortest decimal that is this float32: 1e-05 as it was before it was rounded, not 9.999999747e-06."""
    if not math.isfinite(number):
        return number
    stored = struct.pack("<f", number)
    for num_digits in range(1, 9):
        decimal = float(f"{number:.{num_digits}g}")
        if abs(decimal) < 3e38 and struct.pack("<f", decimal) == stored:
            return decimal
    return number


def _quoted(value: object) -> str:
    return "an array" if isinstance(value, GgufArray) else f"{value!r:.40}"
