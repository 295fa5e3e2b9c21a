"""Beginnings of conversations that are known are not encoded again; what comes out is the same, token for token."""

from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from router.text import tokenizer as module
from router.text.chat_template import ChatTemplate, Message
from router.text.encoded_prefixes import EncodedPrefixes
from router.text.tokenizer import Tokenizer
from tests.support.router.servers import fakes

PLENTY = 1 << 20
_TEMPLATE = "<|bos|>{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


@pytest.fixture(autouse=True, scope="module")
def short_pieces() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LEAST_PIECE_CHARS", 4)
        patch.setattr(module, "LEAST_KNOWN_CHARS", 8)
        yield


def _changed(change: Any) -> Tokenizer:
    library = Library.from_str(fakes.byte_level_spec())
    change(library)
    return Tokenizer(library.to_str(), ChatTemplate(_TEMPLATE, {}))


def _with(**parts: Any) -> Any:
    def change(library: Library) -> None:
        for name, part in parts.items():
            setattr(library, name, part)

    return change


def _end_that(**like: bool) -> Any:
    return lambda library: library.add_special_tokens([AddedToken("<|end|>", special=True, **like)])


KINDS = {
    "byte_level": _changed(lambda _library: None),
    "prefix_space": _changed(_with(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True))),
    "metaspace_first": _changed(_with(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"))),
    "metaspace_always": _changed(_with(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always"))),
    "prepend": _changed(_with(normalizer=normalizers.Prepend("_"))),
    "strip": _changed(_with(normalizer=normalizers.Strip())),
    "nfkc": _changed(_with(normalizer=normalizers.NFKC())),
    "lstrip": _changed(_end_that(lstrip=True)),
    "rstrip": _changed(_end_that(rstrip=True)),
    "single_word": _changed(_end_that(single_word=True)),
}
_TEXTS = st.lists(
    st.sampled_from([*fakes.SPECIALS, " ", "\n", "hello", "world ", "7", "\u6587", "e\u0301", "<|", "'s"]), max_size=8
).map("".join)


def _encoded(kind: Tokenizer, contents: list[str], known: EncodedPrefixes | None = None, scope: str = "") -> list[int]:
    messages = [Message(role="user", content=text) for text in contents]
    return kind.encode_chat(messages, add_generation_prompt=True, max_chars=1 << 20, known=known, scope=scope)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(turns=st.lists(_TEXTS, min_size=1, max_size=6), others=st.lists(_TEXTS, min_size=1, max_size=3))
def test_known_beginnings_change_no_token(kind: str, turns: list[str], others: list[str]) -> None:
    known, tokenizer = EncodedPrefixes(max_bytes=PLENTY), KINDS[kind]
    conversations = [turns[:n] for n in range(1, len(turns) + 1)]
    conversations += [turns[: len(turns) // 2] + others, others, turns]
    for contents in conversations:
        assert _encoded(tokenizer, contents, known) == _encoded(tokenizer, contents)


@pytest.mark.parametrize("kind", ["lstrip", "single_word"])
def test_texts_are_not_cut_at_tokens_that_look_back(kind: str) -> None:
    read = KINDS[kind]
    alias = read._guard.alias("<|end|>")
    assert not read._may_cut(alias)
    assert KINDS["byte_level"]._may_cut(KINDS["byte_level"]._guard.alias("<|end|>"))


def test_only_the_end_of_a_known_conversation_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    known, tokenizer = EncodedPrefixes(max_bytes=PLENTY), KINDS["byte_level"]
    history = ["hello world " * 20, "world " * 20]
    _encoded(tokenizer, history, known)
    read: list[str] = []
    encode = tokenizer._encode

    def noted(text: str, *, add_special_tokens: bool) -> list[int]:
        read.append(text)
        return encode(text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenizer, "_encode", noted)
    _encoded(tokenizer, [*history, "hello"], known)
    assert len("".join(read)) < 200
    _encoded(tokenizer, [*history, "hello"], known, scope="another tenant's")
    assert len(read[-1]) > 300, "what one tenant has sent is not known to another"
    assert known.num_known_tokens > 100
    assert known.num_encoded_tokens > 2 * known.num_known_tokens


def test_least_recently_used_pieces_go_first_and_ends_before_beginnings() -> None:
    known = EncodedPrefixes(max_bytes=4 * (300 + 40))
    ids = array("i", range(10))
    first, second = known.names("s", ["a", "b"]), known.names("s", ["c", "d"])
    known.add(first, [ids, ids])
    known.add(second, [ids, ids])
    assert known.num_bytes == 4 * (300 + 10 * ids.itemsize)
    assert len(known.find(first)) == 2
    (third,) = known.names("s", ["e"])
    known.add([third], [ids])
    assert [len(known.find(names)) for names in (first, second, [third])] == [2, 1, 1]
    assert known.num_bytes == 4 * (300 + 10 * ids.itemsize)


def test_names_depend_on_scope_and_on_everything_before() -> None:
    known = EncodedPrefixes(max_bytes=PLENTY)
    names = known.names("s", ["a", "b"])
    assert known.names("s", ["a", "b", "c"])[:2] == names
    assert not set(names) & {*known.names("t", ["a", "b"]), *known.names("s", ["b", "a"]), *known.names("s", ["ab"])}
    assert known.names("st", ["a"]) != known.names("s", ["ta"])
    assert not set(names) & set(EncodedPrefixes(max_bytes=PLENTY).names("s", ["a", "b"]))
