"""Streamed tokens of every kind of tokenizer decode like the library, token by token where possible."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from router.text.decoder_steps import DecoderChain
from router.text.tokenizer import Tokenizer
from tandem.errors import ConfigError
from tests.support.router.servers import fakes

CORPUS = ["the fox don't sleep .", "hello world , hello", "漢字 and kana かな", "naïve café 's", "a 😀 b"]
TEXTS = st.text(alphabet="hélo wtx n'.,?!▁漢字😀👩‍🚀\u0301  ", max_size=24)
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def library(model: Any, decoder: Any, *, pre: Any = None, trainer: Any = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(model)
    if pre is not None:
        made.pre_tokenizer = pre
    if trainer is not None:
        made.train_from_iterator(CORPUS, trainer)
    made.decoder = decoder
    made.add_special_tokens([AddedToken("</s>", special=True), AddedToken("[PAD]", special=True)])
    return made


def word_piece() -> tokenizers.Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=["[UNK]"], show_progress=False)
    model, pre = models.WordPiece(unk_token="[UNK]"), pre_tokenizers.BertPreTokenizer()
    return library(model, decoders.WordPiece("##", cleanup=True), pre=pre, trainer=trainer)


def unigram() -> tokenizers.Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    pre = pre_tokenizers.Metaspace(prepend_scheme="always")
    return library(models.Unigram(), decoders.Metaspace(prepend_scheme="always"), pre=pre, trainer=trainer)


def end_of_word() -> tokenizers.Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=120, end_of_word_suffix="</w>", special_tokens=["<unk>"], show_progress=False
    )
    model = models.BPE(end_of_word_suffix="</w>", unk_token="<unk>")
    return library(model, decoders.BPEDecoder("</w>"), pre=pre_tokenizers.Whitespace(), trainer=trainer)


def sentence_piece(*steps: Any) -> tokenizers.Tokenizer:
    pieces = ["<unk>", *BYTES, "▁", *"helowrdtfx漢", "▁hello", "▁wor", "ld"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "h")] if "▁h" in vocab else []
    made = library(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"), decoders.Sequence(list(steps)))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return made


SPACE = decoders.Replace("▁", " ")
KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": lambda: tokenizers.Tokenizer.from_str(fakes.byte_level_spec()),
    "llama": lambda: sentence_piece(SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)),
    "llama_without_bytes": lambda: sentence_piece(SPACE, decoders.Fuse(), decoders.Strip(" ", 1, 0)),
    "strip_both": lambda: sentence_piece(SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 2, 1)),
    "metaspace_bytes": lambda: sentence_piece(decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")),
    "regex_behind_fuse": lambda: sentence_piece(decoders.Fuse(), decoders.Replace(tokenizers.Regex("▁+"), " ")),
    "byte_level_stripped": lambda: with_decoder(
        fakes.byte_level_spec(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    ),
    "no_decoder": lambda: without_decoder(fakes.byte_level_spec()),
    "word_piece": word_piece,
    "unigram": unigram,
    "end_of_word": end_of_word,
    "ctc": lambda: with_decoder(fakes.byte_level_spec(), decoders.CTC("a", "Ġ", cleanup=True)),
}


def with_decoder(spec: str, decoder: Any) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(spec)
    made.decoder = decoder
    return made


def without_decoder(spec: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(json.loads(spec) | {"decoder": None}))


# The library gives up where nothing is left for the end of `Strip` to cut off: see the test of that step.
@pytest.fixture(scope="module", params=[name for name in KINDS if name != "strip_both"])
def kind(request: pytest.FixtureRequest) -> Tokenizer:
    made = KINDS[request.param]()
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", made.token_to_id("</s>") or 0)]
    )
    return Tokenizer(made.to_str(), None)


def streamed(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool) -> list[str]:
    stream = tokenizer.detokenizer(skip_special_tokens=skip)
    return [*map(stream.push, ids), stream.flush()]


@pytest.mark.in_turns(always=4)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, skip=st.booleans())
def test_stream_of_text_joins_to_decode(kind: Tokenizer, text: str, skip: bool) -> None:
    ids = kind.encode(text)
    assert "".join(streamed(kind, ids, skip=skip)) == kind.decode(ids, skip_special_tokens=skip)


@pytest.mark.in_turns(always=4)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_stream_of_any_tokens_joins_to_decode(kind: Tokenizer, data: st.DataObject, skip: bool) -> None:
    ids = data.draw(st.lists(st.integers(0, kind.size + 7), max_size=40))
    assert "".join(streamed(kind, ids, skip=skip)) == kind.decode(ids, skip_special_tokens=skip)


STEPS: list[dict[str, Any]] = [
    {"type": "Fuse"},
    {"type": "ByteFallback"},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "Replace", "pattern": {"String": "aab"}, "content": "aa"},
    {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "A"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    {"type": "Strip", "content": "a", "start": 2, "stop": 0},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": False},
    {"type": "BPEDecoder", "suffix": "</w>"},
    {"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": True},
]
TOKENS = st.sampled_from(
    [
        *"ab|▁ .Ġé漢",
        *["", "a</w>", "##b", "▁▁a", "aab", "aa", "<0xE6>", "<0xBC>", "<0xA2>", "<0x41>", "n't", " do", " not"],
        *["<pad>", "</", "w>", "<0x", "42>", "Ã", "©", "ðŁĺ", "Ģ"],
    ]
)


@settings(max_examples=1500, deadline=None)
@example(
    steps=[{"type": "ByteFallback"}, {"type": "WordPiece", "prefix": "##", "cleanup": True}],
    tokens=["<0xE6>", "<0xE6>"],
)
@given(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=4), tokens=st.lists(TOKENS, max_size=12))
def test_decoder_chain_of_any_steps_agrees_with_library(steps: list[dict[str, Any]], tokens: list[str]) -> None:
    decoder = {"type": "Sequence", "decoders": steps}
    stream = DecoderChain(decoder).stream()
    streamed = "".join(map(stream.push, tokens)) + stream.flush()
    spec = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
    whole = tokenizers.Tokenizer.from_str(json.dumps(spec | {"decoder": decoder})).decoder.decode(tokens)
    assert streamed == whole


@settings(max_examples=300, deadline=None)
@given(start=st.integers(0, 3), stop=st.integers(0, 3), parts=st.lists(st.text("a b", max_size=4), max_size=5))
def test_strip_behind_fuse_agrees_with_the_library(start: int, stop: int, parts: list[str]) -> None:
    # The library itself gives up where there is less than it is to cut off.
    assume(len("".join(parts).strip(" ")) > 0)
    strip = {"type": "Strip", "content": " ", "start": start, "stop": stop}
    stream = DecoderChain({"type": "Sequence", "decoders": [{"type": "Fuse"}, strip]}).stream()
    text = "".join(parts)
    expected = decoders.Strip(" ", start, stop).decode([text])
    assert "".join(map(stream.push, parts)) + stream.flush() == expected


def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer(KINDS[name]().to_str(), None)


@pytest.mark.parametrize("name", ["llama_without_bytes", "word_piece", "unigram", "strip_both"])
def test_stream_emits_each_token_at_once(name: str) -> None:
    tokenizer = tokenizer_of(name)
    pieces = streamed(tokenizer, tokenizer.encode("hello world"), skip=True)
    shown = [piece for piece in pieces if piece]
    assert len(shown) > 1
    assert "".join(shown) == "hello world"


def test_stream_holds_an_unfinished_character() -> None:
    tokenizer = tokenizer_of("byte_level_stripped")
    table = {tokenizer.bytes_of(i): i for i in range(tokenizer.size)}
    ids = [table[bytes([b])] for b in "😀".encode()]
    assert streamed(tokenizer, ids, skip=True) == ["", "", "", "😀", ""]
    assert streamed(tokenizer, ids[:3], skip=True) == ["", "", "", "\ufffd"]


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("llama_without_bytes", "▁hello", b" hello"),
        ("llama_without_bytes", "<0xE6>", b"<0xE6>"),
        ("strip_both", "<0xE6>", b"\xe6"),
        ("strip_both", "▁", b" "),
        ("metaspace_bytes", "<0xE6>", b"\xe6"),
        ("metaspace_bytes", "▁wor", b" wor"),
        ("word_piece", "the", b" the"),
        ("word_piece", "##e", b"e"),
        ("end_of_word", "x</w>", b"x "),
        ("byte_level_stripped", "Ã", b"\xc3"),
        ("no_decoder", "he", b" he"),
    ],
)
def test_bytes_of_token_equal_its_text_in_context(name: str, token: str, expected: bytes) -> None:
    made = KINDS[name]()
    if (token_id := made.token_to_id(token)) is None:
        made.add_tokens([AddedToken(token, normalized=False)])
        token_id = made.token_to_id(token)
    assert token_id is not None
    tokenizer = Tokenizer(made.to_str(), None)
    assert tokenizer.bytes_of(token_id) == expected
    assert tokenizer.bytes_of(tokenizer.size + 5) == b""


def test_decoder_with_an_unknown_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown decoder Magic"):
        DecoderChain({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "Magic"}]})
