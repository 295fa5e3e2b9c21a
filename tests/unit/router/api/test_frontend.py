"""The validator of both servers: bounds, defaults, names."""

import asyncio

import pytest
from msgspec.structs import replace

from router.api.frontend import MAX_SALT_CHARS
from router.api.prompts import MAX_CHARS_PER_TOKEN, MAX_MESSAGES
from router.api.request.client_request import ClientRequest
from router.text.chat_template import Message
from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Overloaded
from tandem.values.sampling import SamplingParams
from tests.support.router.servers import fakes


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer)


HELLO = [Message(role="user", content="hello")]


async def test_frontend_absent_fields_get_defaults(parts: fakes.Servers) -> None:
    conversation = await parts.frontend.prepare_chat(HELLO, ClientRequest())
    size = len(conversation.request.prompt_token_ids)
    assert conversation.request.sampling.max_tokens == fakes.CONTEXT - size
    assert conversation.request.sampling.seed == 99
    assert conversation.request.deadline_s == 1000.0 + parts.config.request_timeout_s
    assert conversation.stop_token_ids == {fakes.END}
    (prompt,) = await parts.frontend.prepare_prompts(["hello"], ClientRequest())
    assert prompt.request.sampling.max_tokens == 16
    assert prompt.prompt_text == "hello"
    assert prompt.request.request_id != conversation.request.request_id


async def test_frontend_stated_fields_are_kept(parts: fakes.Servers) -> None:
    sampling = SamplingParams(ignore_eos=True, stop_token_ids=(9,), min_tokens=2, temperature=0.0)
    fields = ClientRequest(
        sampling=sampling, max_tokens=99, seed=-5, num_choices=3, priority=-2, time_left_s=2.0, stop=("x",)
    )
    (one,) = await parts.frontend.prepare_prompts([(5, 6)], fields)
    assert one.request.sampling == sampling._replace(max_tokens=99, seed=-5)
    assert (one.request.num_choices, one.request.priority, one.request.deadline_s) == (3, -2, 1002.0)
    assert one.stop_token_ids == {9}
    assert one.prompt_text is None


async def test_frontend_cache_salt_and_tenant_separate_block_names(parts: fakes.Servers) -> None:
    async def root(**fields: str) -> bytes:
        return (await parts.frontend.prepare_chat(HELLO, ClientRequest(**fields))).request.hash_root

    assert await root() == await root()
    roots = [await root(tenant=t, cache_salt=s) for t, s in (("a", "b"), ("ab", "x"), ("b", "a"), ("a", "bx"))]
    assert len({await root(), await root(tenant="a"), await root(cache_salt="a"), *roots}) == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"num_choices": 0}, "n"),
        ({"num_choices": 2**31}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"priority": 2**40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * (MAX_SALT_CHARS + 1)}, "cache_salt"),
        ({"stop": ("",)}, "stop"),
        ({"max_tokens": 2, "sampling": SamplingParams(min_tokens=3)}, "min_tokens"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(logit_bias={10**6: 1.0})}, "logit_bias"),
        ({"sampling": SamplingParams(stop_token_ids=(-1,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(num_logprobs=10**6)}, "top_logprobs"),
    ],
)
async def test_frontend_bounds_name_their_field(parts: fakes.Servers, fields: dict[str, object], param: str) -> None:
    for prepare in (
        parts.frontend.prepare_chat(HELLO, ClientRequest(**fields)),
        parts.frontend.prepare_prompts(["x"], ClientRequest(**fields)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await prepare
        assert caught.value.param == param


@pytest.mark.parametrize("top_k", [0, -1])
async def test_top_k_of_zero_or_minus_one_keeps_every_token(parts: fakes.Servers, top_k: int) -> None:
    fields = ClientRequest(sampling=SamplingParams(top_k=top_k))
    assert (await parts.frontend.prepare_chat(HELLO, fields)).request.sampling.top_k == 0
    with pytest.raises(InvalidRequest, match=r"top_k must be an integer in \[-1, 2147483647\]"):
        await parts.frontend.prepare_chat(HELLO, ClientRequest(sampling=SamplingParams(top_k=-2)))


async def test_frontend_unknown_model_is_refused(parts: fakes.Servers) -> None:
    with pytest.raises(ModelNotFound, match="tiny"):
        await parts.frontend.prepare_chat(HELLO, ClientRequest(model="gpt-4"))


async def test_frontend_context_error_names_the_figures(parts: fakes.Servers) -> None:
    fits = (5,) * (fakes.CONTEXT - 1)
    (one,) = await parts.frontend.prepare_prompts([fits], ClientRequest())
    assert one.request.sampling.max_tokens == 1
    for prompt in ((5,) * fakes.CONTEXT, "x " * fakes.CONTEXT, "x" * (fakes.CONTEXT * MAX_CHARS_PER_TOKEN + 1)):
        with pytest.raises(ContextLengthExceeded, match=str(fakes.CONTEXT)):
            await parts.frontend.prepare_prompts([prompt], ClientRequest())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (ClientRequest(sampling=SamplingParams(min_tokens=8)), "min_tokens"),
        (ClientRequest(max_tokens=8), "max_tokens"),
        (ClientRequest(max_tokens=8, reads_along=False, truncate_prompt_tokens=fakes.CONTEXT - 7), "max_tokens"),
    ],
)
async def test_frontend_answer_beyond_context_is_refused_with_figures(
    parts: fakes.Servers, fields: ClientRequest, param: str
) -> None:
    message = f"{param} must be at most 7, got 8: the prompt has {fakes.CONTEXT - 7} tokens, the model's context"
    with pytest.raises(ContextLengthExceeded, match=message) as caught:
        await parts.frontend.prepare_prompts([(5,) * (fakes.CONTEXT - 7)], fields)
    assert caught.value.param == param
    (one,) = await parts.frontend.prepare_prompts([(5,) * (fakes.CONTEXT - 8)], replace(fields))
    assert len(one.request.prompt_token_ids) + 8 <= fakes.CONTEXT


