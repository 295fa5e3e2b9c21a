"""Unstreamed answers: their maximum size, and building them without blocking the event loop."""

import asyncio
from typing import Any

import orjson
import pytest

from router.api.answer.choice_text import TextCollector, TextDelta
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.api.request.generation_defaults import GenerationDefaults
from router.api.request_meter import RequestMeter
from router.api.text_stream import read_text
from router.http.openai import whole_answer
from router.http.openai.answers import AnswerFormat, AnswerHead, ChatAnswer, CompletionAnswer
from router.http.openai.whole_answer import whole_content
from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.values.outputs import SampledToken, TokenLogprob
from tandem.values.sampling import SamplingParams
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of, events

HEAD = AnswerHead(id="x-1", created_s=1, model=fakes.MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def small(tokenizer: Tokenizer) -> fakes.Servers:
    parts = fakes.make_servers(tokenizer, RouterConfig(max_answer_values=10_000))
    parts.say("hello")
    return parts


LARGE: dict[str, Any] = {"prompt": ["a", "b"], "n": 4, "max_tokens": 100, "logprobs": 20}


@pytest.mark.parametrize("fewer", [{"prompt": "a"}, {"n": 2}, {"max_tokens": 59}, {"logprobs": 10}, {"stream": True}])
async def test_unstreamed_answer_beyond_memory_bound_is_refused(small: fakes.Servers, fewer: dict[str, Any]) -> None:
    async with client_of(small) as client:
        refused = await client.post(PLAIN, json=LARGE)
        assert refused.status_code == 400
        error = error_of(refused)
        assert error["param"] == "max_tokens"
        assert "prompts x n x max_tokens x (1 + [top_]logprobs) is 16800" in error["message"]
        assert "10000" in error["message"]
        assert not small.generator.requests
        assert (await client.post(PLAIN, json=LARGE | fewer)).status_code == 200


async def test_unstreamed_answer_without_length_is_bounded(small: fakes.Servers) -> None:
    async with client_of(small) as client:
        body = HELLO | {"n": 16, "logprobs": True, "top_logprobs": 20}
        assert (await client.post(CHAT, json=body)).status_code == 200
        assert (await client.post(CHAT, json=body | {"stream": True})).status_code == 200
    whole, streamed = small.generator.requests
    assert whole.sampling.max_tokens == 10_000 // (16 * 21)
    assert streamed.sampling.max_tokens > 400


async def test_model_default_length_is_cut_to_memory_bound(tokenizer: Tokenizer) -> None:
    defaults = GenerationDefaults(max_tokens=100)
    parts = fakes.make_servers(tokenizer, RouterConfig(max_answer_values=10_000), defaults=defaults)
    parts.say("hello")
    async with client_of(parts) as client:
        answer = await client.post(CHAT, json=HELLO | {"n": 16, "logprobs": True, "top_logprobs": 20})
    assert answer.status_code == 200, answer.text
    assert parts.generator.requests[0].sampling.max_tokens == 10_000 // (16 * 21)


async def test_default_memory_bound_allows_whole_context(tokenizer: Tokenizer) -> None:
    frontend = fakes.make_servers(tokenizer).frontend
    sampling = SamplingParams(num_logprobs=20)
    fields = ClientRequest(sampling=sampling, num_choices=16, max_tokens=fakes.CONTEXT - 1, reads_along=False)
    (one,) = await frontend.prepare_prompts([(5,)], fields)
    assert one.request.sampling.max_tokens == fakes.CONTEXT - 1


def choice_of(count: int, alternatives: int) -> TextDelta:
    """A choice with different content at each index."""
    tokens = tuple(
        SampledToken(
            token_id=i % 300,
            logprob=-i / 7,
            top_logprobs=tuple(TokenLogprob(token_id=(i + j) % 300, logprob=-i / 7 - j) for j in range(alternatives)),
        )
        for i in range(count)
    )
    return TextDelta(choice_index=0, text="text", tokens=tokens)


@pytest.mark.parametrize("shape", [ChatAnswer, CompletionAnswer])
@pytest.mark.parametrize(("count", "alternatives"), [(1000, 20), (5000, 0), (1, 20)])
async def test_logprobs_are_rendered_in_slices_between_loop_turns(
    small: fakes.Servers, shape: type[ChatAnswer | CompletionAnswer], count: int, alternatives: int
) -> None:
    prepared = await small.frontend.prepare_prompts(["a"], ClientRequest())
    choice = choice_of(count, alternatives)
    expected: AnswerFormat = shape(HEAD, prepared, small.tokenizer)
    whole = expected.whole([choice], [expected.logprobs(choice)])
    answer: AnswerFormat = shape(HEAD, prepared, small.tokenizer)
    sizes: list[int] = []
    show, turns = answer.logprobs, 0

    def noted(delta: TextDelta) -> dict[str, Any] | None:
        sizes.append(sum(1 + len(token.top_logprobs) for token in delta.tokens))
        return show(delta)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    answer.logprobs = noted  # type: ignore[method-assign]
    beside = asyncio.create_task(other())
    content = await whole_content(answer, [choice])
    beside.cancel()
    assert orjson.loads(orjson.dumps(content)) == orjson.loads(orjson.dumps(whole))
    assert sum(sizes) == count * (1 + alternatives)
    assert max(sizes) <= 2048
    assert turns >= len(sizes)


async def test_large_unstreamed_answer_equals_stream(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beyond the size of one slice, one part of text and one body chunk."""
    parts = fakes.make_servers(tokenizer)
    monkeypatch.setattr(whole_answer, "_PIECE_BYTES", 10_000)
    parts.say("hello wörld 😀 " * 500, per_delta=7, logprobs=True)
    request = {"prompt": "a", "logprobs": 2, "return_token_ids": True}
    async with client_of(parts) as client:
        answer = await client.post(PLAIN, json=request)
        (whole,) = answer.json()["choices"]
        streamed = [
            event["choices"][0] for event in events((await client.post(PLAIN, json=request | {"stream": True})).text)
        ]
    assert whole["text"] == "".join(choice["text"] for choice in streamed) == "hello wörld 😀 " * 500
    shown = [choice["logprobs"] for choice in streamed if choice["logprobs"]]
    assert whole["logprobs"] == {name: [one for each in shown for one in each[name]] for name in shown[0]}
    assert whole["finish_reason"] == "stop"


async def test_long_answer_is_detokenized_on_arrival(tokenizer: Tokenizer) -> None:
    """No single turn of the loop detokenizes the whole answer."""
    parts = fakes.make_servers(tokenizer)
    parts.say("hello " * 3000, per_delta=32)
    prepared = await parts.frontend.prepare_prompts(["a"], ClientRequest(reads_along=False))
    parts_shown: list[TextDelta] = []

    class Watched(TextCollector):
        def on_delta(self, delta: TextDelta) -> bool:
            parts_shown.append(delta)
            return super().on_delta(delta)

    def meter(one: PreparedRequest) -> RequestMeter:
        return RequestMeter(parts.metrics, parts.frontend.clock, prompt_tokens=1, choices=1)

    whole = Watched()
    await read_text(parts.generator, prepared, parts.tokenizer, meter, whole)
    sizes = [len(delta.tokens) for delta in parts_shown]
    assert max(sizes) == 256
    assert sum(sizes) == len(parts.generator.script.tokens)
    (choice,) = whole.choices()
    assert choice.text == "hello " * 3000
    assert parts.metrics.generation_tokens.value == sum(sizes)
