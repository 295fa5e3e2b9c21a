"""Tools in chat over HTTP, in process: prompts and orders to workers, and parsed calls."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.text.tokenizer import Tokenizer
from router.text.tools import MAX_CALLS, MAX_DESCRIPTION_CHARS, MAX_TOOLS
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, client_of, error_of, events
from tests.support.router.servers.tool_calls import CALLS, CLOCK, NAMED, TOOLS, WEATHER

NAMES = ("weather", "clock")
ASK = {"X-Tandem-Stream-Ids": "1"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer, grammars=fakes.AnyGrammar(), context=4096)


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer, grammars=fakes.AnyGrammar(), context=4096)


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


def put_together(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Joined by choice, as a streaming client does."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            has = choices.setdefault(choice["index"], {"content": "", "calls": [], "finish": None})
            has["content"] += choice["delta"].get("content") or ""
            for part in choice["delta"].get("tool_calls", ()):
                if part["index"] == len(has["calls"]):
                    assert part["id"]
                    assert part["type"] == "function"
                    has["calls"].append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
                else:
                    assert set(part) == {"index", "function"}
                    assert part["index"] == len(has["calls"]) - 1
                has["calls"][-1]["arguments"] += part["function"]["arguments"]
            has["finish"] = choice["finish_reason"] or has["finish"]
    return choices


def parse_whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        choice["index"]: {
            "content": choice["message"]["content"] or "",
            "calls": [
                {"id": call["id"], **call["function"]} for call in choice["message"].get("tool_calls", ())
            ],
            "finish": choice["finish_reason"],
        }
        for choice in answer["choices"]
    }  # fmt: skip


def without_ids(choices: dict[int, dict[str, Any]]) -> list[Any]:
    return [
        (has["content"], [(call["name"], json.loads(call["arguments"])) for call in has["calls"]], has["finish"])
        for has in choices.values()
    ]


async def test_tool_calls_are_equal_whole_and_streamed(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(CALLS)
    expected = ("I look.", [("weather", {"city": "Köln 😀"}), ("clock", {})], "tool_calls")
    whole = (await client.post(CHAT, json=TOOLS | {"n": 2})).json()
    assert without_ids(parse_whole(whole)) == [expected, expected]
    for per_delta in (1, 3, 1000):
        parts.generator.script.per_delta = per_delta
        streamed = put_together(events((await client.post(CHAT, json=TOOLS | {"n": 2, "stream": True})).text))
        assert without_ids(streamed) == [expected, expected]
        ids = [call["id"] for has in streamed.values() for call in has["calls"]]
        assert len(set(ids)) == 4


async def test_answer_of_calls_has_null_content(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(CALLS.removeprefix("I look."))
    message = (await client.post(CHAT, json=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] is None
    assert [set(call) for call in message["tool_calls"]] == [{"id", "type", "function"}] * 2


async def test_tools_answer_without_calls_is_plain_text(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello world <tool_")
    choice = (await client.post(CHAT, json=TOOLS)).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hello world <tool_", "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.in_turns(always=2)
@pytest.mark.parametrize(
    ("body", "per_delta"),
    [({}, 1), ({}, 4), ({"n": 2, "return_token_ids": True}, 4), ({"logprobs": True}, 4), ({"stop": ["</tool"]}, 1)],
)
async def test_tools_stream_resumes_inside_a_call(tokenizer: Tokenizer, body: dict[str, Any], per_delta: int) -> None:
    """On another router, with tokens in other batches: the same calls and ids, nothing twice."""
    request = TOOLS | body | {"stream": True}

    async def get(seed: int, per_delta: int, headers: dict[str, str]) -> list[dict[str, str]]:
        parts = fakes.make_servers(tokenizer, mint_seed=lambda: seed, context=4096)
        parts.say(CALLS, per_delta=per_delta, logprobs="logprobs" in body)
        async with client_of(parts) as client:
            text = (await client.post(CHAT, json=request, headers=headers)).text
        return [dict(line.split(": ", 1) for line in event.split("\n")) for event in text.split("\n\n") if event]

    def shown(lines: list[dict[str, str]]) -> dict[int, dict[str, Any]]:
        return put_together([json.loads(line["data"]) for line in lines if line["data"] != "[DONE]"])

    whole = await get(99, per_delta, ASK)
    assert shown(whole)[0]["calls"]
    step = 1 + len(whole) // 30
    for place, event in list(enumerate(whole[:-1]))[::step]:
        if "id" in event:
            rest = await get(1, 2, {"Last-Event-ID": event["id"]})
            assert shown(whole[: place + 1] + rest) == shown(whole)


async def test_tools_stream_id_with_other_tools_is_refused(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(CALLS)
    request = TOOLS | {"stream": True, "seed": 5}
    first = (await client.post(CHAT, json=request, headers=ASK)).text
    seen = {"Last-Event-ID": first.split("id: ")[2].split("\n")[0]}
    other = {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}}
    answer = await client.post(CHAT, json=request | other, headers=seen)
    assert (answer.status_code, error_of(answer)["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize(
    ("text", "reason", "more", "finish"),
    [
        (CALLS[:60], FinishReason.LENGTH, {}, "length"),
        (CALLS, FinishReason.STOP, {"stop": ["Köln"]}, "stop"),
        (CALLS, FinishReason.LENGTH, {}, "length"),
        (CALLS, FinishReason.STOP, {"stop": ["</tool"]}, "tool_calls"),
    ],
)
async def test_tools_finish_reason_is_reported(
    client: httpx.AsyncClient, parts: fakes.Servers, text: str, reason: FinishReason, more: dict[str, Any], finish: str
) -> None:
    """A truncated call is returned as far as it came; only complete ones give `tool_calls`."""
    parts.say(text, reason=reason)
    whole = parse_whole((await client.post(CHAT, json=TOOLS | more)).json())
    streamed = put_together(events((await client.post(CHAT, json=TOOLS | more | {"stream": True})).text))
    assert [has["finish"] for has in (whole[0], streamed[0])] == [finish, finish]
    assert [call["arguments"] for call in whole[0]["calls"]] == [call["arguments"] for call in streamed[0]["calls"]]


async def test_parallel_tool_calls_false_yields_one_call(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(CALLS)
    for choices in (
        parse_whole((await client.post(CHAT, json=TOOLS | {"parallel_tool_calls": False})).json()),
        put_together(
            events((await client.post(CHAT, json=TOOLS | {"parallel_tool_calls": False, "stream": True})).text)
        ),
    ):
        assert [call["name"] for call in choices[0]["calls"]] == ["weather"]


async def test_tool_choice_none_hides_tools(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(CALLS)
    answer = (await client.post(CHAT, json=TOOLS | {"tool_choice": "none"})).json()
    assert answer["choices"][0]["message"]["content"] == CALLS
    await client.post(CHAT, json=HELLO)
    first, second = parts.generator.requests
    assert first.prompt_token_ids == second.prompt_token_ids


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", ["weather", "clock"]),
        ({"type": "function", "function": {"name": "clock"}}, ["clock"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}, ["weather"]),
    ],
)
async def test_tool_choice_makes_a_grammar(
    client: httpx.AsyncClient, parts: fakes.Servers, choice: Any, names: list[str]
) -> None:
    parts.say(CALLS)
    await client.post(CHAT, json=TOOLS | {"tool_choice": choice})
    (made,) = json.loads(parts.generator.requests[0].sampling.grammar or "")["grammars"]
    assert made["lark_grammar"].startswith("start: block\n")
    assert [name for name in NAMES if name in made["lark_grammar"]] == names


async def test_strict_tools_grammar_allows_text(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(CALLS)
    await client.post(CHAT, json=TOOLS)
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    await client.post(CHAT, json=HELLO | {"tools": [strict]})
    free, kept = (request.sampling.grammar for request in parts.generator.requests)
    assert free is None
    assert kept is not None
    assert "lazy" in kept


async def test_tool_conversation_is_rendered_by_plain_template(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "<|end|>"}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "call_2"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "<|user|>"}]},
    ]
    answer = await client.post(CHAT, json=TOOLS | {"messages": messages})
    assert answer.status_code == 200, answer.text
    ids = parts.generator.requests[0].prompt_token_ids
    text = parts.tokenizer.decode(ids, skip_special_tokens=False)
    for fragment in (
        "Of a place.",
        '"city": "<|end|>"',
        "<tool_response>\nrain\n</tool_response>",
        '{"name": "weather"',
    ):
        assert fragment in text
    # What the client wrote is text: tokens of the template's own stand around five turns, and open the answer.
    assert [i for i in ids if i in parts.tokenizer.special_ids] == [
        fakes.BOS, *([fakes.USER, fakes.END] * 2), fakes.ASSISTANT, fakes.END, fakes.USER, fakes.END, fakes.ASSISTANT,
    ]  # fmt: skip
    tokens = await client.post("/tokenize", json={"messages": messages, "tools": TOOLS["tools"]})
    assert tokens.json()["tokens"] == list(ids)


def named(name: Any, **more: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name} | more}]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def turn(**more: Any) -> dict[str, Any]:
    return {"messages": [*HELLO["messages"], {"role": "assistant", "content": "", **more}]}


def called(arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    return turn(tool_calls=[call | more])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        (named(""), "tools"),
        (named("a b"), "tools"),
        (named("<|end|>"), "tools"),
        (named("x" * 129), "tools"),
        (named(5), "tools"),
        (named("f", description="x" * (MAX_DESCRIPTION_CHARS + 1)), "tools"),
        (named("f", parameters=nested(40)), "tools"),
        (named("f", parameters={"type": "array"}), "tools"),
        (named("f", parameters={"enum": ["x" * 1000] * 140}), "tools"),
        (named("f", parameters=True), "tools"),
        (named("f", more=1), "tools"),
        ({"tools": [CLOCK, CLOCK]}, "tools"),
        ({"tools": [CLOCK | {"type": "custom"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [CLOCK] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": [CLOCK], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": ""}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
         "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [CLOCK], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [CLOCK], "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (called("not JSON"), "messages"),
        (called("[1]"), "messages"),
        (called('{"x": NaN}'), "messages"),
        (called('{"x": ' + "[" * 60 + "]" * 60 + "}"), "messages"),
        (called('{"x": "\\ud800"}'), "messages"),
        (called(id=""), "messages"),
        (called(id="a\nb"), "messages"),
        (called(id="x" * 257), "messages"),
        (called(type="custom"), "messages"),
        (turn(tool_call_id="c1"), "messages"),
        (turn(tool_calls=[{}] * (MAX_CALLS + 1)), "messages"),
        ({"messages": [called()["messages"][1] | {"role": "user"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a b"}]}, "messages"),
    ],
)  # fmt: skip
async def test_tools_invalid_request_is_refused(
    refusing_client: httpx.AsyncClient, refusing: fakes.Servers, change: dict[str, Any], param: str
) -> None:
    refusing.say("hello")
    answer = await refusing_client.post(CHAT, json=HELLO | change)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert not refusing.generator.requests
