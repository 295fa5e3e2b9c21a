"""POST /v1/responses in process, much of it through the `openai` package itself."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from router.http.app import create_app
from router.text.tokenizer import Tokenizer
from tandem.errors import InternalError, Overloaded
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import client_of, error_of
from tests.support.router.servers.openapi_check import events_of
from tests.support.router.servers.tool_calls import CALLS, CITY

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"input": "hello"}
TOOLS = [
    {"type": "function", "name": "weather", "description": "Of a place.", "parameters": CITY},
    {"type": "function", "name": "clock"},
]


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


@pytest.fixture
async def sdk(parts: fakes.Servers) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    http = openai.DefaultAsyncHttpxClient(transport=_transport(app))
    async with openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0
    ) as made:
        yield made


def _transport(app: Any) -> Any:
    """Of the same library as the package's own client."""
    library = __import__(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.split(".")[0])
    return library.ASGITransport(app, raise_app_exceptions=False)


async def test_responses_text_is_answered(
    client: httpx.AsyncClient, sdk: openai.AsyncOpenAI, parts: fakes.Servers
) -> None:
    ids = parts.say("hello wörld 😀")
    answer = await sdk.responses.create(model=fakes.MODEL, input="hello", metadata={"a": "b"}, temperature=0.5)
    assert (answer.status, answer.output_text, answer.store) == ("completed", "hello wörld 😀", False)
    assert [item.type for item in answer.output] == ["message"]
    assert answer.usage is not None
    prompt = len(parts.generator.requests[0].prompt_token_ids)
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (prompt, len(ids))
    assert answer.usage.input_tokens_details.cached_tokens == 7
    assert (answer.metadata, answer.temperature) == ({"a": "b"}, 0.5)
    assert (await client.post(PATH, json=HELLO, headers={"X-Tandem-Timing": "1"})).json()["timing"]["decode_s"] == 1.0


async def test_responses_prompt_equals_chat(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello")
    items = [
        {"role": "user", "content": "hello"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "clock", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "12"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]  # fmt: skip
    assert (await client.post(PATH, json={"instructions": "Be kind.", "input": items})).status_code == 200
    calls = [{"id": i, "type": "function", "function": {"name": "clock", "arguments": "{}"}} for i in ("c1", "c2")]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "12"},
        {"role": "tool", "tool_call_id": "c2", "content": "13"},
        {"role": "user", "content": "a\nb"},
    ]
    assert (await client.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
    first, second = parts.generator.requests
    assert first.prompt_token_ids == second.prompt_token_ids


async def test_responses_calls_are_equal_whole_and_streamed(sdk: openai.AsyncOpenAI, parts: fakes.Servers) -> None:
    parts.say(CALLS)
    whole = await sdk.responses.create(model=fakes.MODEL, input="hello", tools=TOOLS)  # type: ignore[arg-type]
    expected = [("message", "I look."), ("function_call", {"city": "Köln 😀"}), ("function_call", {})]
    shown = [
        (item.type, item.content[0].text if item.type == "message" else json.loads(item.arguments))  # type: ignore[union-attr]
        for item in whole.output
    ]
    assert shown == expected
    for per_delta in (1, 5, 1000):
        parts.generator.script.per_delta = per_delta
        async with sdk.responses.stream(model=fakes.MODEL, input="hello", tools=TOOLS) as stream:  # type: ignore[arg-type]
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert [strip(item) for item in final.output] == [strip(item) for item in whole.output]


def strip(item: Any) -> dict[str, Any]:
    """Without fields that vary by request, or are the package's own."""
    return {k: v for k, v in item.to_dict().items() if k not in ("id", "call_id", "parsed_arguments")} | (
        {"content": [part["text"] for part in item.to_dict()["content"]]} if item.type == "message" else {}
    )


async def read(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = (await client.post(PATH, json=HELLO | body | {"stream": True})).text
    events = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_responses_events_are_ordered_and_numbered(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(CALLS)
    events = await read(client, {"tools": TOOLS})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds: list[str] = []
    for event in events:
        if not (kinds and kinds[-1] == event["type"]):
            kinds.append(event["type"])
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    called = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    expected = ["created", "in_progress", *message, "output_item.done", *called, *called, "completed"]
    assert kinds == [f"response.{kind}" for kind in expected]
    deltas: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    final = events[-1]["response"]
    assert list(deltas) == [item["id"] for item in final["output"]]
    assert list(deltas.values()) == [
        item["content"][0]["text"] if item["type"] == "message" else item["arguments"] for item in final["output"]
    ]
    assert final["usage"]["total_tokens"] > 0
    assert events[0]["response"]["status"] == "in_progress"


async def test_responses_truncated_answer_is_incomplete(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(CALLS[:60], reason=FinishReason.LENGTH)
    whole = (await client.post(PATH, json=HELLO | {"tools": TOOLS})).json()
    events = await read(client, {"tools": TOOLS})
    for final in (whole, events[-1]["response"]):
        assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [item["status"] for item in final["output"]] == ["completed", "incomplete"]
    assert events[-1]["type"] == "response.incomplete"


async def test_responses_empty_answer_is_empty_message(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.generator.script = fakes.Script(tokens=[fakes.END])
    final = (await client.post(PATH, json=HELLO)).json()
    assert [item["content"][0]["text"] for item in final["output"]] == [""]
    assert (await read(client, {}))[-1]["response"]["output"][0]["content"][0]["text"] == ""


async def test_responses_failing_stream_ends_in_failed_event(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello world", error=InternalError("worker lost"), error_after=2)
    last = (await read(client, {}))[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "worker lost"}
    parts.generator.script = fakes.Script(error=Overloaded("full", retry_after_s=2.5))
    for stream in (False, True):
        answer = await client.post(PATH, json=HELLO | {"stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ({"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"type": "integer"}}}, "integer"),
        ({"format": {"type": "json_object"}}, "object"),
        (
            {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": {"properties": {}}}},
            '"additionalProperties":false',
        ),
    ],
)
async def test_responses_format_makes_a_grammar(
    client: httpx.AsyncClient, parts: fakes.Servers, text: dict[str, Any], part: str
) -> None:
    parts.say("5")
    answer = await client.post(PATH, json=HELLO | {"text": text})
    assert answer.json()["text"] == text
    assert part in (parts.generator.requests[0].sampling.grammar or "")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "text": ""}]}]}, "input"),
        ({"input": [{"role": "user", "content": "x"}] * 3000}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "f"}]}, "input"),
        ({"input": "x" * 200_000}, "input"),
        ({"input": "a\0b"}, "input"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "tools": TOOLS}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "verbosity"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "mcp", "name": "x"}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "none", "tools": []}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"prompt": "hello"}, "prompt"),
        ({"other": 1}, "other"),
    ],
)
async def test_responses_invalid_request_is_refused(
    refusing_client: httpx.AsyncClient, refusing: fakes.Servers, change: dict[str, Any], param: str
) -> None:
    refusing.say("hello")
    answer = await refusing_client.post(PATH, json=HELLO | change)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert not refusing.generator.requests


