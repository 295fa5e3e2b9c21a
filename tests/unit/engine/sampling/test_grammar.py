"""Answers follow a grammar in any batch, order of steps and worker; a real model and llguidance."""

import json
import re
from array import array
from random import Random

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.loader import load_model
from engine.sampling.grammar import LlGuides
from engine.sampling.sampler import Sampler, SampleRow
from engine.types.request import FinishReason
from engine.types.token_guide import follow, num_words
from tandem.errors import InvalidRequest
from tandem.model_path import model_directory
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.serve import Serve

PATH = model_directory("builtin")
NO_SPACES = {"whitespace_flexible": False}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": LLMatcher.grammar_from_json_schema(PERSON, NO_SPACES),
    "regex": LLMatcher.grammar_from_regex("(red|green) ball [0-9]{3}"),
    "choice": LLMatcher.grammar_from_lark('start: "yes" | "no"'),
}


def fits(kind: str, text: str) -> bool:
    if kind == "schema":
        jsonschema.validate(json.loads(text), PERSON)
        return True
    pattern = "(red|green) ball [0-9]{3}" if kind == "regex" else "yes|no"
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def model():
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels="torch", num_threads=1)
    return load_model(PATH, backend=select_backend(options))


@pytest.fixture(scope="module")
def guides(model):
    ends = sorted(model.config.eos_token_ids)
    return LlGuides(
        PATH / "tokenizer.json", vocab_size=model.config.vocab_size, eos_token_ids=ends, cache_bytes=1 << 30
    )


@pytest.fixture(scope="module")
def decode():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PATH / "tokenizer.json"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


def serve(model, *, pipelined: bool, **limits):
    return Serve(
        model, pipelined=pipelined, max_model_len=256, eos_token_ids=frozenset(model.config.eos_token_ids), **limits
    )


def ask(guides, kind, *, seed=0, temperature=1.0, output=(), num_logprobs=None):
    grammar = GRAMMARS.get(kind)
    params = SamplingParams(
        max_tokens=150, temperature=temperature, seed=seed, grammar=grammar, num_logprobs=num_logprobs
    )
    params.validate(vocab_size=2048)
    prompt = [Random(seed).randrange(300, 1000) for _ in range(20)]
    request = ledger.request(prompt, params=params, output=output, arrival_s=float(seed))
    if grammar is not None:
        request.guide = guides.guide(grammar)
    return request


@pytest.mark.parametrize("pipelined", [False, True])
def test_grammar_constrains_its_row_only(model, guides, decode, pipelined):
    """In a pool that is too small for all, so that some are preempted."""
    kinds = ["schema", None, "regex", "schema", None, "choice"] * 3
    with serve(model, pipelined=pipelined, num_blocks=28) as engine:
        outputs = engine.run([ask(guides, kind, seed=seed) for seed, kind in enumerate(kinds)])
        assert engine.preemptions
        alone = [engine.run([ask(guides, kind, seed=seed)])[0].ids for seed, kind in enumerate(kinds)]
    assert [answer.ids for answer in outputs] == alone
    for kind, answer in zip(kinds, outputs, strict=True):
        if kind is not None:
            assert answer.reason is FinishReason.STOP
            assert fits(kind, decode(answer.ids))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_grammar_answer_continues_on_another_worker(model, guides, temperature):
    with serve(model, pipelined=False) as engine:
        (whole,) = engine.run([ask(guides, "schema", seed=3, temperature=temperature)])
        for cut in range(0, len(whole.ids) + 1, 3):
            (rest,) = engine.run([ask(guides, "schema", seed=3, temperature=temperature, output=whole.ids[:cut])])
            assert [*whole.ids[:cut], *rest.ids] == whole.ids
            assert rest.reason is FinishReason.STOP


