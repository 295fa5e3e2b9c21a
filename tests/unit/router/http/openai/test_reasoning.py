"""Reasoning models at every server: reasoning is returned separately, and counted."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.both_servers import answers_of, grpc_request, service_of
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of, events
from tests.support.router.servers.openapi_check import Described, events_of

OPENS = (
    "{% for m in messages %}<|user|>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}"
    "{% endfor %}<|assistant|>{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
WRITES = "{% for m in messages %}<|user|>{{ m.content.split('</think>')[-1] }}{% endfor %}<|assistant|>"
THOUGHT, ANSWER = "Let me see: 2 + 2. 😀", "It is four."
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": CLOCK}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
WORDS = {"model": fakes.MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": "what is two and two"}]}


def parts_of(template: str, config: RouterConfig | None = None) -> fakes.Servers:
    tokenizer = Tokenizer(fakes.byte_level_spec(), ChatTemplate(template, {}))
    return fakes.make_servers(tokenizer, config, context=2048, grammars=fakes.AnyGrammar())


@pytest.fixture
def parts() -> fakes.Servers:
    return parts_of(OPENS)


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


def details(reasoning_tokens: int) -> dict[str, int]:
    return {
        "reasoning_tokens": reasoning_tokens,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }


def say_with_reasoning(parts: fakes.Servers, *, is_open: bool, answer: str = ANSWER, **script: Any) -> int:
    """Script reasoning and an answer; returns the number of reasoning tokens."""
    text = f"{'' if is_open else '<think>'}\n{THOUGHT}\n</think>\n\n{answer}"
    ids = parts.say(text, **script)
    for count in range(len(ids)):
        if "</think>" in parts.tokenizer.decode(ids[:count]):
            return count
    raise AssertionError(text)


@pytest.mark.parametrize("template", [OPENS, WRITES], ids=["the template begins", "the model begins"])
async def test_chat_separates_reasoning(template: str) -> None:
    parts = parts_of(template)
    count = say_with_reasoning(parts, is_open=template == OPENS)
    async with client_of(parts) as client:
        described = await Described.by(client)
        whole = await client.post(CHAT, json=HELLO | {"n": 2})
        described.check("POST", CHAT, whole)
        message = whole.json()["choices"][1]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, ANSWER)
        assert whole.json()["usage"]["completion_tokens_details"] == details(2 * count)
        for per_delta in (1, 3, 1000):
            parts.generator.script.per_delta = per_delta
            options = {"stream": True, "stream_options": {"include_usage": True}}
            streamed = await client.post(CHAT, json=HELLO | options)
            described.check("POST", CHAT, streamed)
            chunks = events(streamed.text)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
            assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
            assert chunks[-1]["usage"]["completion_tokens_details"] == details(count)


async def test_tool_calls_follow_reasoning(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    say_with_reasoning(parts, is_open=True, answer=CALL)
    tools = [{"type": "function", "function": CLOCK}]
    choice = (await client.post(CHAT, json=HELLO | {"tools": tools})).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["content"] is None


JSON = {"response_format": {"type": "json_object"}}
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}


def lead_of(parts: fakes.Servers) -> str:
    """The required beginning of the last request's answer."""
    (first, *_) = json.loads(parts.generator.requests[-1].sampling.grammar or "")["grammars"]
    return str(first["lark_grammar"] or "")


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        (JSON, '{"a":4}'),
        ({"tools": [TOOL], "tool_choice": "required"}, CALL),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, CALL),
        ({"tools": [{"type": "function", "function": CLOCK | {"strict": True}}]}, CALL),
        ({"tools": [TOOL], **JSON}, '{"a":4}'),
    ],
    ids=["json", "required", "named", "strict", "json or calls"],
)
async def test_structured_output_follows_reasoning(
    client: httpx.AsyncClient, parts: fakes.Servers, options: dict[str, Any], answer: str
) -> None:
    count = say_with_reasoning(parts, is_open=True, answer=answer)
    body = (await client.post(CHAT, json=HELLO | options)).json()
    message = body["choices"][0]["message"]
    assert lead_of(parts).startswith("start: thinking ")
    assert message["reasoning_content"] == THOUGHT
    assert message["content"] == (None if answer == CALL else answer)
    assert len(message.get("tool_calls", ())) == (answer == CALL)
    assert body["usage"]["completion_tokens_details"] == details(count)
    parts.say(answer)
    message = (await client.post(CHAT, json=HELLO | options | NO_THOUGHT)).json()["choices"][0]["message"]
    assert "thinking" not in lead_of(parts)
    assert message["content"] == (None if answer == CALL else answer)


