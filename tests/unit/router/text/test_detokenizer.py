"""Streamed tokens decode like the library, and never yield half a character early."""

import json
from collections.abc import Sequence
from itertools import pairwise

import orjson
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


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCE_PIECE], ids=["byte-level", "sentencepiece"])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_json_texts_are_the_texts_of_tokens_wherever_nothing_is_held(tokenizer: Tokenizer, data: st.DataObject) -> None:
    texts = tokenizer.json_texts
    assert texts is not None
    assert len(texts) == tokenizer.size
    stream = tokenizer.detokenizer(skip_special_tokens=data.draw(st.booleans()))
    for token_id in data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=40)):
        stated = texts.text[texts.offsets[token_id] : texts.offsets[token_id + 1]]
        holds_nothing = stream.holds_nothing
        text = stream.push(token_id)
        if holds_nothing and stated:
            assert orjson.dumps(text) == b'"' + stated + b'"'
            assert stream.holds_nothing


def test_most_tokens_have_a_json_text_and_special_ones_and_parts_of_characters_have_none() -> None:
    texts = BYTE_LEVEL.json_texts
    assert texts is not None
    lengths = [end - begin for begin, end in pairwise(texts.offsets)]
    assert sum(length > 0 for length in lengths) > 0.5 * BYTE_LEVEL.size
    assert [lengths[i] for i in BYTE_LEVEL.special_ids] == [0] * len(BYTE_LEVEL.special_ids)
    (part, *_) = BYTE_LEVEL.encode("\N{GRINNING FACE}")
    assert lengths[part] == 0


def test_decoders_that_look_at_neighbours_have_no_json_texts() -> None:
    spec = json.loads(fakes.byte_level_spec()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    tokenizer = Tokenizer(json.dumps(spec), None)
    assert tokenizer.json_texts is None
    assert not tokenizer.detokenizer().holds_nothing
