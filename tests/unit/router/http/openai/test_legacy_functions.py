"""`functions` and `function_call`, the older form of tools, in requests, answers and conversations."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.text.tokenizer import Tokenizer
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, client_of, error_of, events

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED = HELLO | {"functions": [WEATHER, {"name": "clock"}]}
ARGUMENTS = '{"city": "Köln 😀"}'
ONE = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO = f'I look.\n{ONE}\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer, grammars=fakes.AnyGrammar(), context=4096)


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


async def test_function_call_unstreamed_is_returned(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(ONE)
    (choice,) = (await client.post(CHAT, json=ASKED)).json()["choices"]
    assert choice["finish_reason"] == "function_call"
    message = choice["message"]
    assert set(message) == {"role", "content", "refusal", "function_call"}
    assert message["content"] is None
    assert message["function_call"] == {"name": "weather", "arguments": ARGUMENTS}


@pytest.mark.parametrize("per_delta", [1, 3, 1000])
async def test_function_call_is_streamed(client: httpx.AsyncClient, parts: fakes.Servers, per_delta: int) -> None:
    parts.say(TWO, per_delta=per_delta)
    chunks = events((await client.post(CHAT, json=ASKED | {"stream": True})).text)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert not any("tool_calls" in delta for delta in deltas)
    assert [call["name"] for call in calls if "name" in call] == ["weather"]
    assert "".join(call["arguments"] for call in calls) == ARGUMENTS
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_function_call_cut_short_finishes_with_length(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(ONE[:50], reason=FinishReason.LENGTH)
    assert (await client.post(CHAT, json=ASKED)).json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("call", "is_forced", "is_in_prompt"),
    [("auto", False, True), ("none", False, False), ({"name": "weather"}, True, True), (None, False, True)],
)
async def test_function_call_choice_is_honoured(
    client: httpx.AsyncClient, parts: fakes.Servers, call: Any, is_forced: bool, is_in_prompt: bool
) -> None:
    parts.say("hello")
    answer = await client.post(CHAT, json=ASKED | {"function_call": call})
    assert answer.status_code == 200, answer.text
    request = parts.generator.requests[0]
    assert (request.sampling.grammar is not None) == is_forced
    assert ("weather" in parts.tokenizer.decode(request.prompt_token_ids)) == is_in_prompt
    assert answer.json()["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}


async def test_function_messages_render_like_tool_messages(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello")
    call = {"name": "weather", "arguments": ARGUMENTS}
    older = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    newer = [
        *HELLO["messages"],
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    for messages in (older, newer):
        assert (await client.post(CHAT, json={"messages": messages})).status_code == 200
    first, second = (request.prompt_token_ids for request in parts.generator.requests)
    assert first == second
    assert json.loads(ARGUMENTS)["city"] in parts.tokenizer.decode(first)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"functions": [WEATHER], "tools": [{"type": "function", "function": WEATHER}]}, "functions"),
        ({"functions": [WEATHER], "tool_choice": "auto"}, "functions"),
        ({"functions": [WEATHER, WEATHER]}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions"),
        ({"functions": [WEATHER], "function_call": "required"}, "function_call"),
        ({"functions": [WEATHER], "function_call": {"name": "clock"}}, "function_call"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"messages": [{"role": "function", "name": "weather", "content": "rain"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a", "function_call": {"name": "f", "arguments": "{}"}}]},
         "messages"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "no"}}]}, "messages"),
    ],
)  # fmt: skip
async def test_functions_invalid_request_is_refused(
    client: httpx.AsyncClient, parts: fakes.Servers, change: dict[str, Any], param: str
) -> None:
    parts.say("hello")
    answer = await client.post(CHAT, json=HELLO | change)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert not parts.generator.requests
