"""The steps of a tokenizer's decoder, each as a machine that reads tokens one by one: for every decoder that the
`tokenizers` library supports and `router.text.detokenizer` has no faster way for.

A decoder is a chain of steps from a list of tokens to a list of tokens, whose texts are finally joined. What a step
makes of a token mostly depends on that token and on whether it is the first: such a step asks the library once for each
token. `Fuse` and `ByteLevel` join all tokens into one, and the steps after them work on a text that is still growing:
there each step holds back only what later text may change. Only what depends on the whole text (a regular expression
after `Fuse`) is held to the end.
"""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import tokenizers

from tandem.errors import ConfigError

_BEFORE, _BEHIND = "\ufdd0", "\ufdd1"
"""Dummy characters around a token, which no step changes."""
_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""Replacements by `cleanup` of WordPiece and CTC, in this order."""
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BYTE_TOKEN_LENGTH = len("<0x00>")
_PER_TOKEN = frozenset({"WordPiece", "Metaspace", "Strip", "Replace"})
_KNOWN = _PER_TOKEN | {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse"}

Decode = Callable[[list[str]], str]


class DecoderStep(Protocol):
    """One decoder step within one stream."""

    def push(self, token: str) -> Sequence[str]:
        """Return the tokens, or pieces of text, that became certain with this one."""
        ...

    def flush(self) -> Sequence[str]:
        """Return what was held back when no token follows."""
        ...


def flat_steps(decoder: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer.json's `decoder`, including those of nested sequences."""
    if not decoder:
        return []
    if decoder.get("type") != "Sequence":
        return [dict(decoder)]
    return [step for part in decoder.get("decoders", []) for step in flat_steps(part)]


class DecoderChain:
    """The steps that all streams of one tokenizer share. Raises ConfigError for an unknown step."""

    def __init__(self, decoder: Mapping[str, Any] | None) -> None:
        steps = flat_steps(decoder)
        unknown = [str(step.get("type")) for step in steps if step.get("type") not in _KNOWN]
        if unknown:
            raise ConfigError(f"tokenizer.json: unknown decoder {unknown[0]}")
        self.has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
        self.is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self._makers: list[Callable[[], DecoderStep]] = [] if decoder else [_Spaced]
        is_text = False
        for step in steps:
            self._makers += _text_step(step) if is_text else _token_step(step)
            is_text = is_text or step["type"] in ("Fuse", "ByteLevel")
        self._decode = _library_decoder(decoder)

    def stream(self) -> "ChainStream":
        """Start a stream, before any token."""
        return ChainStream([maker() for maker in self._makers])

    def piece(self, token: str) -> str:
        """Return the text of a token between other tokens."""
        before, mark, behind = self._decode([_BEFORE, _BEHIND]).partition(_BEFORE)
        head, tail = before + mark, behind
        whole = self._decode([_BEFORE, token, _BEHIND])
        if not (whole.startswith(head) and whole.endswith(tail) and len(whole) >= len(head) + len(tail)):
            return token
        return whole[len(head) : len(whole) - len(tail)]


class ChainStream:
    """The steps of one stream, in order."""

    def __init__(self, steps: Sequence[DecoderStep]) -> None:
        self._steps = steps

    def push(self, token: str) -> str:
        """Return the text that became certain with this token."""
        tokens: Sequence[str] = (token,)
        for step in self._steps:
            tokens = [made for one in tokens for made in step.push(one)]
        return "".join(tokens)

    def flush(self) -> str:
        """Return the text still held back: no token follows."""
        tokens: list[str] = []
        for step in self._steps:
            tokens = [made for one in tokens for made in step.push(one)] + list(step.flush())
        return "".join(tokens)


def gpt2_bytes() -> dict[str, int]:
    """Return the printable character that stands for each byte (GPT-2's `bytes_to_unicode`), inverted."""
    direct = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in direct]
    return {chr(b): b for b in direct} | {chr(256 + i): b for i, b in enumerate(shifted)}