async def test_reasoning_begun_by_model_is_optional() -> None:
    parts = parts_of(WRITES)
    parts.say('{"a":4}')
    async with client_of(parts) as client:
        message = (await client.post(CHAT, json=HELLO | JSON)).json()["choices"][0]["message"]
    assert '("<think>" thinking GAP?)?' in lead_of(parts)
    assert message["content"] == '{"a":4}'


@pytest.mark.parametrize(("options", "answer"), [({}, ANSWER), ({"tools": [TOOL], "tool_choice": "required"}, CALL)])
async def test_grpc_separates_reasoning(parts: fakes.Servers, options: dict[str, Any], answer: str) -> None:
    count = say_with_reasoning(parts, is_open=True, answer=answer, per_delta=2)
    turns = [*HELLO["messages"], {"role": "assistant", "content": "b", "reasoning_content": "c"}, *HELLO["messages"]]
    request = grpc_request(HELLO | options | {"messages": turns, "stream": True})
    whole = await answers_of(service_of(parts), request)
    assert "[c]b" in parts.tokenizer.decode(parts.generator.requests[-1].prompt_token_ids)
    assert whole[-1].usage.reasoning_tokens == count
    for cut in (len(whole), 3, len(whole) // 2):
        if cut < len(whole):
            request.last_stream_id = whole[cut - 1].stream_id
        rest = await answers_of(service_of(parts), request) if cut < len(whole) else []
        received = [*whole[:cut], *rest]
        assert "".join(one.reasoning_content for one in received) == THOUGHT
        assert "".join(one.text for one in received) == ("" if answer == CALL else answer)
        assert "".join(call.name for one in received for call in one.tool_calls) == ("clock" if answer == CALL else "")


async def test_answer_cut_during_reasoning_has_no_content(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    ids = parts.tokenizer.encode("Let me")
    parts.generator.script = fakes.Script(tokens=ids, reason=FinishReason.LENGTH)
    body = (await client.post(CHAT, json=HELLO)).json()
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Let me", "")
    assert body["usage"]["completion_tokens_details"] == details(len(ids))


def deltas_of(events: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [json.loads(event["data"])["choices"][0]["delta"] for event in events]


async def test_reasoning_stream_resumes_where_it_broke(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    say_with_reasoning(parts, is_open=True)
    headers = {"X-Tandem-Stream-Ids": "1"}
    full = list(events_of((await client.post(CHAT, json=HELLO | {"stream": True}, headers=headers)).text))[:-1]
    for cut in (3, len(full) // 2, len(full) - 3):
        again = await client.post(CHAT, json=HELLO | {"stream": True}, headers={"Last-Event-ID": full[cut]["id"]})
        deltas = deltas_of([*full[: cut + 1], *list(events_of(again.text))[:-1]])
        for name, expected in (("reasoning_content", THOUGHT), ("content", ANSWER)):
            assert "".join(delta.get(name) or "" for delta in deltas) == expected


async def test_responses_separate_reasoning(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    count = say_with_reasoning(parts, is_open=True)
    described = await Described.by(client)
    whole = await client.post("/v1/responses", json={"input": "a"})
    streamed = await client.post("/v1/responses", json={"input": "a", "stream": True})
    for answer in (whole, streamed):
        described.check("POST", "/v1/responses", answer)
    events = [json.loads(event["data"]) for event in events_of(streamed.text)]
    for response in (whole.json(), events[-1]["response"]):
        thought, message = response["output"]
        assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": THOUGHT}])
        assert message["content"][0]["text"] == ANSWER
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": count}
    assert "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta") == THOUGHT
    items = [{"role": "user", "content": "a"}, *whole.json()["output"], {"role": "user", "content": "b"}]
    assert (await client.post("/v1/responses", json={"input": items})).status_code == 200
    prompt = parts.tokenizer.decode(parts.generator.requests[-1].prompt_token_ids)
    assert f"[{THOUGHT}]{ANSWER}" in prompt


async def test_responses_logprobs_exclude_reasoning(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    say_with_reasoning(parts, is_open=True, logprobs=True)
    body = {"input": "a", "include": ["message.output_text.logprobs"]}
    response = await client.post("/v1/responses", json=body | {"stream": True})
    whole = (await client.post("/v1/responses", json=body)).json()
    shown = whole["output"][1]["content"][0]["logprobs"]
    assert bytes(b for entry in shown[:-1] for b in entry["bytes"]).decode().strip() == ANSWER
    last = json.loads(list(events_of(response.text))[-1]["data"])["response"]
    assert last["output"][1]["content"][0]["logprobs"] == shown


async def test_anthropic_messages_separate_reasoning(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    say_with_reasoning(parts, is_open=True)
    described = await Described.by(client)
    whole = await client.post("/v1/messages", json=WORDS)
    streamed = await client.post("/v1/messages", json=WORDS | {"stream": True})
    for answer in (whole, streamed):
        described.check("POST", "/v1/messages", answer)
    blocks = whole.json()["content"]
    thinking = {"type": "thinking", "thinking": THOUGHT, "signature": ""}
    assert blocks == [thinking, {"type": "text", "text": ANSWER}]
    deltas = [json.loads(event["data"]).get("delta", {}) for event in events_of(streamed.text)]
    assert "".join(delta.get("thinking", "") for delta in deltas) == THOUGHT
    assert "".join(delta.get("text", "") for delta in deltas) == ANSWER
    turns = [*WORDS["messages"], {"role": "assistant", "content": blocks}, *WORDS["messages"]]  # type: ignore[misc]
    assert (await client.post("/v1/messages", json=WORDS | {"messages": turns})).status_code == 200
    assert f"[{THOUGHT}]{ANSWER}" in parts.tokenizer.decode(parts.generator.requests[-1].prompt_token_ids)


async def test_reasoning_turned_off_is_absent(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say(ANSWER)
    for path, body in (
        ("/v1/messages", WORDS | {"thinking": {"type": "disabled"}}),
        (CHAT, HELLO | {"reasoning_effort": "none"}),
        (CHAT, HELLO | {"chat_template_kwargs": {"enable_thinking": False}}),
    ):
        answer = (await client.post(path, json=body)).json()
        assert "reasoning_content" not in json.dumps(answer)
        assert ANSWER in json.dumps(answer)
        prompt = parts.tokenizer.decode(parts.generator.requests[-1].prompt_token_ids)
        assert prompt.endswith("<think>\n\n</think>\n\n")


async def test_reasoning_not_disableable_is_refused() -> None:
    async with client_of(parts_of(WRITES)) as client:
        answer = await client.post("/v1/messages", json=WORDS | {"thinking": {"type": "disabled"}})
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        answer = await client.post(CHAT, json=HELLO | {"reasoning_effort": "low"})
        assert error_of(answer)["param"] == "reasoning_effort"
        budget = {"type": "enabled", "budget_tokens": 1024}
        assert (await client.post("/v1/messages", json=WORDS | {"thinking": budget})).status_code == 400


async def test_answer_without_reasoning_family_is_all_content() -> None:
    text = f"<think>{THOUGHT}</think>{ANSWER}"
    for template, config in ((fakes.TEMPLATE, None), (OPENS, RouterConfig(reasoning_parser="none"))):
        parts = parts_of(template, config)
        parts.say(text)
        async with client_of(parts) as client:
            body = (await client.post(CHAT, json=HELLO)).json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert body["usage"]["completion_tokens_details"] == details(0)


async def test_completions_do_not_separate_reasoning(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    say_with_reasoning(parts, is_open=False)
    text = (await client.post(PLAIN, json={"prompt": "a"})).json()["choices"][0]["text"]
    assert text.startswith("<think>")


async def test_vote_ignores_reasoning(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    say_with_reasoning(parts, is_open=True)
    (choice,) = (await client.post(CHAT, json=HELLO | {"n": 3, "vote": True})).json()["choices"]
    assert choice["vote"] == {"answer": ANSWER, "votes": 3, "of": 3}
    assert choice["message"]["content"] == ANSWER
