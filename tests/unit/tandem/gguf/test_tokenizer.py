"""Tokenizers made of GGUF files give the tokens of the originals, for any text.

References are the original `tokenizer.json`, what transformers makes of the same file, and SentencePiece's own rule.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

from cluster.cli.demo import STORY
from router.text import tokenizer as router_tokenizer
from router.text.chat_template import Message
from tandem.errors import ConfigError
from tandem.gguf.pre_tokenizers import PRE_TOKENIZERS
from tandem.model_files import read_model_text
from tandem.model_path import BUILTIN, model_directory
from tests.support.engine.gguf_writer import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, add_tokenizer

CORPUS = [
    *STORY.split(". "),
    "It's we'll WE'LL they've I'm don't 'S 1234567 3.14 12 345",
    "naïve café e\u0301 Ünïcode Straße ſ İ ﬁ ǅ 漢字 漢 かな カナ 한국어 שלום مرحبا ١٢٣ ½ Ⅷ 🙂",
    "👩\u200d👩\u200d👧 \u0300",
    "def f(x):\n    return x  # comment\r\n\r\n\t\tif x == {'a': [1, 2]}:\n\n\n  pass   \n",
]
VOCAB_SIZE = 800
SPECIAL, PLAIN = ["<|bos|>", "<|end|>", "<|im_start|>"], ["<think>", "</think>"]
WORDS = sorted({word for line in CORPUS for word in line.split(" ")})
PIECES = st.one_of(
    st.sampled_from([*WORDS, *SPECIAL, *PLAIN]),
    st.sampled_from(
        [" ", "  ", "   ", "\n", "\r\n", "\t", "\n\n  ", "\u00a0", "\u3000", "▁", "Ġ", "<s>", "</s>", "<0x41>"]
    ),
    st.text(max_size=4),
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def load(file: Path) -> Tokenizer:
    return Tokenizer.from_str(read_model_text(file / "tokenizer.json", max_bytes=1 << 28))


def write(
    folder: Path,
    original: Tokenizer,
    *,
    pre: str | None = None,
    scores: list[float] | None = None,
    size: int | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **named: Any,
) -> Path:
    """Write a tokenizer to a directory, and to a GGUF file in a folder of its own. Returns the file."""
    file = folder / "file" / "model.gguf"
    file.parent.mkdir()
    original.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    writer = gguf.GGUFWriter(file, "llama")
    size = size or original.get_vocab_size(with_added_tokens=True)
    add_tokenizer(writer, folder, vocab_size=size, pre=pre, scores=scores)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def byte_level(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """Train a byte-level tokenizer with special tokens, and others that are matched as a whole.

    It learns merges across all that a pre-tokenizer would cut, so that it matters where a text is cut.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS * 3, trainer)
    made.pre_tokenizer, made.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(SPECIAL)
    made.add_tokens(PLAIN)
    return made


def smollm() -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return byte_level(pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]))


def qwen2() -> Tokenizer:
    theirs = Qwen2Tokenizer().backend_tokenizer
    return byte_level(theirs.pre_tokenizer, theirs.normalizer)


ORIGINALS: dict[str, Callable[[], Tokenizer]] = {
    "smollm": smollm,
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "qwen2": qwen2,
}


