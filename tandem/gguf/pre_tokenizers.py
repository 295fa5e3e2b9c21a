"""How byte-level tokenizers cut text before they merge, by the names of `tokenizer.ggml.pre`.

The names are llama.cpp's (`src/llama-vocab.cpp`), which a converter finds by encoding a sample text. An entry is what
the `tokenizer.json` of the model has for which the name was made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _REST
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _REST
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """One way to cut text, and what goes with it in the tokenizers that use it."""

    steps: Sequence[dict[str, Any]]
    """As in a tokenizer.json."""
    normalizer: dict[str, Any] | None = None
    ignores_merges: bool = False
    """Whether a piece that is a token itself is not merged from parts."""
    adds_bos: bool = False
    """Whether prompts begin with a token of their own where the file does not say."""


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGITS = {"type": "Digits", "individual_digits": True}
_llama3 = PreTokenizer(steps=(_split(_LLAMA3), _bytes(use_regex=False)), ignores_merges=True, adds_bos=True)
PRE_TOKENIZERS = {
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "falcon3": _llama3,
    "smaug-bpe": PreTokenizer(steps=(_split(_LLAMA3), _bytes(use_regex=False))),
    "qwen2": PreTokenizer(steps=(_split(_QWEN2), _bytes(use_regex=False)), normalizer={"type": "NFC"}),
    "deepseek-r1-qwen": PreTokenizer(steps=(_split(_QWEN2), _bytes(use_regex=False))),
    "seed-coder": PreTokenizer(steps=(_split(_SEED_CODER), _bytes(use_regex=False))),
    "deepseek-coder": PreTokenizer(steps=(*map(_split, _DEEPSEEK_CODER), _DIGITS, _bytes(use_regex=False))),
    "tekken": PreTokenizer(steps=(_split(_TEKKEN), _bytes(use_regex=False)), ignores_merges=True, adds_bos=True),
    "smollm": PreTokenizer(steps=(_DIGITS, _bytes(use_regex=True))),
    "gpt-2": PreTokenizer(steps=(_bytes(use_regex=True),)),
}