def from_gpt2(token: str, table: Mapping[str, int]) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary."""
    # An added token may hold characters that stand for no byte; such a token is its own text.
    return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()


def tokens_of_run(run: bytes) -> Sequence[str]:
    """Return what `ByteFallback` makes of consecutive byte tokens: one text of valid UTF-8, or U+FFFD for each."""
    try:
        return (run.decode(),)
    except UnicodeDecodeError:
        return ("\ufffd",) * len(run)


def text_of_run(run: bytes) -> str:
    """Return the text of consecutive byte tokens."""
    return "".join(tokens_of_run(run))


def _token_step(step: dict[str, Any]) -> list[Callable[[], DecoderStep]]:
    """Return a step that still works on separate tokens. What it learns about a token is shared by all streams."""
    decode = _library_decoder(step)
    known: tuple[dict[str, str], dict[str, str]] = {}, {}
    match step["type"]:
        case "Fuse":
            return []
        case "ByteFallback":
            return [_ByteRuns]
        case "ByteLevel":
            return [_Utf8]
        case "BPEDecoder":
            return [lambda: _LastDiffers(decode, known[0])]
        case "CTC":
            return [lambda: _Distinct(decode, known[0])]
    return [lambda: _FirstDiffers(decode, known)]


def _text_step(step: dict[str, Any]) -> list[Callable[[], DecoderStep]]:
    """Return a step that follows another which has joined all tokens into one."""
    decode = _library_decoder(step)
    replaced: Sequence[tuple[Any, str]] = ()
    match step["type"]:
        case "Fuse":
            return []
        case "ByteFallback":
            return [_LoneByte]
        case "ByteLevel":
            return [lambda: _Held(decode)]
        case "Strip":
            return [lambda: _StrippedText(step["content"], step["start"], step["stop"])]
        case "Metaspace":
            replaced = [(step["replacement"], decode([step["replacement"]]))]
        case "Replace":
            replaced = [(step["pattern"].get("String"), step["content"])]
        case "BPEDecoder":
            replaced = [(step["suffix"], "")]
        case "WordPiece":
            replaced = _CLEANUP if step["cleanup"] else ()
        case "CTC":
            delimiter = (step["word_delimiter_token"], " ")
            replaced = [(step["pad_token"], ""), *([*_CLEANUP, delimiter] if step["cleanup"] else [])]
    if not all(pattern for pattern, _ in replaced):
        return [lambda: _Held(decode)]  # a regular expression, or nothing
    return [partial(_ReplacedText, pattern, content) for pattern, content in replaced]


class _FirstDiffers:
    """Decodes each token by itself, the first one differently."""

    def __init__(self, decode: Decode, known: tuple[dict[str, str], dict[str, str]]) -> None:
        self._decode = decode
        self._firsts, self._others = known
        self._is_first = True

    def push(self, token: str) -> Sequence[str]:
        if self._is_first:
            self._is_first = False
            if token not in self._firsts:
                self._firsts[token] = self._decode([token])
            return (self._firsts[token],)
        if token not in self._others:
            self._others[token] = self._decode([_BEFORE, token])[len(self._decode([_BEFORE])) :]
        return (self._others[token],)

    def flush(self) -> Sequence[str]:
        return ()


class _LastDiffers:
    """Decodes each token by itself, the last one differently: a token is held until the next one comes."""

    def __init__(self, decode: Decode, known: dict[str, str]) -> None:
        self._decode = decode
        self._known = known
        self._held: str | None = None

    def push(self, token: str) -> Sequence[str]:
        held, self._held = self._held, token
        if held is None:
            return ()
        if held not in self._known:
            self._known[held] = self._decode([held, _BEHIND]).removesuffix(self._decode([_BEHIND]))
        return (self._known[held],)

    def flush(self) -> Sequence[str]:
        return () if self._held is None else (self._decode([self._held]),)


class _Distinct:
    """Keeps the first of consecutive equal tokens; drops tokens that decode to nothing."""

    def __init__(self, decode: Decode, known: dict[str, str]) -> None:
        self._decode = decode
        self._known = known
        self._last: str | None = None

    def push(self, token: str) -> Sequence[str]:
        if token == self._last:
            return ()
        self._last = token
        if token not in self._known:
            self._known[token] = self._decode([token])
        return (self._known[token],) if self._known[token] else ()

    def flush(self) -> Sequence[str]:
        return ()


class _ByteRuns:
    """Joins consecutive tokens such as `<0xE6>` into a text when the run ends."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> Sequence[str]:
        if (found := BYTE_TOKEN.fullmatch(token)) is not None:
            self._run.append(int(found[1], 16))
            return ()
        return (*self.flush(), token)

    def flush(self) -> Sequence[str]:
        run, self._run = bytes(self._run), bytearray()
        return tokens_of_run(run) if run else ()