def test_grammar_forbids_tokens_and_keeps_model_logprobs(model, guides):
    vocab_size = model.config.vocab_size
    logits = torch.randn((3, vocab_size), generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    rows = [ask(guides, kind, seed=seed, num_logprobs=2) for seed, kind in enumerate(["choice", None, "choice"])]
    sampler = Sampler(eos_token_ids=sorted(model.config.eos_token_ids))
    chosen = sampler.choose(logits, [SampleRow(request, request.num_tokens) for request in rows])
    assert torch.equal(logits[1], before[1])
    may = logits.isfinite()
    assert 0 < may[0].sum() < 20
    assert may[0].equal(may[2])
    assert all(may[row, chosen.token_ids[row]] for row in range(3))
    # Logprobs are of the model's own distribution, as without a grammar.
    expected = before.log_softmax(-1).gather(-1, chosen.token_ids[:, None])[:, 0]
    assert torch.equal(chosen.logprobs[0].sampled, expected)


def test_grammar_mismatch_fails_only_its_request(model, guides):
    """As after corruption: tokens from another worker do not match the grammar."""
    with serve(model, pipelined=False) as engine:
        spoilt, sound = engine.run([ask(guides, "schema", output=[700, 701]), ask(guides, "schema", seed=1)])
    assert (spoilt.ids, spoilt.reason) == ([], FinishReason.ERROR)
    assert sound.reason is FinishReason.STOP


def test_grammar_guide_follows_existing_tokens(guides):
    guide = guides.guide(GRAMMARS["choice"])
    bits = np.zeros(num_words(2048), np.int32)
    guide.allow(bits)
    first = int(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))[0])
    assert guide.accept(first)
    assert follow(guide, array("i", [first]))
    assert guide.num_tokens == 1
    assert not follow(guide, array("i", [first, 1999]))


@pytest.mark.parametrize("grammar", ["nothing that it reads", LLMatcher.grammar_from_regex("(a")])
def test_grammar_invalid_is_refused(guides, grammar):
    with pytest.raises(InvalidRequest, match="grammar: cannot be compiled"):
        guides.guide(grammar)


def test_grammar_without_library_or_tokenizer_is_refused(tmp_path, monkeypatch):
    lost = LlGuides(tmp_path / "tokenizer.json", vocab_size=2048, eos_token_ids=[0], cache_bytes=1 << 30)
    with pytest.raises(InvalidRequest, match="tokenizer"):
        lost.guide(GRAMMARS["choice"])
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(InvalidRequest, match="no llguidance"):
        lost.guide(GRAMMARS["choice"])


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("grammar", {"grammar": ""}),
        ("grammar", {"grammar": "x" * (256 * 1024 + 1)}),
        ("ignore_eos", {"grammar": "x", "ignore_eos": True}),
        ("min_tokens", {"grammar": "x", "min_tokens": 1}),
    ],
)
def test_grammar_unsupported_structure_is_refused(field, params):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**params).validate(vocab_size=100)
    assert refused.value.param == field


def test_grammar_fork_leaves_guide_as_it_was(guides):
    guide, twin = guides.guide(GRAMMARS["schema"]), guides.guide(GRAMMARS["schema"])
    bits = [np.zeros(num_words(2048), dtype=np.int32) for _ in range(2)]
    while not twin.is_over:
        ahead = guide.fork()
        for _ in range(3):
            if not ahead.is_over:
                bits[1].fill(0)
                ahead.allow(bits[1])
                ahead.accept(int(np.flatnonzero(np.unpackbits(bits[1].view(np.uint8), bitorder="little"))[-1]))
        for one, row in zip((guide, twin), bits, strict=True):
            row.fill(0)
            one.allow(row)
        assert np.array_equal(*bits)
        allowed = np.unpackbits(bits[0].view(np.uint8), bitorder="little")
        assert not guide.fork().accept(int(np.flatnonzero(allowed == 0)[-1]))
        token = int(np.flatnonzero(allowed)[0])
        assert guide.accept(token)
        assert twin.accept(token)
    assert guide.is_over
    assert not guide.has_refused


def test_grammar_forced_tokens_are_the_only_text(guides, decode):
    guide = guides.guide(GRAMMARS["schema"])
    # The quote that follows is forced as well, but many tokens begin with it: which one is a choice.
    assert decode(guide.forced(20)) == '{"name":'
    assert len(guide.forced(2)) == 2
    assert guide.num_tokens == 0
    assert not guides.guide(GRAMMARS["regex"]).forced(8)  # red or green
