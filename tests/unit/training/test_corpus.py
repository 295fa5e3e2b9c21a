"""The generators are seeded, the tokenizer is lossless, and the chat template renders the training format."""

import json
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tandem_bench import stories
from training import chats, needles
from training.checkpoint import Progress, export, load_checkpoint, save_checkpoint
from training.corpus import Corpus, Mix, split_text, target_weights, tokenizer_texts
from training.initialize import initialize
from training.model import LlamaModel, ModelConfig
from training.needles import Shape
from training.schedule import CURRICULUM, TOKENS_PER_STEP, learning_rate_scale, row_length, stage_at
from training.tokenizer import (
    ASSISTANT_ID,
    BOS_ID,
    CHAT_TEMPLATE,
    END_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    USER_ID,
    messages,
    render,
    train_tokenizer,
)
from training.train import make_optimizers, weighted_loss

TEXT = "First Citizen:\nSpeak, speak.\n\nAll:\nWe know it.\n" * 40
MIX = Mix(plain=0.3, needle=0.4, json=0.2, talk=0.1, copy=0.1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(tokenizer_texts(0, TEXT, num_documents=200))


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer) -> Corpus:
    return Corpus(tokenizer, TEXT)


@pytest.mark.parametrize("length", [128, 512])
def test_corpus_rows_depend_only_on_seed(corpus: Corpus, length: int) -> None:
    first = [corpus.row(Random("0:7"), MIX, length) for _ in range(2)]
    assert first[0] == first[1]
    assert len(first[0]) == length
    assert corpus.row(Random("0:8"), MIX, length) != first[0]


def test_tokenizer_is_reproducible(tokenizer: Tokenizer) -> None:
    again = train_tokenizer(tokenizer_texts(0, TEXT, num_documents=200))
    assert again.to_str() == tokenizer.to_str()


@pytest.mark.parametrize(
    "text",
    ["", " ", "a", " a  b ", "tab\tand\r\nlines\n\n", "naïve café — 日本語 🙂🏽", "\x00\x7f", "12 345", "<|end|> x"],
)
def test_tokenizer_decode_restores_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_digits_and_special_tokens_are_single(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("4821").ids) == 4
    for index, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(token).ids == [index]


def test_chat_template_writes_what_training_reads() -> None:
    template = ImmutableSandboxedEnvironment().from_string(CHAT_TEMPLATE)
    for seed in range(20):
        chat = chats.talk_chat(Random(seed))
        prompt = template.render(messages=messages(chat), add_generation_prompt=True)
        assert prompt + chat.turns[-1].assistant + "<|end|>" == render(chat)


def test_json_answers_parse_and_repeat_requested_values() -> None:
    for seed in range(50):
        turn = chats.json_turn(Random(seed))
        record = json.loads(turn.assistant)
        assert json.dumps(record) == turn.assistant
        assert all(name in turn.user and str(value).lower() in turn.user.lower() for name, value in record.items())


@pytest.mark.parametrize("length", [128, 512, 1024])
def test_needle_is_stated_once_and_fits(corpus: Corpus, length: int) -> None:
    rng = Random(length)
    shape = Shape(num_tokens=length, num_facts=6, num_questions=1, vary=False)
    chat = needles.needle_chat(rng, shape, needles.story_filler(rng), corpus.count)
    (turn,) = chat.turns
    key = turn.user.removesuffix("?").rsplit(" ", 1)[1]
    assert turn.user.count(f"The code of {key} is {turn.assistant}.") == 1
    assert turn.user.count("The code of") == 6
    assert length * 0.8 < len(corpus.encode(render(chat))) <= length


def test_story_keeps_its_animal() -> None:
    assert "fox" in stories.tell(Random(1), animal="fox", short=True).text
    assert stories.tell(Random(1)) == stories.tell(Random(1))


def test_real_text_fills_and_its_end_is_held_out(corpus: Corpus) -> None:
    trained, held_out = split_text("a" * 95 + "b" * 5)
    assert (set(trained), set(held_out)) == ({"a"}, {"b"})
    lines = tuple(line for line in TEXT.splitlines() if line)
    assert set(islice(needles.line_filler(Random(0), lines), 30)) <= set(lines)


def test_target_weights_favour_answers_and_skip_stated_digits() -> None:
    digit, word = 10, 11
    row = np.array([[BOS_ID, USER_ID, word, digit, END_ID, ASSISTANT_ID, digit, END_ID, PAD_ID]])
    (weights,) = target_weights(row, frozenset([digit])).tolist()
    assert weights == pytest.approx([0.0, 0.0, 0.2, 0.0, 0.2, 0.0, 4.0, 4.0, 0.0])


def test_schedule_covers_the_run_and_decays_to_zero() -> None:
    assert stage_at(0.0) is CURRICULUM[0]
    assert stage_at(1.0) is CURRICULUM[-1]
    assert row_length(Random(0), CURRICULUM[0]) == 128
    assert all(TOKENS_PER_STEP % length == 0 for stage in CURRICULUM for length, _ in stage.lengths)
    assert learning_rate_scale(0, 0.0) == pytest.approx(0.01)
    assert learning_rate_scale(10_000, 1.0) == 0.0


def test_resuming_restores_weights_optimizers_and_progress(tmp_path: Path) -> None:
    config = ModelConfig(hidden_size=32, intermediate_size=32, num_layers=1, num_heads=4, head_dim=8)
    torch.manual_seed(0)
    rows = torch.randint(6, 100, (2, 17))
    weights = torch.ones(2, 16)

    def step(model: LlamaModel, optimizers: tuple[torch.optim.Optimizer, ...]) -> None:
        weighted_loss(model, rows, weights).backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    model = LlamaModel(config)
    optimizers = make_optimizers(model)
    step(model, optimizers)
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, model, optimizers, Progress(seed=3, step=1, num_tokens=32, elapsed_s=0.5))
    other = LlamaModel(config)
    other_optimizers = make_optimizers(other)
    assert load_checkpoint(path, other, other_optimizers).step == 1
    step(model, optimizers)
    step(other, other_optimizers)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_export_loads_in_transformers_with_the_same_logits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    config = ModelConfig(hidden_size=32, intermediate_size=32, num_layers=2, num_heads=4, head_dim=8)
    torch.manual_seed(0)
    model = LlamaModel(config)
    model.load_state_dict({n: t.to(torch.bfloat16).float() for n, t in model.state_dict().items()})
    export(tmp_path, model, config, tokenizer)
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, 2048, (1, 40))
    torch.testing.assert_close(peer(ids).logits, model(ids), rtol=1e-4, atol=1e-5)
    chat = chats.json_chat(Random(0))
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    prompt = loaded.apply_chat_template(messages(chat), tokenize=False, add_generation_prompt=True)
    assert render(chat).startswith(prompt)
    assert loaded(prompt)["input_ids"] == tokenizer.encode(prompt).ids
    assert loaded.eos_token_id == END_ID


def test_first_layer_initially_attends_backwards() -> None:
    config = ModelConfig()
    torch.manual_seed(0)
    model = LlamaModel(config)
    initialize(model, config)
    tokens = torch.randint(6, 2048, (1, 64))
    tokens[0, 60] = 7
    changed = tokens.clone()
    changed[0, 40] = 8
    layer = model.model.layers[0]
    hidden = [layer.input_layernorm(model.model.embed_tokens(ids)) for ids in (tokens, changed)]
    before, after = (layer.self_attn(x, model.cos[:64], model.sin[:64]) for x in hidden)
    moved = (before - after).norm(dim=-1)[0]
    assert moved[:40].max() == 0.0
    assert moved[41:47].min() > 10 * moved[52:].max()
