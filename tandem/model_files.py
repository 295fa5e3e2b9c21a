"""The small files of a model: of a directory in Hugging Face layout, or made of what a GGUF file holds.

A GGUF file is read like a directory: `model.gguf/config.json` is what a `config.json` would say of that model. Every
process that reads such a file makes it, when it reads it. Nothing is written to a disk, so nothing has to be locked,
renewed or cleaned up there, and a model may lie on a read-only file system.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.config.source.regular_file import read_regular_file
from tandem.errors import ConfigError
from tandem.gguf.architecture import config_json, generation_config_json
from tandem.gguf.container import GgufHeader, open_header
from tandem.gguf.tokenizer import tokenizer_config_json, tokenizer_json

GGUF_SUFFIX = ".gguf"
_MADE: dict[str, Callable[[GgufHeader], dict[str, Any]]] = {
    "config.json": config_json,
    "generation_config.json": generation_config_json,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config_json,
}


def is_gguf_file(model: Path) -> bool:
    """Whether a model is one GGUF file, not a directory."""
    return model.suffix == GGUF_SUFFIX and model.is_file()


def check_gguf_file(model: Path) -> None:
    """Make all files of a GGUF file once. Raises ConfigError for what cannot be served."""
    with open_header(model) as header:
        for make in _MADE.values():
            make(header)


def has_model_file(path: Path) -> bool:
    """Whether a model has this file, whatever it holds. Raises ConfigError where that cannot be found out."""
    if is_gguf_file(path.parent):
        return path.name in _MADE
    try:
        path.stat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    return True


def read_model_file(path: Path, *, max_bytes: int) -> bytes:
    """Read a small file of a model, or make it of the GGUF file that `path` leads into.

    Raises ConfigError, UnreadableFile where there is no such file.
    """
    if not is_gguf_file(path.parent):
        return read_regular_file(path, max_bytes=max_bytes)
    if path.name not in _MADE:
        raise ConfigError(f"{path.parent} has no {path.name}")
    with open_header(path.parent) as header:
        made = json.dumps(_MADE[path.name](header), ensure_ascii=False, allow_nan=False).encode()
    if len(made) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes} bytes")
    return made


def read_model_text(path: Path, *, max_bytes: int) -> str:
    """Read such a file as text. Raises as `read_model_file`, and ConfigError for bytes that are not UTF-8."""
    try:
        return read_model_file(path, max_bytes=max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 (byte {error.start})") from None


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """Decode one JSON object strictly: no NaN, no duplicate keys, no bottomless nesting. Raises ConfigError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ConfigError(f"{where}: an object has duplicate keys")
        return result

    def refuse(constant: str) -> Any:
        raise ConfigError(f"{where}: {constant} is not JSON")

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {type(error).__name__}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a JSON object")
    return value
