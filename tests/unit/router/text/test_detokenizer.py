"""Streamed tokens decode like the library, and never yield half a character early."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.tokenizer import Tokenizer
from tests.support.router.servers import fakes

BYTE_LEVEL = Tokenizer(fakes.byte_level_spec(), None)
SENTENCE_PIECE = Tokenizer(fakes.sentencepiece_spec(), None)


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> list[str]:
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte_level", "sentencepiece"])
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_stream_joins_to_decode(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    # Up to 8 ids beyond the vocabulary: models pad their embeddings.
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 7), max_size=40))
    assert "".join(streamed(tokenizer, ids, skip=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte_level", "sentencepiece"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="héllo w漢字😀👩‍🚀\u0301 ", max_size=20))
def test_detokenizer_keeps_text_and_breaks_no_character(tokenizer: Tokenizer, text: str) -> None:
    pieces = streamed(tokenizer, tokenizer.encode(text), skip=True)
    assert not any("\ufffd" in piece for piece in pieces)
    # A SentencePiece decoder drops one leading space, which its (here absent) normalizer would have added.
    assert "".join(pieces) == (text.removeprefix(" ") if tokenizer is SENTENCE_PIECE else text)


def test_detokenizer_emits_emoji_with_last_byte() -> None:
    table = {BYTE_LEVEL.bytes_of(i): i for i in range(BYTE_LEVEL.size)}
    ids = [table[bytes([b])] for b in "😀".encode()]
    assert streamed(BYTE_LEVEL, ids, skip=True) == ["", "", "", "😀", ""]
    assert streamed(BYTE_LEVEL, ids[:3], skip=True) == ["", "", "", "\ufffd"]
