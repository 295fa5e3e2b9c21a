"""Directories of LoRA adapters, as PEFT writes them: how one is identified, and read.

Files are identified by what they hold: a router orders an adapter by its digest, so a worker whose files differ refuses
it instead of answering with other weights.
"""

import hashlib
import os
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tandem.adapters.lora_config import ADAPTER_CONFIG, parse_lora_config
from tandem.config.source.regular_file import read_regular_file, read_regular_pieces
from tandem.errors import ConfigError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_ADAPTER_NAME_CHARS = 128
MAX_ADAPTER_RANK = 512
_MAX_WEIGHTS_BYTES = 16 << 30
_LENGTH_BYTES = 8
"""Of a safetensors file: the length of its header."""
_NAME = re.compile(rf"[A-Za-z0-9._:/-]{{1,{MAX_ADAPTER_NAME_CHARS}}}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter that clients may name, and the files that it is made of."""

    name: str
    """What clients put into `model`."""
    path: Path
    """PEFT directory with `adapter_config.json` and `adapter_model.safetensors`."""
    digest: str
    """SHA-256 over both files, as 64 hex digits."""
    num_bytes: int
    """Size of the weights' file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterContent:
    """What the files of an adapter held when they were read."""

    config: bytes
    weights: bytearray
    """Of safetensors; writable because torch wants it so."""
    digest: str
    """As an Adapter's."""


def checked_adapter_name(name: str) -> str:
    """Check the name of an adapter. Raises ValueError."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"an adapter's name must have 1 to {MAX_ADAPTER_NAME_CHARS} characters, only letters, digits and . _ - : /"
        )
    return name


def read_adapter(name: str, path: Path, *, max_rank: int = MAX_ADAPTER_RANK, max_bytes: int | None = None) -> Adapter:
    """Identify an adapter by its files, which are read as a whole. Raises ConfigError as `check_adapter`.

    Whether its weights fit the model is found out where they are loaded.
    """
    try:
        checked_adapter_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    digest, num_bytes = _digest_of(check_adapter(path, max_rank=max_rank, max_bytes=max_bytes)), 0
    for piece in read_regular_pieces(path / ADAPTER_WEIGHTS, max_bytes=_MAX_WEIGHTS_BYTES):
        digest.update(piece)
        num_bytes += len(piece)
    return Adapter(name=name, path=path, digest=digest.hexdigest(), num_bytes=num_bytes)


def check_adapter(path: Path, *, max_rank: int, max_bytes: int | None = None) -> bytes:
    """Check an adapter as far as little of its files says: returns its `adapter_config.json`.

    Raises ConfigError that names the file and the reason: `engine.max_adapter_rank` for a rank above `max_rank`,
    `engine.adapter_bytes` for matrices of more than `max_bytes` in the file.
    """
    config, size = _read_config(path, max_rank), 0

    def check(status: os.stat_result) -> None:
        nonlocal size
        size = status.st_size

    with closing(read_regular_pieces(path / ADAPTER_WEIGHTS, max_bytes=_MAX_WEIGHTS_BYTES, check=check)) as pieces:
        header = next(pieces, b"")[:_LENGTH_BYTES]
    num_bytes = size - _LENGTH_BYTES - int.from_bytes(header, "little")
    if max_bytes is not None and num_bytes > max_bytes:
        raise ConfigError(
            f"{path / ADAPTER_WEIGHTS} has matrices of {num_bytes} bytes, engine.adapter_bytes admits {max_bytes}"
        )
    return config


def read_adapter_content(path: Path, *, max_bytes: int) -> AdapterContent:
    """Read the files of an adapter into memory: what is used later is what was identified, whatever becomes of them.

    `max_bytes`: of the weights. Raises UnreadableFile for a file that is missing or larger.
    """
    config = read_regular_file(path / ADAPTER_CONFIG)
    digest, weights = _digest_of(config), bytearray()
    for piece in read_regular_pieces(path / ADAPTER_WEIGHTS, max_bytes=max_bytes):
        digest.update(piece)
        weights += piece
    return AdapterContent(config=config, weights=weights, digest=digest.hexdigest())


def _read_config(path: Path, max_rank: int) -> bytes:
    text = read_regular_file(path / ADAPTER_CONFIG)
    try:
        config = parse_lora_config(text)
    except ConfigError as error:
        raise ConfigError(f"{path}/{error}") from None
    for field, rank in config.ranks.items():
        if rank > max_rank:
            raise ConfigError(f"{path / ADAPTER_CONFIG}: {field} is {rank}, and engine.max_adapter_rank {max_rank}")
    return text


def _digest_of(config: bytes) -> "hashlib._Hash":
    """The digest before the weights. The length first: otherwise a byte might move from one file to the other."""
    return hashlib.sha256(len(config).to_bytes(8) + config)
