"""gRPC's final messages: the best of several, votes, beams; and stored marks and names."""

from typing import Any

import pytest

from router.api.named_cache_prompts import NamedCacheService
from router.text.conversation import Message
from router.text.tokenizer import Tokenizer
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb
from tests.support.router.delta_readers import QuickReader
from tests.support.router.servers import fakes
from tests.support.router.servers.both_servers import answers_of, grpc_request, service_of
from tests.support.router.servers.http_client import HELLO
from tests.support.router.servers.named_cache_world import LONG, World
from tests.support.router.servers.several_answers import TEXTS, Various, size_of

PLAIN: dict[str, Any] = {"prompt": "a"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    made = fakes.make_servers(tokenizer)
    made.generator = Various()
    made.generator.tokenizer = tokenizer
    return made


async def ask(parts: fakes.Servers, body: dict[str, Any]) -> list[pb.GenerateResponse]:
    return await answers_of(service_of(parts), grpc_request(body))


def texts_of(answers: list[pb.GenerateResponse]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for answer in answers:
        if not answer.prompt_logprobs:
            texts[answer.choice_index] = texts.get(answer.choice_index, "") + answer.text
    return texts


async def test_grpc_best_of_returns_likeliest_choices(parts: fakes.Servers) -> None:
    answers = await ask(parts, PLAIN | {"n": 3, "best_of": 5, "prompt_logprobs": 0, "prompt": [5, 6, 7]})
    assert texts_of(answers) == {0: TEXTS[1], 1: TEXTS[3], 2: TEXTS[2]}
    assert [place.token_id for place in answers[0].prompt_logprobs] == [6, 7]
    assert not any(answer.logprobs for answer in answers)
    assert [answer.HasField("usage") for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[-1].usage.completion_tokens == size_of(parts.tokenizer)
    shown = await ask(parts, HELLO | {"best_of": 2, "logprobs": True})
    assert sum(len(answer.logprobs) for answer in shown) == len(parts.tokenizer.encode(TEXTS[1]))


async def test_grpc_large_answer_is_split_into_small_messages(
    parts: fakes.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.grpc.answer_messages._VALUES_PER_MESSAGE", 2)
    answers = await ask(parts, PLAIN | {"n": 2, "best_of": 3, "logprobs": 0})
    assert texts_of(answers) == {0: TEXTS[1], 1: TEXTS[2]}
    assert max(len(answer.token_ids) for answer in answers) == 2
    ids = [token for answer in answers if answer.choice_index == 0 for token in answer.token_ids]
    assert ids == parts.tokenizer.encode(TEXTS[1])
    assert [answer.choice_index for answer in answers if answer.finish_reason] == [0, 1]


async def test_grpc_vote_returns_winner(parts: fakes.Servers) -> None:
    answers = await ask(parts, HELLO | {"n": 5, "vote": True, "vote_pattern": "[0-9]"})
    assert texts_of(answers) == {0: TEXTS[0]}
    assert (answers[-1].vote.answer, answers[-1].vote.votes, answers[-1].vote.of) == ("5", 2, 5)
    with pytest.raises(InvalidRequest) as refused:
        await ask(parts, HELLO | {"vote": True, "vote_pattern": "("})
    assert refused.value.param == "vote_pattern"


async def test_grpc_beam_search_returns_best_beams(parts: fakes.Servers) -> None:
    options = {"n": 2, "best_of": 4, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    answers = await ask(parts, PLAIN | options)
    (routed,) = parts.generator.requests
    assert routed.beams is not None
    assert (routed.num_choices, routed.beams.num_beams, routed.beams.length_penalty) == (2, 4, 0.5)
    assert routed.beams.early_stopping == "never"
    assert texts_of(answers) == {0: TEXTS[0], 1: TEXTS[1]}


async def test_grpc_unstreamed_answer_has_http_bounds(tokenizer: Tokenizer) -> None:
    config = fakes.RouterConfig(max_answer_values=64)
    bounded = fakes.make_servers(tokenizer, config)
    bounded.say("hello")
    for more in ({"best_of": 2}, {"n": 2, "vote": True}, {"n": 2, "use_beam_search": True}):
        with pytest.raises(InvalidRequest) as refused:
            await ask(bounded, PLAIN | {"max_tokens": 65} | more)
        assert refused.value.param == "max_tokens"
    assert await ask(bounded, PLAIN | {"max_tokens": 65})


def chat_of(*texts: str) -> pb.GenerateRequest:
    return grpc_request({"messages": [{"role": "user", "content": text} for text in texts]})


async def test_grpc_breakpoints_are_pinned(tokenizer: Tokenizer) -> None:
    world = World(tokenizer)
    request = chat_of(LONG, "and now")
    request.chat.messages[0].cache_control.ttl = "1h"
    await answers_of(service_of(world.parts), request)
    (pin,) = world.parts.generator.requests[0].pins
    assert pin.ttl_s == 3600.0
    assert 0 < pin.num_tokens <= len(tokenizer.encode(LONG)) + 2
    assert len(world.keeper.orders) == 1
    request.chat.messages[0].cache_control.ClearField("ttl")
    await answers_of(service_of(world.parts), request)
    assert world.parts.generator.requests[1].pins[0].ttl_s == 300.0


async def test_grpc_conversation_with_named_cache_uses_it(tokenizer: Tokenizer) -> None:
    world = World(tokenizer)
    named = NamedCacheService.from_frontend(world.parts.frontend)
    assert named is not None

    async def compute(prepared: Any) -> None:
        await world.parts.generator.run(prepared.request, QuickReader())

    expires_s = world.unix_s + 60.0
    beginning = [Message(role="user", content=LONG)]
    cache = await named.create("", beginning, expires_s=expires_s, display_name=None, compute=compute)
    message = chat_of("what does it do")
    message.cached_content = cache.name
    await answers_of(service_of(world.parts), message)
    request = world.parts.generator.requests[-1]
    assert request.prompt_token_ids[: cache.num_tokens] == cache.token_ids[: cache.num_tokens]
    assert [pin.name for pin in request.pins] == [cache.name]


def unknown_in(message: Any) -> None:
    message.MergeFromString(b"\xf8\x07\x01")  # field 127


@pytest.mark.parametrize(
    ("body", "change", "param"),
    [
        (HELLO, lambda r: unknown_in(r), "127"),
        (HELLO, lambda r: unknown_in(r.sampling), "sampling"),
        (HELLO, lambda r: unknown_in(r.chat.messages[0]), "chat"),
        (HELLO, lambda r: unknown_in(r.chat_template_kwargs["x"]), "chat_template_kwargs"),
        (PLAIN, lambda r: r.tools.add(name="f"), "tools"),
        (PLAIN, lambda r: setattr(r.tool_choice, "mode", "required"), "tool_choice"),
        (PLAIN, lambda r: setattr(r, "cached_content", "cachedContents/x"), "cached_content"),
        (HELLO, lambda r: setattr(r, "cached_content", "cachedContents/x"), "cached_content"),
        (HELLO, lambda r: setattr(r.chat.messages[0].cache_control, "ttl", "2h"), "cache_control"),
        (HELLO, lambda r: r.tools.add(name="f", parameters="[]"), "tools"),
        (HELLO, lambda r: r.tools.add(name="f", parameters='{"a": 1, "a": 2}'), "tools"),
        (HELLO, lambda r: r.tools.add(name="f", parameters=" " * (1 << 20)), "tools"),
        (HELLO | {"best_of": 2, "stream": True}, lambda r: None, "best_of"),
        (HELLO | {"vote": True, "stream": True}, lambda r: None, "vote"),
        (HELLO | {"use_beam_search": True, "stream": True}, lambda r: None, "use_beam_search"),
        (HELLO | {"use_beam_search": True, "vote_pattern": "a"}, lambda r: None, "use_beam_search"),
        (HELLO | {"prompt_logprobs": 1, "stream": True}, lambda r: None, "prompt_logprobs"),
        (HELLO, lambda r: setattr(r, "early_stopping", 9), "early_stopping"),
        (HELLO, lambda r: setattr(r, "length_penalty", float("nan")), "length_penalty"),
    ],
)
async def test_grpc_invalid_selection_is_refused(
    parts: fakes.Servers, body: dict[str, Any], change: Any, param: str
) -> None:
    request = grpc_request(body)
    change(request)
    with pytest.raises(InvalidRequest) as refused:
        await answers_of(service_of(parts), request)
    assert refused.value.param == param
    assert not parts.generator.requests


async def test_grpc_breakpoint_with_named_cache_is_refused(parts: fakes.Servers) -> None:
    request = chat_of(*["a"] * 5)
    for turn in request.chat.messages:
        turn.cache_control.SetInParent()
    with pytest.raises(InvalidRequest, match="at most 4"):
        await answers_of(service_of(parts), request)
    request.cached_content = "cachedContents/x"
    with pytest.raises(InvalidRequest, match="cannot be combined") as refused:
        await answers_of(service_of(parts), request)
    assert refused.value.param == "cache_control"
