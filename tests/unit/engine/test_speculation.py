"""Speculation on a real model changes no token and no log probability, whatever is drafted and however often."""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.assembly import EngineParts, assemble
from engine.kernels.cpu.gemm import Arithmetic
from engine.scheduler.scheduler import Scheduler
from engine.speculation.proposer import Proposer, ProposerChain
from engine.speculation.sources import SOURCES
from engine.speculation.speculation import Speculation
from engine.types.request import FinishReason, Request, SampledToken
from tandem.values.block_hash import root_hash
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tests.support.engine import drafts
from tests.support.engine.paged_harness import needs
from tests.unit.engine.test_assembly import SPEC

ROOT = root_hash(secret=SPEC.secret, model_fingerprint="speculation")
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
TEXT = "The cat sat on the mat. The dog sat on the mat. The cat sat on"
VOCAB = 2048
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "nucleus": {"temperature": 0.8, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.6},
    # Of so few tokens that the answer repeats itself.
    "bias": {"temperature": 1.0, "logit_bias": {300: 60.0, 301: 60.0, 302: 59.0, 303: -100.0}, "min_tokens": 20},
    "grammar": {"temperature": 0.8, "grammar": GRAMMAR},
    "bad words": {"temperature": 0.0, "bad_words": ((300, 301), (320,))},
    "choice 0": {"temperature": 1.0},
    "choice 1": {"temperature": 1.0},
    "logprobs": {"temperature": 0.8, "num_logprobs": 3},
    "stops": {"temperature": 0.7, "stop_token_ids": tuple(range(300, 340))},
}
MAX_TOKENS = 24


@dataclass(slots=True)
class Answer:
    tokens: list[SampledToken] = field(default_factory=list)
    reason: FinishReason | None = None

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


@dataclass(slots=True, kw_only=True)
class Run:
    answers: list[Answer]
    num_steps: int = 0
    num_drafts: int = 0
    num_accepted: int = 0
    num_mixed: int = 0
    """Steps with drafts and a chunk of a prompt."""


class Model:
    """One assembled engine, driven step by step; each run has a scheduler of its own."""

    def __init__(self, kernels: str, dtype: str) -> None:
        self.is_exact = kernels == "auto"
        spec = replace(
            SPEC, kernels=kernels, dtype=dtype, deterministic=self.is_exact, num_blocks=96, max_running_requests=16,
            max_batched_tokens=80, max_waiting_requests=64,
        )  # fmt: skip
        self.parts: EngineParts = assemble(spec)
        self.tokenizer = Tokenizer.from_file(str(SPEC.model_path / "tokenizer.json"))
        self.prompt = self.tokenizer.encode(TEXT, add_special_tokens=False).ids
        self.expected = [self.run([self.request(number)]).answers[0] for number in range(len(WAYS))]
        """Each alone and without drafts."""

    def request(self, number: int) -> Request:
        name, way = list(WAYS.items())[number]
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=number, **way)
        params.validate(vocab_size=VOCAB)
        # Prompts of several lengths; the choices of one request have the same.
        prompt = [300 + number] * (0 if "choice" in name else number) + self.prompt
        request = Request(
            request_id=RequestId(name),
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            params=params if "choice" not in name else params._replace(seed=7),
            hash_root=ROOT,
            choice_index=int(name == "choice 1"),
            arrival_s=float(number),
        )
        if params.bad_words:
            request.guide = guides(params)
        if params.grammar is not None and self.parts.guides is not None:
            request.guide = self.parts.guides.guide(params.grammar)
        return request

    def run(self, requests: Sequence[Request], speculation: Speculation | None = None, **bounds: int) -> Run:
        config = replace(self.parts.config, **bounds)
        scheduler = Scheduler(config, self.parts.hasher, speculation=speculation)
        run = Run(answers=[Answer() for _ in requests])
        answers = {request.request_id: answer for request, answer in zip(requests, run.answers, strict=True)}
        for request in requests:
            scheduler.add(request)
        while (batch := scheduler.schedule(0.0)) is not None:
            output = scheduler.commit(batch, self.parts.runner.launch(batch).tokens())
            run.num_steps += 1
            run.num_drafts += batch.num_draft_tokens
            run.num_accepted += output.num_accepted_tokens
            run.num_mixed += bool(batch.num_draft_tokens and any(item.num_tokens > 1 for item in batch.items))
            for event in output.events:
                if event.token is not None:
                    answers[event.request_id].tokens.append(event.token)
                answers[event.request_id].reason = event.finish_reason
        scheduler.check_invariants()
        return run

    def known(self, request: Request) -> list[int]:
        return self.expected[list(WAYS).index(request.request_id)].ids

    def assert_same(self, found: Sequence[Answer], expected: Sequence[Answer]) -> None:
        for ours, theirs, name in zip(found, expected, WAYS, strict=False):
            assert ours.ids == theirs.ids, name
            assert ours.reason is theirs.reason, name
            if self.is_exact:
                assert ours.tokens == theirs.tokens, name
            for one, other in zip(ours.tokens, theirs.tokens, strict=True):
                assert [top.token_id for top in one.top_logprobs] == [top.token_id for top in other.top_logprobs]
                assert one.logprob == (None if other.logprob is None else pytest.approx(other.logprob, abs=1e-4))


