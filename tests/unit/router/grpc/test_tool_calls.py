"""Tools over gRPC, in process: the same calls as HTTP, in deltas, resumed streams and conversations."""

from typing import Any

import pytest

from router.text.tokenizer import Tokenizer
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2
from tandem.v1 import inference_pb2 as pb
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.both_servers import answers_of, grpc_request, service_of
from tests.support.router.servers.http_client import CHAT, HELLO, client_of
from tests.support.router.servers.tool_calls import CALLS, CLOCK, NAMED, TOOLS, WEATHER

MANY = 12
VARIABLE_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if think %}<think>{{ level }}{% endif %}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


def parts_of(tokenizer: Tokenizer, *, seed: int = 99, **script: Any) -> fakes.Servers:
    parts = fakes.make_servers(tokenizer, mint_seed=lambda: seed, grammars=fakes.AnyGrammar(), context=4096)
    parts.say(CALLS, **script)
    return parts


def put_together(answers: list[pb.GenerateResponse]) -> dict[int, dict[str, Any]]:
    """Joined by choice, as a streaming client does."""
    choices: dict[int, dict[str, Any]] = {}
    for answer in answers:
        has = choices.setdefault(answer.choice_index, {"content": "", "calls": [], "finish": 0})
        has["content"] += answer.text
        for part in answer.tool_calls:
            if part.index == len(has["calls"]):
                has["calls"].append({"id": part.id, "name": part.name, "arguments": ""})
                assert part.id
                assert part.name
            else:
                assert (part.index, part.id, part.name) == (len(has["calls"]) - 1, "", "")
            has["calls"][-1]["arguments"] += part.arguments
        has["finish"] = answer.finish_reason or has["finish"]
    return choices


async def test_grpc_tool_calls_equal_http(tokenizer: Tokenizer) -> None:
    parts = parts_of(tokenizer)
    async with client_of(parts) as client:
        message = (await client.post(CHAT, json=TOOLS)).json()["choices"][0]["message"]
    expected = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    for per_delta in (1, 3, 1000):
        parts.generator.script.per_delta = per_delta
        choices = put_together(await answers_of(service_of(parts), grpc_request(TOOLS | {"n": 2})))
        for has in choices.values():
            assert has["content"] == message["content"] == "I look."
            assert [(call["name"], call["arguments"]) for call in has["calls"]] == expected
            assert has["finish"] == common_pb2.FINISH_REASON_TOOL_CALLS
        assert len({call["id"] for has in choices.values() for call in has["calls"]}) == 4
    over_http, *over_grpc = (request.prompt_token_ids for request in parts.generator.requests)
    assert set(over_grpc) == {over_http}


async def test_grpc_stream_resumes_inside_a_call(tokenizer: Tokenizer) -> None:
    request = grpc_request(TOOLS | {"n": 2, "stream": True})
    whole = await answers_of(service_of(parts_of(tokenizer, per_delta=2)), request)
    assert put_together(whole)[1]["calls"]
    for place in range(0, len(whole), 1 + len(whole) // MANY):
        request.last_stream_id = whole[place].stream_id
        rest = await answers_of(service_of(parts_of(tokenizer, seed=1, per_delta=3)), request)
        assert put_together(whole[: place + 1] + rest) == put_together(whole)


@pytest.mark.parametrize(
    ("text", "reason", "finish"),
    [
        (CALLS[:60], FinishReason.LENGTH, common_pb2.FINISH_REASON_LENGTH),
        (CALLS, FinishReason.LENGTH, common_pb2.FINISH_REASON_LENGTH),
        ("no call", FinishReason.STOP, common_pb2.FINISH_REASON_STOP),
    ],
)
async def test_grpc_finish_reason_needs_complete_calls(
    tokenizer: Tokenizer, text: str, reason: FinishReason, finish: int
) -> None:
    parts = parts_of(tokenizer)
    parts.say(text, reason=reason)
    assert put_together(await answers_of(service_of(parts), grpc_request(TOOLS)))[0]["finish"] == finish


async def test_grpc_tool_choice_bounds_calls(tokenizer: Tokenizer) -> None:
    service = service_of(parts_of(tokenizer))
    for body, names in (({"parallel_tool_calls": False}, ["weather"]), ({"tool_choice": "none"}, [])):
        has = put_together(await answers_of(service, grpc_request(TOOLS | body)))[0]
        assert [call["name"] for call in has["calls"]] == names
    assert has["content"] == CALLS


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "function": {"name": "clock"}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}},
    ],
)
async def test_grpc_tool_choice_grammar_equals_http(tokenizer: Tokenizer, choice: Any) -> None:
    parts = parts_of(tokenizer)
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    body = HELLO | {"tools": [strict, CLOCK], "tool_choice": choice}
    async with client_of(parts) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    await answers_of(service_of(parts), grpc_request(body))
    over_http, over_grpc = (request.sampling.grammar for request in parts.generator.requests)
    assert over_grpc == over_http is not None


async def test_grpc_conversation_with_calls_is_rendered(tokenizer: Tokenizer) -> None:
    parts = parts_of(tokenizer)
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<|end|>"}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "assistant", "content": "It"},
    ]
    body = TOOLS | {"messages": messages, "continue_final_message": True}
    async with client_of(parts) as client:
        assert (await client.post(CHAT, json=body)).status_code == 200
    message = grpc_request(body)
    await answers_of(service_of(parts), message)
    over_http, over_grpc = (request.prompt_token_ids for request in parts.generator.requests)
    assert over_grpc == over_http
    del message.chat.messages[-1]
    shown = await service_of(parts).Tokenize(
        pb.TokenizeRequest(chat=message.chat, tools=message.tools, add_generation_prompt=False), _NoMetadata()
    )
    assert tuple(shown.token_ids) == over_http[: len(shown.token_ids)]


class _NoMetadata:
    def invocation_metadata(self) -> tuple[()]:
        return ()


async def test_grpc_template_variables_are_passed() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer(VARIABLE_TEMPLATE))
    parts.say("hello")
    kwargs = {"think": True, "level": 7}
    await answers_of(service_of(parts), grpc_request(HELLO | {"chat_template_kwargs": kwargs}))
    assert parts.tokenizer.decode(parts.generator.requests[0].prompt_token_ids) == "hello<think>7"
    with pytest.raises(InvalidRequest) as refused:
        await answers_of(service_of(parts), grpc_request(HELLO | {"chat_template_kwargs": {"other": "x"}}))
    assert refused.value.param == "chat_template_kwargs"
