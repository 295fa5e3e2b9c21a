"""Sampling defaults that a model ships in its `generation_config.json`, for fields that a request leaves out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

from tandem.config.source.regular_file import MAX_SMALL_BYTES
from tandem.errors import ConfigError, InvalidRequest
from tandem.model_files import has_model_file, read_model_text
from tandem.values.sampling import BOUNDS, SamplingParams

FILE_NAME = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX_NEW_TOKENS = "max_new_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Values for fields that a client leaves out; empty for a model that ships none."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    """Values by the name of the field."""
    max_tokens: int | None = None
    """Default for the answer in a conversation; a plain prompt keeps OpenAI's own default."""

    def fill(self, sampling: SamplingParams, stated: frozenset[str]) -> SamplingParams:
        """Return `sampling` with the defaults of all fields that are not `stated`."""
        missing: dict[str, Any] = {}
        for name, value in self.sampling.items():
            if name not in stated:
                missing[name] = value
        return sampling._replace(**missing) if missing else sampling

    def to_json(self) -> dict[str, float]:
        """Return all defaults by their names in requests."""
        return {**self.sampling, **({"max_tokens": self.max_tokens} if self.max_tokens is not None else {})}


def load_generation_defaults(directory: Path) -> GenerationDefaults:
    """Load them from a model directory in Hugging Face layout, or a GGUF file; fields of other engines are ignored.

    Raises ConfigError that names the file, the field and its bound.
    """
    path = directory / FILE_NAME
    if not has_model_file(path):
        return GenerationDefaults()
    raw = _read_object(path)
    sampling = {name: value for name in _SAMPLING if (value := _checked(raw, name, name)) is not None}
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    most = _checked(raw, _MAX_NEW_TOKENS, "max_tokens")
    return GenerationDefaults(sampling=sampling, max_tokens=None if most is None else int(most))


def _checked(raw: Mapping[str, Any], name: str, field_name: str) -> float | None:
    """Return a number of the file, checked against the bound of `field_name`; None when it is absent or null."""
    value: float | None = raw.get(name)
    if value is None:
        return None
    try:
        BOUNDS[field_name].check(name, value)
    except InvalidRequest as error:
        raise ConfigError(
            f"{FILE_NAME}: {error.message}, got {value!r:.40} (`model.generation_config: none` ignores its defaults)"
        ) from None
    return value


def _read_object(path: Path) -> dict[str, Any]:
    text = read_model_text(path, max_bytes=MAX_SMALL_BYTES)
    try:
        raw = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise ConfigError(f"{path}: not valid JSON") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must be a JSON object")
    return raw


def _refuse_constant(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")