@pytest.fixture(scope="module", params=ORIGINALS)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer, and what is made of its GGUF file."""
    made = ORIGINALS[request.param]()
    file = write(tmp_path_factory.mktemp("original"), made, pre=request.param, bos_token=SPECIAL[0])
    return made, load(file)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
@example(text=" ".join(CORPUS))
def test_gguf_byte_level_tokens_equal_the_originals(text: str, original: tuple[Tokenizer, Tokenizer]) -> None:
    theirs, ours = original
    ids = theirs.encode(text).ids
    assert ours.encode(text).ids == ids
    assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module", params=["llama-bpe", "smaug-bpe", "deepseek-r1-qwen", "tekken"])
def transformed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Tokenizer]:
    """What transformers, and we, make of the same file."""
    if Version(transformers.__version__) < Version("5.18"):
        pytest.skip("before 5.18 transformers cuts texts as GPT-2 does, whatever the file's `tokenizer.ggml.pre` says")
    file = write(
        tmp_path_factory.mktemp("same"), smollm(), pre=request.param, bos_token=SPECIAL[0], add_bos_token=False
    )
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).backend_tokenizer, load(file)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
@example(text=" ".join(CORPUS))
def test_gguf_byte_level_tokens_equal_those_of_transformers(
    text: str, transformed: tuple[Tokenizer, Tokenizer]
) -> None:
    theirs, ours = transformed
    assert ours.encode(text).ids == theirs.encode(text).ids


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_gguf_every_pre_tokenizer_loses_no_text(pre: str, tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, smollm(), pre=pre, bos_token=SPECIAL[0], add_bos_token=False))
    for text in CORPUS:
        wanted = normalizers.NFC().normalize_str(text) if pre == "qwen2" else text
        assert tokenizer.decode(tokenizer.encode(text).ids) == wanted


def test_gguf_of_builtin_model_has_its_tokenizer_json(tmp_path: Path) -> None:
    source = model_directory(BUILTIN)
    named = json.loads((source / "tokenizer_config.json").read_text())
    file = write(tmp_path, Tokenizer.from_file(str(source / "tokenizer.json")), pre="smollm", **named)
    spec = (source / "tokenizer.json").read_text()
    assert json.loads(read_model_text(file / "tokenizer.json", max_bytes=1 << 28)) == json.loads(spec)
    ours, theirs = router_tokenizer.Tokenizer.load(file), router_tokenizer.Tokenizer.load(source)
    talk = [Message(role="system", content="Be kind."), Message(role="user", content="Hello <|end|> 12!")]
    first, second = (one.encode_chat(talk, add_generation_prompt=True, max_chars=10_000) for one in (ours, theirs))
    assert first == second
    assert ours.special_ids == theirs.special_ids


@pytest.mark.parametrize(("pre", "merges"), [("llama-bpe", False), ("tekken", False), ("smaug-bpe", True)])
def test_gguf_tokens_are_not_merged_from_parts_where_they_are_whole(pre: str, merges: bool, tmp_path: Path) -> None:
    made = smollm()
    spec = json.loads(made.to_str())
    spec["model"]["merges"] = spec["model"]["merges"][-1:]
    file = write(tmp_path, Tokenizer.from_str(json.dumps(spec)), pre=pre, bos_token=SPECIAL[0], add_bos_token=False)
    whole = next(token for token in sorted(made.get_vocab()) if token.isascii() and token.isalpha() and len(token) > 2)
    assert (load(file).encode(whole).ids == [made.token_to_id(whole)]) is not merges


@pytest.mark.parametrize(
    ("pre", "stated", "begins"),
    [
        ("llama-bpe", None, True),
        ("tekken", None, True),
        ("smollm", None, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
        ("llama-bpe", False, False),
    ],
)
def test_gguf_prompts_begin_as_the_file_or_its_kind_says(
    pre: str, stated: bool | None, begins: bool, tmp_path: Path
) -> None:
    named = {"bos_token": SPECIAL[0]} | ({} if stated is None else {"add_bos_token": stated})
    ours = load(
        write(
            tmp_path,
            smollm(),
            pre=pre,
            change=lambda writer: writer.add_add_eos_token(True),
            **named,
            eos_token=SPECIAL[1],
        )
    )
    plain = ours.encode("one two", add_special_tokens=False).ids
    first, last = ([ours.token_to_id(SPECIAL[i])] for i in (0, 1))
    assert ours.encode("one two").ids == [*(first if begins else []), *plain, *last]
    pair = ours.encode("one two", "one two").ids
    assert pair == 2 * ours.encode("one two").ids


def sentencepiece(folder: Path, *, prefix: bool | None = None, draws: int = 0) -> tuple[Path, dict[str, float]]:
    """Write a file of pieces of CORPUS with scores. Returns it, and the scores of normal pieces."""
    words = ["▁" + word for line in CORPUS for word in line.replace("▁", "").split()]
    chars = sorted({char for word in words for char in word})
    longer = {word[a:b] for word in words for a in range(len(word)) for b in range(a + 2, min(a + 7, len(word) + 1))}
    pieces = sorted(longer, key=lambda piece: (len(piece) + hash_of(piece, draws) % 5, piece))[:400]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "<|im_end|>", "<think>", *pieces, *chars]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, CONTROL, USER_DEFINED, *[NORMAL] * (len(pieces) + len(chars))]
    scores = [0.0] * 261 + [-float(i) for i in range(len(pieces) + len(chars))]
    tokens += ["[PAD1]", "[PAD2]"]
    types += [UNUSED] * 2
    scores += [-1000.0] * 2
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf", {t: s for t, s, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL}


def hash_of(piece: str, draws: int) -> int:
    return sum(ord(char) * (i + 3) * (draws + 7) for i, char in enumerate(piece))


def pieces_of(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's rule: of all neighbours that make a piece, join those of the best score, the leftmost first."""
    found = list(text)
    while pairs := [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(found)) if a + b in scores]:
        at = -max(pairs)[1]
        found[at : at + 2] = [found[at] + found[at + 1]]
    return found