async def test_responses_stream_cannot_be_resumed(client: httpx.AsyncClient) -> None:
    for header, value in (("Last-Event-ID", "x"), ("X-Tandem-Stream-Ids", "1")):
        answer = await client.post(PATH, json=HELLO | {"stream": True}, headers={header: value})
        assert (answer.status_code, error_of(answer)["param"]) == (400, header)


LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


async def test_responses_logprobs_cover_the_text(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    ids = parts.say("hello 😀", logprobs=True)
    whole = (await client.post(PATH, json=HELLO | LOGPROBS)).json()
    assert (parts.generator.requests[-1].sampling.num_logprobs, whole["top_logprobs"]) == (2, 2)
    shown = whole["output"][0]["content"][0]["logprobs"]
    assert bytes(byte for entry in shown[:-1] for byte in entry["bytes"]).decode() == "hello 😀"
    assert [len(entry["top_logprobs"]) for entry in shown] == [2] * len(ids)
    streamed = await client.post(PATH, json=HELLO | LOGPROBS | {"stream": True})
    events = [json.loads(event["data"]) for event in events_of(streamed.text)]
    deltas = [entry for one in events if one["type"] == "response.output_text.delta" for entry in one["logprobs"]]
    (done,) = [one["logprobs"] for one in events if one["type"] == "response.output_text.done"]
    assert done == shown
    assert deltas == shown[: len(deltas)]
    assert len(deltas) >= len(shown) - 1, "the end has no text"
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == shown
    plain = (await client.post(PATH, json=HELLO)).json()["output"][0]["content"][0]
    assert plain["logprobs"] == []


@pytest.mark.parametrize(("strict", "is_strict"), [(None, True), (True, True), (False, False)])
async def test_responses_functions_are_strict_by_default(
    client: httpx.AsyncClient, parts: fakes.Servers, strict: bool | None, is_strict: bool
) -> None:
    parts.say("hello")
    tools = [tool | ({} if strict is None else {"strict": strict}) for tool in TOOLS]
    answer = await client.post(PATH, json=HELLO | {"tools": tools})
    assert answer.status_code == 200, answer.text
    assert {tool["strict"] for tool in answer.json()["tools"]} == {is_strict}
    assert (parts.generator.requests[-1].sampling.grammar is not None) == is_strict


async def test_responses_without_strict_fall_back_to_open_schema(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer, context=4096)  # where no grammar can be kept
    parts.say("hello")
    async with client_of(parts) as client:
        answer = await client.post(PATH, json=HELLO | {"tools": TOOLS})
        assert answer.status_code == 200, answer.text
        assert {tool["strict"] for tool in answer.json()["tools"]} == {False}
        response = await client.post(PATH, json=HELLO | {"tools": [tool | {"strict": True} for tool in TOOLS]})
        assert (response.status_code, error_of(response)["param"]) == (400, "tools")
