"""Reads safetensors checkpoints: one file, or shards named by an index; memory-mapped, never unpickled.

Format (https://github.com/huggingface/safetensors): eight bytes of little-endian header length, a JSON header
`{name: {dtype, shape, data_offsets}}`, then the data. A header is trusted only after its length, every shape,
and the exact, gapless, non-overlapping cover of the data have been checked, so no later step can read out of bounds
or allocate more than the files hold.
"""

import hashlib
import json
import math
import mmap
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor

from engine.model.checkpoints.mapped_file import HeldFile, MappedFile
from engine.model.files import ModelDirectory
from engine.model.shard import TensorSlice
from engine.model.spec import ModelSpec
from tandem.errors import ConfigError
from tandem.model_files import parse_json_object

MAX_HEADER_BYTES = 100 * 2**20
"""Largest header that the format permits."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LENGTH_BYTES = 8
_EMBEDDING = "embed_tokens.weight"
_PREFIX = "model."
_HEADS = ("lm_head.", "score.")
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
STORED_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    # Parts of quantized matrices.
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in STORED_DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Position, dtype and shape of a tensor in its file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset from the start of the file."""
    end: int


class SafetensorsFile:
    """One checked file: memory-mapped, or read into memory."""

    def __init__(self, file: MappedFile | HeldFile) -> None:
        """Raises ConfigError for what is wrong with its header."""
        self._file = file
        self.name = file.name
        self.entries = _parse_header(file.data, file.name)

    @classmethod
    def mapped(cls, path: Path) -> "SafetensorsFile":
        """Map a file. Raises ConfigError."""
        return cls(MappedFile(path, kind="safetensors", min_bytes=_LENGTH_BYTES))

    @classmethod
    def held(cls, data: bytearray, name: str) -> "SafetensorsFile":
        """A file that was read; its tensors are valid for as long as they are kept. Raises ConfigError."""
        return cls(HeldFile(data, name=name, kind="safetensors", min_bytes=_LENGTH_BYTES))

    def tensor(self, entry: TensorEntry, part: TensorSlice | None = None) -> Tensor:
        """The stored tensor, or a part of its rows or columns, without a copy; valid until `close`."""
        dtype, item_bytes = STORED_DTYPES[entry.dtype], _ITEM_BYTES[entry.dtype]
        if entry.begin == entry.end or (part is not None and part.begin == part.end):
            return torch.empty(entry.shape if part is None else part.shape(entry.shape), dtype=dtype)
        *outer, inner = entry.shape or (1,)
        raw = self._file.raw(entry.begin, entry.end).view(*outer, inner * item_bytes)
        if part is not None:
            unit = item_bytes if part.dim == len(outer) else 1
            raw = raw.narrow(part.dim, part.begin * unit, (part.end - part.begin) * unit)
        if entry.begin % item_bytes:
            raw = raw.clone(memory_format=torch.contiguous_format)
        return raw.view(dtype) if entry.shape else raw.view(dtype).view(())

    def forget(self, entry: TensorEntry) -> None:
        """Release the memory of a tensor that has been copied; see MappedFile."""
        self._file.forget(entry.begin, entry.end)

    def sample(self, entry: TensorEntry) -> bytes:
        """A few of the tensor's bytes: from its beginning, middle and end."""
        return self._file.sample(entry.begin, entry.end)

    def close(self) -> None:
        """Unmap the file; tensors made from it must no longer be used."""
        self._file.close()


