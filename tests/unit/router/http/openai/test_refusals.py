"""The HTTP server in process: refused requests and the format of errors."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.errors import DeadlineExceeded, InternalError, Overloaded, Unavailable
from tandem.values.outputs import FinishReason
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of, events

IMAGE = {"type": "image_url", "image_url": {"url": "https://127.0.0.1/a.png"}}
RESPONSES = "/v1/responses"


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


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"structured_outputs": {"regex": "(a+)+b"}}, "structured_outputs"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 3, "n": 0}, "n"),
        ({"n": 17, "vote": True}, "n"),
        ({"use_beam_search": True, "best_of": 0}, "best_of"),
        ({"min_tokens": 600}, "min_tokens"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "vote": True}, "best_of"),
        ({"n": 2, "vote": True, "stream": True}, "vote"),
        ({"vote_pattern": "a"}, "vote_pattern"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"use_beam_search": True, "vote": True}, "use_beam_search"),
        ({"use_beam_search": True, "best_of": 17}, "best_of"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "n": 16, "stop_token_ids": list(range(5, 25))}, "use_beam_search"),
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"vote": True, "vote_pattern": "("}, "vote_pattern"),
        ({"vote": True, "vote_pattern": "a" * 513}, "vote_pattern"),
        ({"vote": 1}, "vote"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [2**31]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x" * 65]}, "bad_words"),
        ({"bad_words": [f"w{i}" for i in range(200)]}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2**31}, "truncate_prompt_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"worker": "w1"}, "worker"),
        ({"tenant": "x"}, "tenant"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"n": True}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 2**31}, "n"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 600}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": ["x" * (1 << 19)]}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 1, "07": 2}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(5000)}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"cache_salt": "x" * 2000}, "cache_salt"),
        ({"request_id": "a\r\nb"}, "request_id"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages"),
        ({"messages": [{}] * 100_000}, "messages"),
        ({"model": "gpt-4"}, "model"),
        ({"model": 5}, "model"),
    ],
)
async def test_chat_unsupported_fields_are_refused_by_name(
    refusing_client: httpx.AsyncClient, refusing: fakes.Servers, change: dict[str, Any], param: str
) -> None:
    refusing.say("hello")
    answer = await refusing_client.post(CHAT, json=HELLO | change)
    assert answer.status_code == (404 if param == "model" and change["model"] == "gpt-4" else 400)
    assert error_of(answer)["param"] == param
    assert not refusing.generator.requests


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "content of type 'image_url' is not supported"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "0.content.0.text: "),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "x": 3}]}]}, "content.0.x: unknown field"),
        (CHAT, {"messages": [{"role": "user", "content": [3]}]}, "content.0: Input should be an object"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages.0.content: Input should be a valid string"),
        (CHAT, {"stop": ["a", 3]}, "stop.1: Input"),
        (CHAT, {"str": 3}, "str: unknown field"),
        (CHAT, {"tool_choice": {"type": "function", "function": "x"}}, "tool_choice.function: Input should be an obj"),
        (CHAT, {"tools": [{"type": "web_search"}]}, "tools: a tool of type 'web_search' is not supported"),
        (RESPONSES, {"input": [{"role": "user", "content": [IMAGE]}]}, "content of type 'image_url' is not supported"),
        (RESPONSES, {"input": [{"type": "web_search_call", "action": {}}]}, "an item of type 'web_search_call' is"),
        (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, "a tool of type 'web_search' is not"),
    ],
)
async def test_refusal_names_the_intended_union_branch(
    refusing_client: httpx.AsyncClient, path: str, change: dict[str, Any], words: str
) -> None:
    answer = await refusing_client.post(path, json=(HELLO if path == CHAT else {}) | change)
    assert answer.status_code == 400
    assert words in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        (HELLO | {"add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "a"} | HELLO, "prompt"),
        ({"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ],
)
async def test_tokenize_options_without_effect_are_refused(
    refusing_client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    answer = await refusing_client.post("/tokenize", json=body)
    assert (answer.status_code, error_of(answer)["param"]) == (400, param)


async def test_fields_without_effect_are_accepted(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello")
    notes = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "parallel_tool_calls": True, "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"}, "best_of": 1, "suffix": None, "bad_words": [], "model": fakes.MODEL,
        "temperature": None, "seed": None, "stop": None, "logit_bias": None, "service_tier": "auto",
    }  # fmt: skip
    assert (await client.post(CHAT, json=HELLO | notes)).status_code == 200
    parts_of_text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts_of_text}, {"role": "assistant", "content": None}]}
    assert (await client.post(CHAT, json=body)).status_code == 200


async def test_sampling_fields_reach_dispatch(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello")
    given = {
        "temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "repetition_penalty": 1.1, "seed": 5, "min_tokens": 1, "ignore_eos": True, "max_completion_tokens": 9,
    }  # fmt: skip
    more = {
        "logit_bias": {"7": -1},
        "stop_token_ids": [4],
        "priority": 3,
        "allowed_token_ids": [5, 6],
        "bad_words": ["a"],
    }
    await client.post(CHAT, json=HELLO | given | more | {"priority": 3})
    request = parts.generator.requests[0]
    words = [parts.frontend.tokenizer.encode(text, add_special_tokens=False) for text in ("a", " a")]
    assert request.sampling.bad_words == tuple(map(tuple, words))
    assert request.sampling.allowed_token_ids == (5, 6)
    renamed = {("max_tokens" if name == "max_completion_tokens" else name): value for name, value in given.items()}
    assert {name: getattr(request.sampling, name) for name in renamed} == renamed
    assert (request.sampling.logit_bias, request.sampling.stop_token_ids, request.priority) == ({7: -1.0}, (4,), 3)


async def test_json_nan_or_infinity_is_refused(client: httpx.AsyncClient) -> None:
    for constant in ("NaN", "Infinity", "-Infinity"):
        body = f'{{"user": "NaN", "temperature": {constant}, "logit_bias": {{}}}}'
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert error_of(answer)["message"] == (
            f"the body is not valid JSON: {constant} is not a JSON number; send a finite number or null"
        )
    cut = await client.post(CHAT, content=b'{"user": "NaN", "seed": ', headers={"content-type": "application/json"})
    assert "NaN" not in error_of(cut)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"[" * 100_000 + b"]" * 100_000,
        b'{"messages": ' + b"[" * 999 + b"]" * 999 + b"}",
        b'{"model": "a", "model": "b"}',
        b'{"messages": [{"role": "user", "role": "user"}]}',
        b'{"temperature": NaN}',
        b'{"temperature": 1e400}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"user": "\\ud800"}',
        b'{"user": "\xff"}',
        b"{" + b",".join(b'"k%d": 1' % i for i in range(50_000)) + b"}",
    ],
)
async def test_malformed_json_is_refused(refusing_client: httpx.AsyncClient, body: bytes) -> None:
    for route in (CHAT, PLAIN, "/tokenize", "/detokenize"):
        answer = await refusing_client.post(route, content=body)
        assert answer.status_code == 400
        assert error_of(answer)["type"] == "BadRequestError"


async def test_body_beyond_bound_is_413(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    answer = await client.post(CHAT, content=b" " * (parts.config.max_body_bytes + 1))
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "request_too_large"

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65536

    assert (await client.post(CHAT, content=endless())).status_code == 413


async def test_unknown_route_or_method_is_refused(client: httpx.AsyncClient) -> None:
    assert error_of(await client.get("/nowhere"))["code"] == "route_not_found"
    answer = await client.get(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert error_of(answer)["code"] == "method_not_allowed"


async def test_completions_context_and_field_errors_are_named(client: httpx.AsyncClient) -> None:
    answer = await client.post(PLAIN, json={"prompt": [5] * fakes.CONTEXT})
    assert error_of(answer)["code"] == "context_length_exceeded"
    assert str(fakes.CONTEXT) in error_of(answer)["message"]
    streamed = {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}
    assert error_of(await client.post(PLAIN, json=streamed))["param"] == "echo"
    assert error_of(await client.post(PLAIN, json={"prompt": "a", "max_tokens": 0}))["param"] == "max_tokens"
    assert error_of(await client.post(PLAIN, json={"prompt": "a", "logprobs": 21}))["param"] == "logprobs"
    assert error_of(await client.post(PLAIN, json={}))["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_token_keep_their_status(
    client: httpx.AsyncClient, parts: fakes.Servers, stream: bool
) -> None:
    for error, status, retry in ((Overloaded("full", retry_after_s=2.5), 429, "3"), (Unavailable("none"), 503, "1")):
        parts.generator.script = fakes.Script(error=error)
        answer = await client.post(CHAT, json=HELLO | {"stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (status, retry)
        assert error_of(answer)["message"] == error.message


@pytest.mark.parametrize("stream", [False, True])
async def test_deadline_exceeded_is_504(client: httpx.AsyncClient, parts: fakes.Servers, stream: bool) -> None:
    parts.generator.script = fakes.Script(error=DeadlineExceeded("the request's time ran out in the queue"))
    answer = await client.post(CHAT, json=HELLO | {"stream": stream, "priority": 4})
    assert answer.status_code == 504
    assert error_of(answer)["code"] == "deadline_exceeded"
    assert error_of(answer)["message"] == "the request's time ran out in the queue"
    request = parts.generator.requests[0]
    assert (request.priority, request.deadline_s) == (4, 1000.0 + parts.config.request_timeout_s)


async def test_error_after_the_first_token_is_an_event(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello world", error=InternalError("worker lost"), error_after=2)
    answer = await client.post(CHAT, json=HELLO | {"stream": True})
    assert answer.status_code == 200
    assert events(answer.text)[-1]["error"]["message"] == "worker lost"


@pytest.mark.parametrize("stream", [False, True])
async def test_unexpected_error_hides_its_details(
    client: httpx.AsyncClient, parts: fakes.Servers, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_request: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(parts.generator, "generate", broken)
    answer = await client.post(CHAT, json=HELLO | {"stream": stream})
    assert answer.status_code == 500
    assert error_of(answer) == {
        "message": "internal error",
        "type": "InternalServerError",
        "param": None,
        "code": "internal_error",
    }


async def test_failed_choice_fails_the_answer(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello", reason=FinishReason.ERROR)
    assert (await client.post(CHAT, json=HELLO)).status_code == 500


async def test_request_id_header_is_echoed_unless_malformed(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    parts.say("hello")
    made = await client.post(CHAT, json=HELLO)
    given = await client.post(CHAT, json=HELLO | {"request_id": "mine-2"}, headers={"X-Request-Id": "mine-1"})
    assert len(made.headers["x-request-id"]) == 32
    assert given.headers["x-request-id"] == "mine-1"
    assert given.json()["id"] == "chatcmpl-mine-2"
    assert not {"mine-1", "mine-2"} & {r.request_id for r in parts.generator.requests}
    for bad in ("a b", "x" * 129):
        answer = await client.post(CHAT, json=HELLO, headers={"X-Request-Id": bad})
        assert error_of(answer)["param"] == "X-Request-Id"
        assert answer.headers["x-request-id"] != bad
    many = {f"x-{i}": "1" for i in range(1000)}
    assert (await client.post(CHAT, json=HELLO, headers=many)).status_code == 431


async def test_missing_key_is_401(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer, RouterConfig(api_keys=(SecretStr("key-a"), SecretStr("key-b"))))
    parts.say("hello")
    async with client_of(parts) as client:
        for headers in (
            {},
            {"Authorization": "Bearer nope"},
            {"Authorization": "Basic key-a"},
            {"Authorization": b"Bearer \xff"},
        ):
            for answer in (
                await client.post(CHAT, json=HELLO, headers=headers),
                await client.get("/v1/models", headers=headers),
            ):
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert error_of(answer)["type"] == "AuthenticationError"
        for key in ("key-a", "key-b", "key-a"):
            answer = await client.post(CHAT, json=HELLO, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert (await client.get("/health")).status_code == 200
    first, second, third = (r.hash_root for r in parts.generator.requests)
    assert first == third != second


async def test_metrics_page_counts_requests_and_hides_paths(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    ids = parts.say("hello world")
    await client.post(CHAT, json=HELLO)
    await client.get("/secret-path")
    page = (await client.get("/metrics")).text
    labels = f'{{engine="router",model_name="{fakes.MODEL}"}}'
    assert f"vllm:generation_tokens_total{labels} {float(len(ids))}" in page
    assert f"vllm:prefix_cache_hits_total{labels} 7.0" in page
    assert f"vllm:num_requests_running{labels} 0.0" in page
    assert 'tandem_http_requests_total{method="POST",route="/v1/chat/completions",status="200"} 1.0' in page
    assert 'route="unknown",status="404"' in page
    assert "secret-path" not in page


@pytest.mark.parametrize(
    ("keep", "kept"), [(3, [3, 4, 5]), (5, [1, 2, 3, 4, 5]), (9, [1, 2, 3, 4, 5]), (-1, [1, 2, 3, 4, 5])]
)
async def test_truncate_prompt_tokens_keeps_last_tokens(
    client: httpx.AsyncClient, parts: fakes.Servers, keep: int, kept: list[int]
) -> None:
    parts.say("hello")
    body = {"prompt": [1, 2, 3, 4, 5], "truncate_prompt_tokens": keep}
    assert (await client.post(PLAIN, json=body)).status_code == 200
    assert list(parts.generator.requests[0].prompt_token_ids) == kept


async def test_truncate_prompt_tokens_shortens_prompt_beyond_context(
    client: httpx.AsyncClient, parts: fakes.Servers
) -> None:
    parts.say("hello")
    text = "x" * (2 * fakes.CONTEXT)
    assert (await client.post(PLAIN, json={"prompt": text})).status_code == 400
    assert (await client.post(PLAIN, json={"prompt": text, "truncate_prompt_tokens": -1})).status_code == 200
    assert len(parts.generator.requests[0].prompt_token_ids) == fakes.CONTEXT - 1