@pytest.fixture(scope="module", params=[(True, 0), (True, 1), (False, 2)])
def pieces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, dict[str, float], bool]:
    prefix, draws = request.param
    file, scores = sentencepiece(tmp_path_factory.mktemp("pieces"), prefix=None if prefix else False, draws=draws)
    return load(file), scores, prefix


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.one_of(st.sampled_from([*WORDS, " ", "  ", "\n", "</s>", "<s>"]), st.text(max_size=3)), max_size=10
    ).map("".join)
)
def test_gguf_pieces_are_joined_by_their_scores(text: str, pieces: tuple[Tokenizer, dict[str, float], bool]) -> None:
    tokenizer, scores, prefix = pieces
    tokenizer.encode_special_tokens = True  # as the router does with clients' texts
    marked = (("▁" if prefix and text else "") + text).replace(" ", "▁")
    wanted: list[str] = []
    for piece in pieces_of(marked, scores):
        wanted += [piece] if piece in scores else [f"<0x{byte:02X}>" for byte in piece.encode()]
    found = tokenizer.encode(text, add_special_tokens=False)
    if "<think>" not in text:
        assert found.tokens == wanted
    assert tokenizer.decode(found.ids) == text.replace("▁", " ")


def test_gguf_pieces_and_control_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    file, _ = sentencepiece(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours = load(file)
    for text in CORPUS:  # none begins with a space: those transformers treats in its own way
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert ours.encode("a<|im_end|>b").tokens == ["<s>", "▁a", "<|im_end|>", "▁b"]
    assert ours.get_vocab_size() == len(ours.get_vocab()) == max(ours.get_vocab().values()) + 1  # no [PAD1]


def test_gguf_unused_tokens_at_the_end_are_left_out(tmp_path: Path) -> None:
    made = smollm()
    size = made.get_vocab_size(with_added_tokens=True)
    ours = load(write(tmp_path, made, pre="smollm", size=size + 5))
    assert ours.get_vocab_size(with_added_tokens=True) == size
    assert ours.token_to_id(f"[PAD{size}]") is None


def test_gguf_file_has_no_tokenizer_json_with_holes(tmp_path: Path) -> None:
    def unused(writer: gguf.GGUFWriter) -> None:
        types = [NORMAL] * size
        types[7] = UNUSED
        writer.add_token_types(types)

    made = smollm()
    size = made.get_vocab_size(with_added_tokens=True)
    ours = load(write(tmp_path, made, pre="smollm", change=unused))
    assert sorted(ours.get_vocab().values()) == list(range(size))


TOKENS = "tokenizer.ggml.tokens"
NUM_TOKENS = VOCAB_SIZE + len(SPECIAL) + len(PLAIN)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.add_tokenizer_model("t5"), r"tokenizer\.ggml\.model must be one of gpt2, llama, is 't5'"),
        (lambda w: w.add_tokenizer_pre("default"), r"tokenizer\.ggml\.pre must be one of llama-bpe, .*, is 'default'"),
        (lambda w: w.add_tokenizer_pre("made-up"), r"tokenizer\.ggml\.pre must be one of llama-bpe, .*, is 'made-up'"),
        (lambda w: w.kv_data[0].pop("tokenizer.ggml.pre"), r"tokenizer\.ggml\.pre is missing"),
        (lambda w: w.kv_data[0].pop(TOKENS), r"tokenizer\.ggml\.tokens is missing"),
        (lambda w: w.kv_data[0].pop("tokenizer.ggml.token_type"), r"tokenizer\.ggml\.token_type is missing"),
        (lambda w: w.kv_data[0].pop("tokenizer.ggml.merges"), r"tokenizer\.ggml\.merges is missing"),
        (lambda w: w.add_token_types([NORMAL]), f"token_type has 1 elements for {NUM_TOKENS} tokens"),
        (lambda w: w.add_token_list(["a"] * NUM_TOKENS), r"tokens 'a' is both token 0 and 1"),
        (
            lambda w: w.add_token_list(["x" * 2000] + [f"{i}" for i in range(NUM_TOKENS - 1)]),
            "token 0 has 2000 characters, at most",
        ),
        (lambda w: w.add_token_list([1]), r"tokens must be an array of texts"),
        (lambda w: w.add_token_merges(["ab"]), r"merges 'ab' does not join two tokens to a third"),
        (lambda w: w.add_token_merges(["a zq"]), r"merges 'a zq' does not join two tokens to a third"),
        (
            lambda w: w.add_bos_token_id(NUM_TOKENS),
            rf"bos_token_id must be an integer in \[0, {NUM_TOKENS - 1}\], is {NUM_TOKENS}",
        ),
        (lambda w: w.add_tokenizer_model("llama"), r"tokenizer\.ggml\.scores is missing"),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_scores([0.0])),
            f"scores has 1 elements for {NUM_TOKENS} tokens",
        ),
        (
            lambda w: (w.add_tokenizer_model("llama"), w.add_token_scores([-1000.0] * NUM_TOKENS)),
            r"scores are all -1000\.0: convert the model again",
        ),
        (
            lambda w: (w.kv_data[0].pop("tokenizer.ggml.bos_token_id"), w.add_add_bos_token(True)),
            r"bos_token_id is missing, and has to be put around every prompt",
        ),
    ],
)
def test_gguf_wrong_tokenizer_is_refused_by_key(
    change: Callable[[gguf.GGUFWriter], Any], match: str, tmp_path: Path
) -> None:
    file = write(tmp_path, smollm(), pre="smollm", change=change, bos_token=SPECIAL[0])
    with pytest.raises(ConfigError, match=match) as refused:
        router_tokenizer.Tokenizer.load(file)
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("model.gguf: ")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_gguf_damaged_file_is_refused_or_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        folder.mkdir()
        sentencepiece(folder)
    raw = bytearray((folder / "model.gguf").read_bytes())
    for position, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255)), max_size=4)
    ):
        raw[position] = value
    (folder / "spoilt.gguf").write_bytes(
        raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        with suppress(ConfigError):
            assert isinstance(json.loads(read_model_text(folder / "spoilt.gguf" / name, max_bytes=1 << 28)), dict)
