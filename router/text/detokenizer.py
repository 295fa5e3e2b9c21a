"""From tokens to text, one token at a time, never half a character.

Two families of tokenizers are known, each by what its decoder does to a token's bytes:

* byte-level BPE (GPT-2, Llama 3, Qwen): a token is bytes, the text is their UTF-8 with U+FFFD for what is no UTF-8;
* SentencePiece style (Llama 2, Mistral): `▁` is a space, `<0xE6>` is one byte; a run of such byte tokens is either
  valid UTF-8 as a whole or one U+FFFD per byte, so a run is held until it ends; one leading space is dropped.

The pieces of a stream, joined, equal the tokenizer's own decode of all its tokens; `Tokenizer.load` proves it for
a sample of every tokenizer it meets, and refuses one whose decoder is of neither family.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class Detokenizer(Protocol):
    """The growing text of one choice."""

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often the whole token, sometimes nothing yet."""
        ...

    def flush(self) -> str:
        """No token follows: the text still held."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """The bytes of every token id, and what joins them. Absent ids decode to nothing."""

    data: Sequence[bytes | None]
    byte_runs: frozenset[int] | None
    """Ids of single-byte tokens in a SentencePiece vocabulary; None for byte-level BPE."""
    strip_spaces: int = 0
    """Leading spaces dropped from the whole text."""

    def bytes_of(self, token_id: int) -> bytes:
        """What one token contributes, on its own."""
        return (self.data[token_id] if 0 <= token_id < len(self.data) else None) or b""

    def detokenizer(self, skip: frozenset[int]) -> Detokenizer:
        """A fresh stream that ignores the ids in `skip`."""
        if self.byte_runs is None:
            return _ByteLevelStream(self, skip)
        return _SentencePieceStream(self, skip)


def read_pieces(decoder: Mapping[str, Any] | None, size: int, token_of: Callable[[int], str | None]) -> Pieces:
    """Pieces from the `decoder` entry of a tokenizer.json. Raises ConfigError for a decoder of neither family."""
    kind, strip = _family(decoder)
    tokens = [token_of(i) for i in range(size)]
    if kind == "ByteLevel":
        table = _gpt2_bytes()
        return Pieces(data=[None if t is None else _from_gpt2(t, table) for t in tokens], byte_runs=None)
    byte_ids = {i: int(m[1], 16) for i, t in enumerate(tokens) if t is not None and (m := _BYTE_TOKEN.fullmatch(t))}
    data = [
        None if t is None else bytes([byte_ids[i]]) if i in byte_ids else t.replace(_SPACE_MARK, " ").encode()
        for i, t in enumerate(tokens)
    ]
    return Pieces(data=data, byte_runs=frozenset(byte_ids), strip_spaces=strip)


def _family(decoder: Mapping[str, Any] | None) -> tuple[str, int]:
    steps = [decoder] if decoder else []
    if decoder and decoder.get("type") == "Sequence":
        steps = decoder.get("decoders", [])
    if [s.get("type") for s in steps] == ["ByteLevel"]:
        return "ByteLevel", 0
    replace = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    if steps[:3] == [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        rest = steps[3:]
        if not rest:
            return "SentencePiece", 0
        strip = rest[0]
        known = {"type": "Strip", "content": " ", "start": strip.get("start"), "stop": 0}
        if len(rest) == 1 and strip == known and isinstance(strip["start"], int):
            return "SentencePiece", strip["start"]
    names = ", ".join(str(s.get("type")) for s in steps) or "none"
    raise ConfigError(f"tokenizer.json: decoder ({names}) is neither ByteLevel nor SentencePiece with byte fallback")


def _gpt2_bytes() -> dict[str, int]:
    """The printable stand-in of every byte (GPT-2, `bytes_to_unicode`)."""
    direct = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [b for b in range(256) if b not in direct]
    return {chr(b): b for b in direct} | {chr(256 + i): b for i, b in enumerate(shifted)}


def _from_gpt2(token: str, table: Mapping[str, int]) -> bytes:
    # An added token may hold characters that stand for no byte; such a token is its own text.
    return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()


class _ByteLevelStream:
    """Byte-level BPE: an incremental UTF-8 decoder holds the bytes of an unfinished character."""

    def __init__(self, pieces: Pieces, skip: frozenset[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = self._utf8.decode

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._decode(self._pieces.bytes_of(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SentencePieceStream:
    """SentencePiece with byte fallback: a run of byte tokens is decided when it ends."""

    def __init__(self, pieces: Pieces, skip: frozenset[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._run = bytearray()
        self._to_strip = pieces.strip_spaces

    def push(self, token_id: int) -> str:
        piece = self._pieces.bytes_of(token_id)
        if token_id in self._skip or not piece:
            return ""
        if token_id in (self._pieces.byte_runs or ()):
            self._run += piece
            return ""
        return self._strip(self._end_run() + piece.decode())

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text
