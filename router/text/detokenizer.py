"""Turns tokens into text, one token at a time, never splitting a character.

Two families of tokenizers are fast here, distinguished by what the decoder does to a token's bytes:

* byte-level BPE (GPT-2, Llama 3, Qwen): a token is bytes, the text is their UTF-8 with U+FFFD for invalid bytes;
* SentencePiece style (Llama 2, Mistral): `▁` is a space, `<0xE6>` is one byte; a run of such byte tokens is either
  valid UTF-8 as a whole or one U+FFFD per byte, so a run is held until it ends; one leading space is dropped.

All others go through their decoder step by step (`router.text.decoder_steps`), which is a few times slower.

The pieces of a stream, joined, equal the tokenizer's own decode of all its tokens; `Tokenizer.load` proves it for
a sample of every tokenizer it meets.
"""

import codecs
from array import array
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from router.text.decoder_steps import (
    BYTE_TOKEN,
    ChainStream,
    DecoderChain,
    flat_steps,
    from_gpt2,
    gpt2_bytes,
    text_of_run,
)

_SPACE_MARK = "\u2581"
_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """The growing text of one choice."""

    def push(self, token_id: int) -> str:
        """Return the text that became certain with this token; often the whole token, sometimes nothing yet."""
        ...

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Return the text that became certain with these tokens."""
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """Return the text still held back: no token follows."""
        ...

    @property
    def holds_nothing(self) -> bool:
        """Whether the text of the next token is that of `JsonTexts`, if it has one there."""
        return False


class JsonTexts:
    """The texts of a vocabulary as JSON strings without their quotes, in one piece of memory.

    Only tokens whose text does not depend on their neighbours have one; that of all others is empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        escaped = [orjson.dumps(text)[1:-1] for text in texts]
        self.text = b"".join(escaped)
        self.offsets = array("q", [0])
        """Where each token's text begins, and at last where the last one ends."""
        end = 0
        for one in escaped:
            self.offsets.append(end := end + len(one))

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Pieces(Protocol):
    """The text of every token id of one tokenizer. Absent ids decode to nothing."""

    def bytes_of(self, token_id: int) -> bytes:
        """Return what one token contributes on its own."""
        ...

    def detokenizer(self, skip: frozenset[int]) -> Detokenizer:
        """Start a stream that ignores the ids in `skip`."""
        ...

    def json_texts(self, special_ids: AbstractSet[int]) -> JsonTexts | None:
        """Return the texts of the tokens that are not special; None where a text depends on other tokens."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes(Pieces):
    """The tokens of the two fast families."""

    data: Sequence[bytes | None]
    byte_runs: frozenset[int] | None
    """Ids of single-byte tokens in a SentencePiece vocabulary; None for byte-level BPE."""
    strip_spaces: int = 0
    """Leading spaces dropped from the whole text."""

    def bytes_of(self, token_id: int) -> bytes:
        return (self.data[token_id] if 0 <= token_id < len(self.data) else None) or b""

    def detokenizer(self, skip: frozenset[int]) -> Detokenizer:
        if self.byte_runs is None:
            return _ByteLevelStream(self, skip)
        return _SentencePieceStream(self, skip)

    def json_texts(self, special_ids: AbstractSet[int]) -> JsonTexts | None:
        runs = self.byte_runs or frozenset()
        return JsonTexts(
            [
                "" if piece is None or i in special_ids or i in runs else _whole_text(piece)
                for i, piece in enumerate(self.data)
            ]
        )


def _whole_text(piece: bytes) -> str:
    """Return the text of whole characters; empty for a piece that begins or ends within one."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return ""


class TokenTexts(Pieces):
    """The tokens of any other decoder."""

    def __init__(self, chain: DecoderChain, tokens: Sequence[str | None]) -> None:
        self._chain = chain
        self._tokens = tokens
        self._bytes = gpt2_bytes()

    def token(self, token_id: int) -> str | None:
        """Return a token's text in the vocabulary."""
        return self._tokens[token_id] if 0 <= token_id < len(self._tokens) else None

    def bytes_of(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if self._chain.is_byte_level:
            return from_gpt2(token, self._bytes)
        if self._chain.has_byte_tokens and (found := BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(found[1], 16)])
        return self._chain.piece(token).encode()

    def detokenizer(self, skip: frozenset[int]) -> Detokenizer:
        return _ChainedStream(self, self._chain.stream(), skip)


