"""Encoding: special tokens in clients' text, chat templates within bounds, refusals."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.chat_template import ChatTemplate, Message, check_template
from router.text.tokenizer import Tokenizer
from tandem.errors import ConfigError, InvalidRequest
from tests.support.router.servers import fakes

MANY = 100_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


def chat(tokenizer: Tokenizer, *contents: str) -> list[int]:
    messages = [Message(role="user", content=text) for text in contents]
    return tokenizer.encode_chat(messages, add_generation_prompt=True, max_chars=MANY)


def test_plain_text_never_encodes_control_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a <|end|> b")
    assert not set(ids) & tokenizer.special_ids
    assert tokenizer.decode(ids) == "a <|end|> b"


def test_conversation_has_control_tokens_of_template(tokenizer: Tokenizer) -> None:
    assert chat(tokenizer, "hello") == [
        fakes.BOS,
        fakes.USER,
        *tokenizer.encode("hello"),
        fakes.END,
        fakes.ASSISTANT,
    ]


_PIECES = st.lists(
    st.sampled_from([*fakes.SPECIALS, "<", "<|", "<|us", "er|>", "|>", "nd|>", "<<|", "x", "漢"]), max_size=6
)


@settings(max_examples=200, deadline=None)
@given(contents=st.lists(_PIECES.map("".join), min_size=1, max_size=4))
def test_conversation_texts_never_encode_control_tokens(contents: list[str]) -> None:
    # Messages that touch: nothing stands between them.
    touching = Tokenizer(_SPEC, ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}<|assistant|>", {}))
    ids = chat(touching, *contents)
    assert ids[-1] == fakes.ASSISTANT
    assert not set(ids[:-1]) & touching.special_ids
    assert touching.decode(ids[:-1], skip_special_tokens=False) == "".join(contents)


_SPEC = fakes.byte_level_spec()


def test_template_sees_raw_client_text(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim }}{% endfor %}"
    thinking = Tokenizer(_SPEC, ChatTemplate(source, {}))
    assert thinking.decode(chat(thinking, "<think>so</think> yes ")) == "yes"


def test_tokenizer_invalid_unicode_or_nul_is_refused(tokenizer: Tokenizer) -> None:
    for text in ("a\0b", "a\ud800b"):
        with pytest.raises(InvalidRequest):
            tokenizer.encode(text)
        with pytest.raises(InvalidRequest):
            chat(tokenizer, text)


def test_tokenizer_without_template_refuses_conversations() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        chat(fakes.make_tokenizer(None), "hello")


def test_tokenizer_load_reads_template_from_either_file(tmp_path: Path) -> None:
    fakes.write_model(tmp_path)
    assert chat(Tokenizer.load(tmp_path), "hello")[0] == fakes.BOS
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    assert chat(Tokenizer.load(tmp_path), "hello") == [fakes.BOS, fakes.END]
    (tmp_path / "chat_template.jinja").unlink()
    fakes.write_model(tmp_path, template=None)
    assert not Tokenizer.load(tmp_path).has_chat_template


def test_tokenizer_of_built_in_model_loads() -> None:
    tokenizer = Tokenizer.load(Path(__file__).parents[4] / "engine" / "builtin_model")
    ids = chat(tokenizer, "Hello <|end|>, 漢字 😀")
    assert "Hello <|end|>, 漢字 😀" in tokenizer.decode(ids)
    assert sum(i in tokenizer.special_ids for i in ids) == 4


def test_tokenizer_larger_than_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    tokenizer.check_fits(tokenizer.size)
    with pytest.raises(ConfigError, match=f"the tokenizer has {tokenizer.size} tokens, but the model's vocabulary has"):
        tokenizer.check_fits(tokenizer.size - 1)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"model": {"type": "BPE"}})])
def test_tokenizer_malformed_file_is_config_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 11 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for a in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
        "{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages[9].role }}",
    ],
)
def test_hostile_template_is_refused_at_start(source: str) -> None:
    with pytest.raises(ConfigError, match="chat template"):
        check_template(source, {})


def test_template_beyond_budget_is_refused() -> None:
    loop = ChatTemplate("{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}", {})
    many = [Message(role="user", content="x")] * 1000
    with pytest.raises(InvalidRequest, match="loop steps"):
        loop.render(many, add_generation_prompt=False, max_chars=MANY)
    echo = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="characters"):
        echo.render(many, add_generation_prompt=False, max_chars=999)


def test_template_may_refuse_messages_and_failure_hides_content() -> None:
    refusing = ChatTemplate("{{ raise_exception('only one message') }}", {})
    with pytest.raises(InvalidRequest, match="only one message"):
        refusing.render([], add_generation_prompt=False, max_chars=MANY)
    failing = ChatTemplate("{{ messages[0].content + 1 }}", {})
    with pytest.raises(InvalidRequest, match="TypeError") as caught:
        failing.render([Message(role="user", content="secret")], add_generation_prompt=False, max_chars=MANY)
    assert "secret" not in caught.value.message


def test_template_supports_hugging_face_dialect() -> None:
    source = (
        "{% generation %}a{% endgeneration %}{{ {'x': '<é>'} | tojson }}{% for i in [1, 2] %}{% break %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render([], add_generation_prompt=False, max_chars=MANY) == 'a{"x": "<é>"}'


@pytest.mark.parametrize("place", ["model.vocab", "added_tokens"])
def test_tokenizer_with_duplicate_token_id_is_refused_by_names(tmp_path: Path, place: str) -> None:
    fakes.write_model(tmp_path)
    raw = json.loads(fakes.byte_level_spec())
    if place == "model.vocab":
        first, second, *_ = raw["model"]["vocab"]
        shared = raw["model"]["vocab"][second] = raw["model"]["vocab"][first]
    else:
        first, second = (token["content"] for token in raw["added_tokens"][:2])
        shared = raw["added_tokens"][1]["id"] = raw["added_tokens"][0]["id"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as refused:
        Tokenizer.load(tmp_path)
    assert str(refused.value) == f"tokenizer.json: {place}: {first!r} and {second!r} are both token {shared}"
