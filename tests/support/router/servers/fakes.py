"""What the tests of the servers share: a small tokenizer, a scripted Generator, and a frontend around them."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from router.api.frontend import Frontend
from router.api.request.client_request import ModelInfo
from router.api.request.generation_defaults import GenerationDefaults
from router.metrics.router_metrics import RouterMetrics
from router.sandbox.grammar_check import GrammarChecker
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from router.types.prompt_logprobs import ScoredPrompt
from router.types.requests import ChoiceDelta, ChoiceFinish, DeltaSink, RoutedRequest
from tandem.config.cluster import RouterConfig
from tandem.errors import ServingError
from tandem.pooling_model import PoolingModel
from tandem.telemetry.tracing import Tracer
from tandem.values.ids import RequestId
from tandem.values.outputs import (
    NO_PREDICTION_USE,
    CachedTokens,
    FinishReason,
    PhaseTimes,
    PredictionUse,
    SampledToken,
    TokenLogprob,
)

MODEL = "tiny"
SECRET = b"0123456789abcdef"
BOS, END, USER, ASSISTANT = 0, 1, 2, 3
SPECIALS = ["<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 512
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café 漢字 😀 hello world",
    "a stop string STOP here",
] * 4
TIMES = PhaseTimes(
    prefill_queue_s=0.25,
    prefill_s=0.5,
    transfer_s=0.125,
    decode_queue_s=0.25,
    decode_s=1.0,
    kv_byte_s=2048.0,
    cached=CachedTokens(prefill_pool=4, fetched=2, host=1),
)


def byte_level_spec() -> str:
    """A byte-level BPE trained on a few words; every byte has a token."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return library.to_str()