def read_pieces(decoder: Mapping[str, Any] | None, size: int, token_of: Callable[[int], str | None]) -> Pieces:
    """Read the `decoder` entry of a tokenizer.json. Raises ConfigError for an unknown step."""
    tokens = [token_of(i) for i in range(size)]
    steps = flat_steps(decoder)
    if [step.get("type") for step in steps] == ["ByteLevel"]:
        table = gpt2_bytes()
        return TokenBytes(data=[None if t is None else from_gpt2(t, table) for t in tokens], byte_runs=None)
    strip = _stripped_spaces(steps)
    if strip is None:
        return TokenTexts(DecoderChain(decoder), tokens)
    byte_ids = {i: int(m[1], 16) for i, t in enumerate(tokens) if t is not None and (m := BYTE_TOKEN.fullmatch(t))}
    data = [
        None if t is None else bytes([byte_ids[i]]) if i in byte_ids else t.replace(_SPACE_MARK, " ").encode()
        for i, t in enumerate(tokens)
    ]
    return TokenBytes(data=data, byte_runs=frozenset(byte_ids), strip_spaces=strip)


def _stripped_spaces(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the stripped spaces of a decoder in SentencePiece style; None for others."""
    replace = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    if list(steps[:3]) != [replace, {"type": "ByteFallback"}, {"type": "Fuse"}] or len(steps) > 4:
        return None
    if len(steps) == 3:
        return 0
    start = steps[3].get("start")
    known = {"type": "Strip", "content": " ", "start": start, "stop": 0}
    return start if isinstance(start, int) and steps[3] == known else None


class _ByteLevelStream(Detokenizer):
    """Decodes byte-level BPE: an incremental UTF-8 decoder holds the bytes of an unfinished character."""

    def __init__(self, pieces: TokenBytes, skip: frozenset[int]) -> None:
        self._data = pieces.data
        self._skip = skip
        self._utf8: codecs.IncrementalDecoder | None = None
        """Made for the first piece that is not ASCII."""
        self._is_between_characters = True

    def push(self, token_id: int) -> str:
        if token_id in self._skip or not 0 <= token_id < len(self._data):
            return ""
        piece = self._data[token_id]
        if piece is not None and self._is_between_characters and piece.isascii():
            return piece.decode()
        return self._text_of(piece or b"")

    def push_all(self, token_ids: Sequence[int]) -> str:
        data, skip = self._data, self._skip
        known = range(len(data))
        return self._text_of(b"".join([data[i] or b"" for i in token_ids if i in known and i not in skip]))

    def _text_of(self, piece: bytes) -> str:
        if self._is_between_characters and piece.isascii():
            return piece.decode()
        if self._utf8 is None:
            self._utf8 = _new_utf8_decoder("replace")
        text = self._utf8.decode(piece)
        self._is_between_characters = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        return "" if self._utf8 is None else self._utf8.decode(b"", final=True)

    @property
    def holds_nothing(self) -> bool:
        return self._is_between_characters


class _SentencePieceStream(Detokenizer):
    """Decodes SentencePiece with byte fallback: a run of byte tokens is decoded when it ends."""

    def __init__(self, pieces: TokenBytes, skip: frozenset[int]) -> None:
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

    @property
    def holds_nothing(self) -> bool:
        return not self._run and not self._to_strip

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        return text_of_run(run)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != " ":
                self._to_strip = 0
                break
            text = text[1:]
            self._to_strip -= 1
        return text


class _ChainedStream(Detokenizer):
    """Decodes with any other decoder: each token goes through its steps."""

    def __init__(self, pieces: TokenTexts, chain: ChainStream, skip: frozenset[int]) -> None:
        self._pieces = pieces
        self._chain = chain
        self._skip = skip

    def push(self, token_id: int) -> str:
        token = self._pieces.token(token_id)
        return "" if token is None or token_id in self._skip else self._chain.push(token)

    def flush(self) -> str:
        return self._chain.flush()
