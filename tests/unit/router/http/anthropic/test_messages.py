"""Anthropic's Messages API at the HTTP server, in process: shapes, marks, refusals."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from router.http.anthropic import body as anthropic_body
from router.http.anthropic import content_blocks
from router.text.tokenizer import Tokenizer
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tandem.errors import InternalError, Overloaded
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import client_of

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {
    "model": fakes.MODEL,
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "the quick brown fox"}],
}
KEPT = {"type": "ephemeral"}
LONG = "the quick brown fox jumps over the lazy dog " * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer)


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer)


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


def block(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def events(text: str) -> list[dict[str, Any]]:
    """Of a stream; each says its type twice."""
    found = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        kind, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
    return found


def usage(prompt: int, output: int, *, read: int = 7, created: int = 0, long: int = 0) -> dict[str, Any]:
    return {
        "input_tokens": prompt - read - created - long,
        "cache_creation_input_tokens": created + long,
        "cache_read_input_tokens": read,
        "cache_creation": {"ephemeral_5m_input_tokens": created, "ephemeral_1h_input_tokens": long},
        "output_tokens": output,
    }


async def test_anthropic_message_is_answered(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello wörld 😀")
    answer = await client.post(MESSAGES, json=HELLO | {"temperature": 0.5, "top_k": 3, "top_p": 0.9})
    body = answer.json()
    request = parts.generator.requests[0]
    assert answer.status_code == 200
    assert body == {
        "id": f"msg_{request.request_id}",
        "type": "message",
        "role": "assistant",
        "model": fakes.MODEL,
        "content": [{"type": "text", "text": "hello wörld 😀"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage(len(request.prompt_token_ids), len(ids)),
    }
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (64, 0.5, 3, 0.9)


async def test_anthropic_stream_has_typed_events(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("hello 😀")
    answer = await client.post(MESSAGES, json=HELLO | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    received = events(answer.text)
    prompt = len(parts.generator.requests[0].prompt_token_ids)
    kinds = [one["type"] for one in received if one["type"] != "content_block_delta"]
    assert kinds == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = received[0]["message"]
    assert (start["role"], start["content"], start["stop_reason"]) == ("assistant", [], None)
    assert start["usage"] == usage(prompt, 1)
    assert "".join(one["delta"]["text"] for one in received if one["type"] == "content_block_delta") == "hello 😀"
    assert received[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert received[-2]["usage"] == usage(prompt, len(ids))


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_stop_reason_is_mapped(parts: fakes.Servers, client: httpx.AsyncClient, stream: bool) -> None:
    parts.say("a stop string STOP here", reason=FinishReason.LENGTH)
    ends = []
    for stops in ({}, {"stop_sequences": ["STOP"]}):
        answer = await client.post(MESSAGES, json=HELLO | stops | {"stream": stream})
        shown = events(answer.text)[-2]["delta"] if stream else answer.json()
        ends.append((shown["stop_reason"], shown["stop_sequence"]))
    assert ends == [("max_tokens", None), ("stop_sequence", "STOP")]


async def test_anthropic_blocks_and_turns_are_joined(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    parts.say("ok")
    turns = [
        {"role": "user", "content": [block("hello"), block("world")]},
        {"role": "user", "content": "fox"},
        {"role": "assistant", "content": "jumps"},
        {"role": "user", "content": "dog"},
    ]
    await client.post(MESSAGES, json=HELLO | {"system": "lazy", "messages": turns})
    text = parts.tokenizer.decode(parts.generator.requests[0].prompt_token_ids, skip_special_tokens=False)
    expected = "<|bos|><|user|>lazy<|end|><|user|>hello\nworld\nfox<|end|><|assistant|>jumps<|end|><|user|>dog<|end|>"
    assert text == expected + "<|assistant|>"
    count = await client.post(COUNT, json={"model": fakes.MODEL, "system": "lazy", "messages": turns})
    assert count.json() == {"input_tokens": len(parts.generator.requests[0].prompt_token_ids)}


async def test_anthropic_breakpoint_is_pinned_and_counted(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    ids = parts.say("ok")
    system = [block(LONG), block(LONG, cache_control=KEPT), block("and this changes")]
    answer = await client.post(MESSAGES, json=HELLO | {"system": system})
    request = parts.generator.requests[0]
    (pin,) = request.pins
    marked = f"<|bos|><|user|>{LONG}\n{LONG}"

    def text_of(num_tokens: int) -> str:
        return parts.tokenizer.decode(request.prompt_token_ids[:num_tokens], skip_special_tokens=False)

    assert pin.ttl_s == 300.0
    assert marked.startswith(text_of(pin.num_tokens))
    # The last token of what is marked may be another when something follows.
    assert len(text_of(pin.num_tokens + 17)) > len(marked)
    prompt = len(request.prompt_token_ids)
    assert answer.json()["usage"] == usage(prompt, len(ids), created=pin.num_tokens - 7)


async def test_anthropic_breakpoints_of_both_ttls_are_counted_separately(
    parts: fakes.Servers, client: httpx.AsyncClient
) -> None:
    ids = parts.say("ok", cached_tokens=16)
    turns = [{"role": "user", "content": [block(LONG, cache_control=KEPT), block("now")]}]
    system = [block(LONG, cache_control=KEPT | {"ttl": "1h"})]
    answer = await client.post(MESSAGES, json=HELLO | {"system": system, "messages": turns})
    request = parts.generator.requests[0]
    assert [pin.ttl_s for pin in request.pins] == [3600.0, 300.0]
    first, second = (pin.num_tokens for pin in request.pins)
    expected = usage(len(request.prompt_token_ids), len(ids), read=16, created=second - first, long=first - 16)
    assert answer.json()["usage"] == expected


async def test_anthropic_breakpoint_on_body_covers_conversation(
    parts: fakes.Servers, client: httpx.AsyncClient
) -> None:
    parts.say("ok")
    turns = [{"role": "user", "content": LONG}]
    await client.post(MESSAGES, json=HELLO | {"messages": turns, "cache_control": KEPT})
    request = parts.generator.requests[0]
    (pin,) = request.pins
    assert len(request.prompt_token_ids) - 16 < pin.num_tokens + 2 <= len(request.prompt_token_ids)


async def test_anthropic_breakpoint_covering_no_block_is_ignored(
    parts: fakes.Servers, client: httpx.AsyncClient
) -> None:
    parts.say("ok")
    turns = [{"role": "user", "content": [block("fox", cache_control=KEPT)]}]
    answer = await client.post(MESSAGES, json=HELLO | {"messages": turns})
    assert answer.status_code == 200
    assert parts.generator.requests[0].pins == ()


TOOL = {
    "name": "weather",
    "description": "the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
USED = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "fox"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "brown"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "'image' is not supported"),
        ({"messages": [{"role": "user", "content": [USED]}]}, "assistant turn"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}]}, "user turn"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]}, "'image' is not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools"),
        ({"tools": [TOOL, TOOL]}, "not unique"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "weather"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"system": [IMAGE]}, "'image' is not supported"),
        ({"system": 3}, "system"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 7.0}, "top_p"),
        ({"system": [block("x", cache_control={"type": "forever"})]}, "cache_control"),
        ({"system": [block("x", cache_control=KEPT | {"ttl": "2h"})]}, "ttl"),
        ({"system": [block("x", cache_control=KEPT)] * 5}, "cache_control"),
        ({"seed": 4}, "seed"),
        ({"container": "x"}, "container"),
    ],
)
async def test_anthropic_unsupported_fields_are_refused(
    refusing: fakes.Servers, refusing_client: httpx.AsyncClient, change: dict[str, Any], words: str
) -> None:
    answer = await refusing_client.post(MESSAGES, json={k: v for k, v in (HELLO | change).items() if v is not None})
    body = answer.json()
    assert answer.status_code == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert words in body["error"]["message"]
    assert not refusing.generator.requests


async def test_anthropic_errors_have_its_format(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    wrong = await client.post(MESSAGES, json=HELLO | {"model": "other"})
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "not_found_error")
    old = await client.post(MESSAGES, json=HELLO, headers={"anthropic-version": "2023-01-01"})
    assert (old.status_code, old.json()["error"]["type"]) == (400, "invalid_request_error")
    parts.say("ok", error=Overloaded("full", retry_after_s=3.0))
    full = await client.post(MESSAGES, json=HELLO | {"stream": True})
    assert full.json()["error"]["message"] == "full"
    assert full.headers["retry-after"] == "3"
    unparsed = await client.post(COUNT, content=b"{")
    assert (unparsed.status_code, unparsed.json()["type"]) == (400, "error")


async def test_anthropic_error_after_first_token_is_an_event(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    parts.say("hello world", error=InternalError("broken"), error_after=2)
    received = events((await client.post(MESSAGES, json=HELLO | {"stream": True})).text)
    assert received[-1] == {"type": "error", "error": {"type": "api_error", "message": "broken"}}


async def test_anthropic_key_in_either_header_is_accepted(tokenizer: Tokenizer) -> None:
    keys = (ApiKey(key=SecretStr("secret-of-a"), tenant="a"),)
    parts = fakes.make_servers(tokenizer, RouterConfig(api_keys=keys, max_body_bytes=1 << 20))
    parts.say("ok")
    async with client_of(parts) as client:
        statuses = [
            (await client.post(MESSAGES, json=HELLO, headers=headers)).status_code
            for headers in (
                {"x-api-key": "secret-of-a"},
                {"authorization": "Bearer secret-of-a"},
                {"x-api-key": "secret-of-b"},
                {"authorization": "Bearer secret-of-b", "x-api-key": "secret-of-a"},
                {},
            )
        ]
        refused = (await client.post(MESSAGES, json=HELLO)).json()
    assert statuses == [200, 200, 401, 401, 401]
    assert refused["error"]["type"] == "authentication_error"
    assert [request.tenant for request in parts.generator.requests] == ["a", "a"]


async def test_anthropic_tenants_share_blocks_only_if_configured(tokenizer: Tokenizer) -> None:
    keys = tuple(ApiKey(key=SecretStr(f"secret-of-{name}"), tenant=name) for name in "ab")
    roots = []
    for cache in ({}, {"shared_by_tenants": True}):
        parts = fakes.make_servers(tokenizer, RouterConfig(api_keys=keys, prompt_cache=cache, max_body_bytes=1 << 20))
        parts.say("ok")
        async with client_of(parts) as client:
            for name in "ab":
                await client.post(MESSAGES, json=HELLO, headers={"x-api-key": f"secret-of-{name}"})
        roots.append(len({request.hash_root for request in parts.generator.requests}))
    assert roots == [2, 1]


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "fox"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_tool_call_is_own_block(parts: fakes.Servers, client: httpx.AsyncClient, stream: bool) -> None:
    parts.say(f"hello {CALL}")
    answer = await client.post(MESSAGES, json=HELLO | {"tools": [TOOL], "stream": stream})
    assert answer.status_code == 200, answer.text
    blocks: list[dict[str, Any]]
    if stream:
        received = events(answer.text)
        blocks = [one["content_block"] for one in received if one["type"] == "content_block_start"]
        for one in received:
            if one["type"] == "content_block_delta":
                delta, block = one["delta"], blocks[one["index"]]
                if delta["type"] == "text_delta":
                    block["text"] += delta["text"]
                else:
                    block["partial"] = block.get("partial", "") + delta["partial_json"]
        blocks[1]["input"] = json.loads(blocks[1].pop("partial"))
        assert [one["index"] for one in received if one["type"] == "content_block_stop"] == [0, 1]
        ending = received[-2]["delta"]
    else:
        ending = answer.json()
        blocks = ending["content"]
    assert blocks[0]["text"].strip() == "hello"
    assert (blocks[1]["type"], blocks[1]["name"], blocks[1]["input"]) == ("tool_use", "weather", {"city": "fox"})
    assert ending["stop_reason"] == "tool_use"


async def test_anthropic_calls_and_results_reach_the_template(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer, context=1024)
    parts.say("ok")
    failed = RESULT | {"is_error": True, "content": [block("no"), block("city")]}
    turns = [
        {"role": "user", "content": "hello"},
        # As a client sends back what it got, with fields that ask for nothing.
        {"role": "assistant", "content": [block("wait") | {"citations": None}, USED | {"caller": None}]},
        {"role": "user", "content": [failed, block("and now", cache_control=KEPT)]},
    ]
    tool = TOOL | {"cache_control": KEPT}
    body = {"model": fakes.MODEL, "tools": [tool], "messages": turns}
    async with client_of(parts) as client:
        answer = await client.post(MESSAGES, json=body | {"max_tokens": 3})
        counted = await client.post(COUNT, json=body)
    assert answer.status_code == 200, answer.text
    request = parts.generator.requests[0]
    text = parts.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    places = [text.index(part) for part in ("the weather", "hello", "wait", '"city"', "Error: no\ncity", "and now")]
    assert text.count('"weather"') == 2
    assert places[0] < places[1] < places[2] < places[4] < places[5]
    assert len(request.pins) == 2
    first = parts.tokenizer.decode(request.prompt_token_ids[: request.pins[0].num_tokens])
    assert "the weather" in first
    assert "hello" not in first
    assert counted.json()["input_tokens"] == len(request.prompt_token_ids)


async def test_anthropic_final_assistant_turn_is_continued(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    parts.say("ok")
    turns = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the quick"}]
    answer = await client.post(MESSAGES, json=HELLO | {"messages": turns})
    assert answer.status_code == 200, answer.text
    text = parts.tokenizer.decode(parts.generator.requests[0].prompt_token_ids, skip_special_tokens=False)
    assert text.endswith("<|assistant|>the quick")


def test_anthropic_turn_of_many_blocks_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processing all anew after each block would block the event loop for minutes."""
    joins: list[int] = []

    def counted(blocks: Sequence[content_blocks.TextBlock]) -> str:
        joins.append(len(blocks))
        return content_blocks.joined(blocks)

    monkeypatch.setattr(anthropic_body, "joined", counted)
    texts = [block("ab", cache_control=KEPT), *[block("c")] * 200]
    body = anthropic_body.CountBody(model=fakes.MODEL, messages=[{"role": "user", "content": texts}] * 3)
    (message,), marks = body.conversation()
    assert message.content == "\n".join((["ab"] + ["c"] * 200) * 3)
    assert [mark.num_chars for mark in marks] == [2, 405, 808]
    assert joins == [603]


async def test_anthropic_unknown_route_error_has_its_format(client: httpx.AsyncClient) -> None:
    """By path, or by the header that Anthropic's clients always send."""
    anthropics = {"anthropic-version": "2023-06-01"}
    for path, headers in (("/v1/messages/batches", {}), ("/v1/messages/", {}), ("/v1/complete", anthropics)):
        answer = await client.post(path, json={}, headers=headers)
        assert answer.status_code == 404
        assert answer.json() == {
            "type": "error",
            "error": {"type": "not_found_error", "message": f"no route POST {path}"},
        }
    wrong_method = await client.get("/v1/messages")
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert wrong_method.json()["error"]["type"] == "invalid_request_error"
    assert "type" not in (await client.post("/v1/complete", json={})).json()
    assert "type" not in (await client.post("/v1/completions", json={}, headers=anthropics)).json()