def sentencepiece_spec() -> str:
    """A Llama-2 style vocabulary: ▁ for spaces, byte tokens, Prepend normalizer."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"helowrdtfx", "▁hello", "▁wor", "ld"]
    merges: list[tuple[str, str]] = []
    vocab = {piece: i for i, piece in enumerate(pieces)}
    library = Library(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    return library.to_str()


def make_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    return Tokenizer(byte_level_spec(), ChatTemplate(template, {}) if template else None)


def write_model(directory: Path, template: str | None = TEMPLATE) -> None:
    (directory / "tokenizer.json").write_text(byte_level_spec())
    config = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass
class Script:
    """What the fake answers: deltas per choice, made from token ids."""

    tokens: Sequence[int] = ()
    reason: FinishReason = FinishReason.STOP
    cached_tokens: int = 7
    prediction: PredictionUse = NO_PREDICTION_USE
    error: ServingError | None = None
    error_after: int = 0
    per_delta: int = 1
    hang_after: int | None = None
    logprobs: bool = False
    worker: int = 0


@dataclass
class FakeGenerator:
    """Plays a script to every request; remembers what it was asked and what became of it."""

    script: Script = field(default_factory=Script)
    requests: list[RoutedRequest] = field(default_factory=list)
    stopped: list[tuple[RequestId, int]] = field(default_factory=list)
    began: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    open_streams: int = 0

    async def generate(self, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        self.requests.append(request)
        self.open_streams += 1
        self.began.set()
        script = self.script
        try:
            if request.scoring is not None:
                yield ChoiceDelta(0, scored=scored_prompt_of(request))
                if request.scoring.only:
                    script = Script(reason=FinishReason.LENGTH)
            for done in range(0, len(script.tokens) + 1, script.per_delta):
                if script.error is not None and done >= script.error_after:
                    raise script.error
                if script.hang_after is not None and done >= script.hang_after:
                    await asyncio.Event().wait()
                await asyncio.sleep(0)
                for choice in range(request.num_choices):
                    if tokens := script.tokens[done : done + script.per_delta]:
                        cached = None if done else script.cached_tokens
                        shown = tuple(map(self._token, tokens))
                        yield ChoiceDelta(choice_index=choice, tokens=shown, cached_tokens=cached, worker=script.worker)
            finish = ChoiceFinish(
                reason=script.reason,
                cached_tokens=script.cached_tokens,
                times=TIMES,
                computed_tokens=30,
                needed_tokens=20,
                prediction=script.prediction,
            )
            for choice in range(request.num_choices):
                yield ChoiceDelta(choice_index=choice, finish=finish)
        finally:
            self.open_streams -= 1
            self.closed.set()

    def admitted(self, requests: Sequence[RoutedRequest]) -> AbstractContextManager[None]:
        return nullcontext()

    async def run(self, request: RoutedRequest, reader: DeltaSink) -> None:
        async with aclosing(self.generate(request)) as deltas:
            async for delta in deltas:
                if reader.on_delta(delta):
                    await reader.ready()

    def finish_choice(self, request_id: RequestId, choice_index: int) -> None:
        self.stopped.append((request_id, choice_index))

    def _token(self, token_id: int) -> SampledToken:
        if not self.script.logprobs:
            return SampledToken(token_id=token_id)
        top = (TokenLogprob(token_id=token_id, logprob=-0.5), TokenLogprob(token_id=5, logprob=float("-inf")))
        return SampledToken(token_id=token_id, logprob=-0.5, top_logprobs=top)


def scored_prompt_of(request: RoutedRequest) -> ScoredPrompt:
    """Each token scores minus its id and is the third; the most likely are the first ids."""
    ask, prompt = request.scoring, request.prompt_token_ids
    assert ask is not None
    if ask.num_top is None:
        return ScoredPrompt(mean=[3.0 * len(prompt), 0.0, -4.0 * len(prompt)], times=TIMES)
    if ask.label_token_ids:
        return ScoredPrompt(logprobs=[-float(label) for label in ask.label_token_ids], times=TIMES)
    return ScoredPrompt(
        num_top=ask.num_top,
        logprobs=[-float(token) for token in prompt[1:]],
        ranks=[3 for _ in prompt[1:]],
        top_ids=[top for _ in prompt[1:] for top in range(ask.num_top)],
        top_logprobs=[-float(top) for _ in prompt[1:] for top in range(ask.num_top)],
        times=TIMES,
    )


class AnyGrammar:
    """A GrammarChecker that takes every grammar."""

    async def checked(self, grammar: str, param: str, tenant: str = "") -> str:
        return grammar


class Ready:
    """A Readiness that the test sets."""

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason

    def not_ready_reason(self, *, exclude_workers: bool = False) -> str | None:
        return None if exclude_workers else self.reason


@dataclass
class Servers:
    """One set of parts."""

    frontend: Frontend
    generator: FakeGenerator
    config: RouterConfig
    metrics: RouterMetrics
    ready: Ready

    @property
    def tokenizer(self) -> Tokenizer:
        return self.frontend.tokenizer

    def say(self, text: str, **script: object) -> list[int]:
        """Have the generator answer with `text` and the end token; returns the ids."""
        ids = [*self.tokenizer.encode(text), END]
        self.generator.script = Script(tokens=ids, **script)  # type: ignore[arg-type]
        return ids


def make_servers(
    tokenizer: Tokenizer,
    config: RouterConfig | None = None,
    clock: Callable[[], float] = lambda: 1000.0,
    mint_seed: Callable[[], int] = lambda: 99,
    tracer: Tracer | None = None,
    grammars: GrammarChecker | None = None,
    context: int = CONTEXT,
    defaults: GenerationDefaults = GenerationDefaults(),  # noqa: B008  # frozen
    pooling: PoolingModel | None = None,
) -> Servers:
    config = config or RouterConfig(max_body_bytes=1 << 20)
    model = ModelInfo(
        name=MODEL,
        fingerprint="f" * 32,
        max_model_len=context,
        vocab_size=tokenizer.size,
        eos_token_ids=frozenset({END}),
        created_s=1_700_000_000,
        defaults=defaults,
        pooling=pooling,
    )
    frontend = Frontend(
        model=model,
        tokenizer=tokenizer,
        config=config,
        secret=SECRET,
        clock=clock,
        mint_seed=mint_seed,
        tracer=tracer,
    )
    frontend.grammars = grammars
    return Servers(frontend, FakeGenerator(), config, RouterMetrics(MODEL), Ready())