class _Utf8:
    """Decodes tokens that are bytes; holds those of an unfinished character."""

    _BYTES = gpt2_bytes()

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> Sequence[str]:
        return (self._decoder.decode(from_gpt2(token, self._BYTES)),)

    def flush(self) -> Sequence[str]:
        return (self._decoder.decode(b"", final=True),)


class _Spaced:
    """Joins tokens by spaces, as the library does without a decoder."""

    def __init__(self) -> None:
        self._gap = ""

    def push(self, token: str) -> Sequence[str]:
        gap, self._gap = self._gap, " "
        return (gap + token,)

    def flush(self) -> Sequence[str]:
        return ()


class _Held:
    """Holds the whole text until the end."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._parts: list[str] = []

    def push(self, token: str) -> Sequence[str]:
        self._parts.append(token)
        return ()

    def flush(self) -> Sequence[str]:
        return (self._decode(["".join(self._parts)]),)


class _ReplacedText:
    """Replaces one string by another, leftmost first; holds what may be the beginning of a match."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._held = ""

    def push(self, token: str) -> Sequence[str]:
        *before, rest = (self._held + token).split(self._pattern)
        longest = min(len(rest), len(self._pattern) - 1)
        num_held = next((n for n in range(longest, 0, -1) if self._pattern.startswith(rest[-n:])), 0)
        self._held = rest[len(rest) - num_held :]
        return (self._content.join([*before, rest[: len(rest) - num_held]]),)

    def flush(self) -> Sequence[str]:
        return (self._held,)


class _StrippedText:
    """Strips up to a number of one character at the beginning and at the end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content = content
        self._to_strip = start
        self._most_held = stop
        self._held = ""

    def push(self, token: str) -> Sequence[str]:
        while self._to_strip and token:
            if token[0] != self._content:
                self._to_strip = 0
            else:
                token = token[1:]
                self._to_strip -= 1
        text = self._held + token
        num_held = min(len(text) - len(text.rstrip(self._content)), self._most_held)
        self._held = text[len(text) - num_held :]
        return (text[: len(text) - num_held],)

    def flush(self) -> Sequence[str]:
        return ()


class _LoneByte:
    """Decodes a text that is a single byte token to that byte."""

    def __init__(self) -> None:
        self._held: str | None = ""

    def push(self, token: str) -> Sequence[str]:
        if self._held is None:
            return (token,)
        self._held += token
        if len(self._held) <= _BYTE_TOKEN_LENGTH:
            return ()
        text, self._held = self._held, None
        return (text,)

    def flush(self) -> Sequence[str]:
        runs = _ByteRuns()
        return (*runs.push(self._held or ""), *runs.flush())


def _library_decoder(decoder: Mapping[str, Any] | None) -> Decode:
    """Return the library's own function from a list of tokens to its text."""
    if decoder is None:
        return " ".join
    model = {"type": "BPE", "vocab": {}, "merges": []}
    spec = {"version": "1.0", "added_tokens": [], "model": model, "decoder": dict(decoder)}
    decode: Decode = tokenizers.Tokenizer.from_str(json.dumps(spec)).decoder.decode
    return decode