def guides(params: SamplingParams) -> Any:
    from engine.sampling.constraints import BannedSequences

    return BannedSequences(params.bad_words)


@pytest.fixture(scope="module", params=["torch", "float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> Model:
    """Plain torch, whose results depend on a step's rows in their last bits; compiled kernels, whose do not."""
    if request.param == "torch":
        return Model("torch", "float32")
    needs(Arithmetic.FLOAT32)
    return Model("auto", request.param)


def sources(*names: str) -> Proposer:
    return ProposerChain([SOURCES[name]() for name in names])


PROPOSERS: dict[str, Callable[[Model], Proposer]] = {
    "oracle": lambda model: drafts.Oracle(model.known),
    "always wrong": lambda model: drafts.AlwaysWrong(model.known, VOCAB),
    "lookup": lambda _: sources("lookup"),
    "mixed": lambda model: ProposerChain([sources("grammar"), drafts.HalfRight(model.known, VOCAB, Random(1))]),
}


@pytest.mark.parametrize("chunk", [80, 7])
@pytest.mark.parametrize("kind", PROPOSERS)
def test_speculation_answers_of_a_batch_are_those_of_each_alone(model: Model, kind: str, chunk: int) -> None:
    speculation = drafts.speculation(PROPOSERS[kind](model), most=4)
    requests = [model.request(number) for number in range(len(WAYS))]
    run = model.run(requests, speculation, prefill_chunk_tokens=chunk)
    model.assert_same(run.answers, model.expected)
    assert run.num_drafts > (10 if kind == "lookup" else 50)
    if kind == "always wrong":
        assert not run.num_accepted
    if kind == "oracle":
        # An end is not drafted but sampled, so all are right.
        assert run.num_accepted == run.num_drafts
        assert run.num_steps < MAX_TOKENS + sum(len(request.token_ids) for request in requests) // chunk
    assert run.num_accepted or kind == "always wrong"
    assert run.num_mixed > 2 or chunk > 7


def test_speculation_answers_in_a_small_pool_survive_preemptions(model: Model) -> None:
    speculation = drafts.speculation(drafts.HalfRight(model.known, VOCAB, Random(2)), most=6)
    requests = [model.request(number) for number in range(len(WAYS))]
    model.assert_same(model.run(requests, speculation, num_blocks=20).answers, model.expected)
    assert any(request.num_preemptions for request in requests)


def test_speculation_request_alone_is_verified_in_recorded_steps(model: Model) -> None:
    """With all rows of one request, which are in order, recorded programs serve steps with drafts as well."""
    for number in (0, 2, 5):
        oracle = drafts.Oracle(model.known)
        run = model.run([model.request(number)], drafts.speculation(oracle, most=3))
        model.assert_same(run.answers, [model.expected[number]])
        assert run.num_accepted == oracle.num_kept > 0
        assert run.num_steps <= 3 + len(run.answers[0].tokens) // 2


def test_speculation_grammar_forces_tokens_and_answer_is_valid(model: Model) -> None:
    number = list(WAYS).index("grammar")
    run = model.run([model.request(number)], drafts.speculation(sources("grammar"), most=8))
    model.assert_same(run.answers, [model.expected[number]])
    jsonschema.validate(json.loads(model.tokenizer.decode(run.answers[0].ids, skip_special_tokens=True)), SCHEMA)
    assert run.num_accepted > 0


def test_speculation_suffix_cache_repeats_an_answer(model: Model) -> None:
    speculation = drafts.speculation(sources("suffix"), most=8)
    first = model.run([model.request(0)], speculation)
    again = model.run([model.request(0)], speculation)
    assert (first.num_drafts, again.num_steps <= 5) == (0, True)
    model.assert_same(again.answers, model.expected[:1])


def test_speculation_adaptive_changes_no_answer(model: Model) -> None:
    """Without measurements nothing is drafted; with them, whatever the pace decides."""
    speculation = drafts.speculation(drafts.HalfRight(model.known, VOCAB, Random(3)), most=4, adaptive=True)
    requests = [model.request(number) for number in range(len(WAYS))]
    run = model.run(requests, speculation)
    assert not run.num_drafts
    model.assert_same(run.answers, model.expected)