async def test_frontend_truncated_prompt_leaves_room_for_max_tokens(parts: fakes.Servers) -> None:
    prompt = tuple(range(4, 4 + fakes.CONTEXT // 2)) * 2
    for max_tokens, kept in ((None, fakes.CONTEXT - 1), (8, fakes.CONTEXT - 8)):
        fields = ClientRequest(max_tokens=max_tokens, truncate_prompt_tokens=-1)
        (one,) = await parts.frontend.prepare_prompts([prompt], fields)
        assert one.request.prompt_token_ids == prompt[-kept:]
        assert one.request.sampling.max_tokens == fakes.CONTEXT - kept


async def test_frontend_invalid_messages_are_refused(parts: fakes.Servers) -> None:
    for messages in (
        [],
        HELLO * (MAX_MESSAGES + 1),
        [Message(role="tool", content="x")],
        [Message(role="<|end|>", content="")],
    ):
        with pytest.raises(InvalidRequest) as caught:
            await parts.frontend.prepare_chat(messages, ClientRequest())
        assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        None,
        5,
        [[]],
        [1.5],
        [True],
        [-1],
        [10**6],
        ["a", [1]],
        [[1], "a"],
        ["a"] * 65,
        [1, "a"],
        [None],
        [[[1]]],
    ],
)
def test_frontend_invalid_prompt_is_refused(parts: fakes.Servers, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parts.frontend.prompts.parse_prompts(value)
    assert caught.value.param == "prompt"


def test_frontend_prompt_forms_are_parsed(parts: fakes.Servers) -> None:
    parse = parts.frontend.prompts.parse_prompts
    assert parse("a") == ["a"]
    assert parse(["a", "b"]) == ["a", "b"]
    assert parse([1, 2]) == [(1, 2)]
    assert parse([[1], [2, 3]]) == [(1,), (2, 3)]


async def test_frontend_bounds_texts_waiting_for_tokenization(tokenizer: Tokenizer) -> None:
    frontend = fakes.make_servers(tokenizer, RouterConfig(max_inflight_requests=2)).frontend
    long_text = "x" * 8192  # tokenized in a thread

    async def attempt() -> str:
        try:
            await frontend.prepare_prompts([long_text], ClientRequest())
        except (ContextLengthExceeded, Overloaded) as error:
            return type(error).__name__
        return "prepared"

    outcomes = await asyncio.gather(*(attempt() for _ in range(3)))
    assert sorted(outcomes) == ["ContextLengthExceeded", "ContextLengthExceeded", "Overloaded"]
    assert await attempt() == "ContextLengthExceeded"