class Checkpoint:
    """All tensors of a model directory by name. A context manager: leaving it unmaps the files."""

    def __init__(self, directory: ModelDirectory) -> None:
        self._files: list[SafetensorsFile] = []
        self._by_name: dict[str, tuple[SafetensorsFile, TensorEntry]] = {}
        try:
            for name, expected in _shards(directory).items():
                self._add(SafetensorsFile.mapped(directory.resolve(name)), expected)
            self._add_prefix()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> frozenset[str]:
        """Names of all tensors."""
        return frozenset(self._by_name)

    @property
    def entries(self) -> dict[str, TensorEntry]:
        """Position, dtype and shape of all tensors, by name."""
        return {name: entry for name, (_, entry) in self._by_name.items()}

    @property
    def summary(self) -> None:
        """Nothing is restored; see CheckpointSource."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.end - entry.begin for _, entry in self._by_name.values())

    @property
    def main_dtype(self) -> str:
        """Dtype in which most of the values are stored that are not quantized, by its name in `config.json`."""
        values: Counter[str] = Counter()
        for _, entry in self._by_name.values():
            if entry.dtype in _NAMES:
                values[entry.dtype] += math.prod(entry.shape)
        return _NAMES[max(sorted(values), key=values.__getitem__, default="F32")]

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor exists with this shape, in a dtype of weights; ConfigError otherwise."""
        self.require_stored(name, tuple(_NAMES), (shape,))

    def require_stored(self, name: str, dtypes: Collection[str], shapes: Sequence[tuple[int, ...]]) -> None:
        """Check that a tensor exists in one of these dtypes and shapes; ConfigError otherwise."""
        if name not in self._by_name:
            raise ConfigError(f"checkpoint: tensor {name} is missing")
        entry = self._by_name[name][1]
        if entry.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ConfigError(f"checkpoint: {name} has shape {list(entry.shape)}, config.json implies {wanted}")
        if entry.dtype not in dtypes:
            raise ConfigError(f"checkpoint: {name} is stored as {entry.dtype}, not as {' or '.join(dtypes)}")

    def tensor(self, name: str, part: TensorSlice | None = None) -> Tensor:
        """The stored tensor, or a part of it, without a copy. Raises KeyError for a name that does not exist."""
        file, entry = self._by_name[name]
        return file.tensor(entry, part)

    def matrix(self, name: str, part: TensorSlice | None = None) -> None:
        """Return None: everything is dense; see TensorSource."""

    def forget(self, name: str) -> None:
        """Release the memory of a tensor that has been copied; see SafetensorsFile."""
        file, entry = self._by_name[name]
        file.forget(entry)

    def fingerprint(self, config: ModelSpec) -> str:
        """Name of this model's computation: equal for equal content, regardless of shards and location.

        Covers the configuration, every tensor's name, dtype and shape, and up to 12 KiB of each tensor's bytes.
        """
        digest = hashlib.sha256(config.digest())
        for name in sorted(self._by_name):
            file, entry = self._by_name[name]
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode())
            digest.update(file.sample(entry))
        return digest.hexdigest()[:32]

    def close(self) -> None:
        self._by_name.clear()
        for file in self._files:
            file.close()
        self._files.clear()

    def _add(self, file: SafetensorsFile, expected: frozenset[str] | None) -> None:
        self._files.append(file)
        for entry in file.entries:
            if entry.name in self._by_name:
                raise ConfigError(f"checkpoint: tensor {entry.name} is in more than one shard")
            self._by_name[entry.name] = (file, entry)
        missing = (expected or frozenset()) - {entry.name for entry in file.entries}
        if missing:
            raise ConfigError(f"{_INDEX}: {min(missing)} is not in {file.name}, though the index says so")

    def _add_prefix(self) -> None:
        """Name the tensors of a decoder that was saved without its output head, as embedding models are, as with it."""
        if _EMBEDDING in self._by_name:
            self._by_name = {
                name if name.startswith(_HEADS) else _PREFIX + name: found for name, found in self._by_name.items()
            }


def _shards(directory: ModelDirectory) -> dict[str, frozenset[str] | None]:
    """File names of the checkpoint, each with the tensors that the index lists for it (None: no index)."""
    if directory.has(_SINGLE):
        return {_SINGLE: None}
    if not directory.has(_INDEX):
        pickled = directory.names(".bin") + directory.names(".pth") + directory.names(".pt")
        if pickled:
            raise ConfigError(f"only pickled weights ({pickled[0]}): convert them to safetensors first")
        raise ConfigError(f"model directory: neither {_SINGLE} nor {_INDEX} exists")
    weight_map = directory.read_json(_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{_INDEX}: weight_map must be a non-empty object")
    shards: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise ConfigError(f"{_INDEX}: weight_map of {tensor!r:.80} must name a .safetensors file")
        shards.setdefault(file, set()).add(tensor)
    return {file: frozenset(tensors) for file, tensors in sorted(shards.items())}


def _parse_header(data: mmap.mmap | bytearray, where: str) -> list[TensorEntry]:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > min(MAX_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise ConfigError(f"{where}: header length {length} exceeds the file or {MAX_HEADER_BYTES}")
    start = _LENGTH_BYTES + length
    header = parse_json_object(bytes(data[_LENGTH_BYTES:start]), f"{where}: header")
    header.pop("__metadata__", None)
    entries = sorted(
        (_parse_entry(name, value, start, where) for name, value in header.items()),
        key=lambda entry: (entry.begin, entry.end),
    )
    _check_cover(entries, start, len(data), where)
    return entries


def _parse_entry(name: str, value: Any, start: int, where: str) -> TensorEntry:
    label = f"{where}: tensor {name!r:.120}"
    if not isinstance(value, dict):
        raise ConfigError(f"{label} must be an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in STORED_DTYPES:
        raise ConfigError(f"{label}: dtype must be one of {', '.join(STORED_DTYPES)}, is {dtype!r:.40}")
    if not _naturals(shape) or len(shape) > 8:
        raise ConfigError(f"{label}: shape must be a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ConfigError(f"{label}: data_offsets must be [begin, end]")
    begin, end = offsets
    if end - begin != math.prod(shape) * _ITEM_BYTES[dtype]:
        raise ConfigError(f"{label}: data_offsets do not fit its shape and dtype")
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), begin=start + begin, end=start + end)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**62 for item in value
    )


def _check_cover(entries: Iterable[TensorEntry], start: int, size: int, where: str) -> None:
    position = start
    for entry in entries:
        if entry.begin != position:
            problem = "overlaps another tensor" if entry.begin < position else "leaves a gap before it"
            raise ConfigError(f"{where}: tensor {entry.name!r:.120} {problem}")
        position = entry.end
    if position != size:
        raise ConfigError(f"{where}: tensors end at byte {position}, the file at {size}")
