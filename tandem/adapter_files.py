"""Directories of LoRA adapters, as PEFT writes them: what a router and a worker have to know of one before it is read.

Files are identified by what they hold: a router orders an adapter by its digest, so a worker whose files differ refuses
it instead of answering with other weights.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.source.regular_file import read_regular_file, read_regular_pieces
from tandem.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAX_ADAPTER_NAME_CHARS = 128
MAX_ADAPTER_RANK = 512
_MAX_WEIGHTS_BYTES = 16 << 30
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


def checked_adapter_name(name: str) -> str:
    """Check the name of an adapter. Raises ValueError."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"an adapter's name must have 1 to {MAX_ADAPTER_NAME_CHARS} characters, only letters, digits and . _ - : /"
        )
    return name


def read_adapter(name: str, path: Path) -> Adapter:
    """Identify an adapter by its files, which are read as a whole. Raises ConfigError that names the file and the
    reason.

    Whether its weights fit the model is found out where they are loaded.
    """
    try:
        checked_adapter_name(name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    config = read_regular_file(path / ADAPTER_CONFIG)
    _parse_config(path, config)
    # The length first: otherwise a byte might move from one file to the other unnoticed.
    digest, num_bytes = hashlib.sha256(len(config).to_bytes(8) + config), 0
    for piece in read_regular_pieces(path / ADAPTER_WEIGHTS, max_bytes=_MAX_WEIGHTS_BYTES):
        digest.update(piece)
        num_bytes += len(piece)
    return Adapter(name=name, path=path, digest=digest.hexdigest(), num_bytes=num_bytes)


def check_adapter_rank(path: Path, max_rank: int) -> None:
    """Check what an adapter's `adapter_config.json` says of its rank: a small file, whatever the weights' size.

    Raises ConfigError that names the file, and `engine.max_adapter_rank` where the rank is higher.
    """
    parsed = _parse_config(path, read_regular_file(path / ADAPTER_CONFIG))
    patterns = parsed.get("rank_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{path / ADAPTER_CONFIG}: rank_pattern must be an object")
    ranks = {"r": parsed.get("r")} | {f"rank_pattern.{module}": rank for module, rank in patterns.items()}
    for field, rank in ranks.items():
        if type(rank) is not int or rank < 1:
            raise ConfigError(f"{path / ADAPTER_CONFIG}: {field} must be an integer of at least 1, got {rank!r}")
        if rank > max_rank:
            raise ConfigError(f"{path / ADAPTER_CONFIG}: {field} is {rank}, and engine.max_adapter_rank {max_rank}")


def _parse_config(path: Path, config: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path / ADAPTER_CONFIG}: not JSON ({error})") from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{path / ADAPTER_CONFIG}: not a JSON object")
    if (kind := parsed.get("peft_type")) != "LORA":
        raise ConfigError(f"{path / ADAPTER_CONFIG}: peft_type must be LORA, got {kind!r}")
    return parsed
