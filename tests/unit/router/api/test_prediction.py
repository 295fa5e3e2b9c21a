"""The answer that a client expects (OpenAI's `prediction`), over HTTP and gRPC: what dispatch gets, and usage."""

from array import array
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.api.prompts import MAX_CHARS_PER_TOKEN, MAX_PREDICTION_TOKENS
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb
from tandem.values.outputs import PredictionUse
from tests.support.router.servers import fakes
from tests.support.router.servers.both_servers import answers_of, service_of
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of, events

TEXT = "the quick brown fox <|end|> jumps"


@pytest.fixture
def parts() -> fakes.Servers:
    made = fakes.make_servers(fakes.make_tokenizer())
    made.say("hello world", prediction=PredictionUse(5, 2))
    return made


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


def predicted(content: Any = TEXT, **more: Any) -> dict[str, Any]:
    return HELLO | {"prediction": {"type": "content", "content": content}} | more


def chat(prediction: str, **more: Any) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="user", content="hello")]
    return pb.GenerateRequest(chat=pb.Chat(messages=messages), prediction=prediction, **more)


@pytest.mark.parametrize(
    "content", [TEXT, [{"type": "text", "text": "the quick brown"}, {"type": "text", "text": " fox <|end|> jumps"}]]
)
async def test_prediction_reaches_dispatch_as_tokens_of_plain_text(
    parts: fakes.Servers, client: httpx.AsyncClient, content: Any
) -> None:
    answer = await client.post(CHAT, json=predicted(content, n=2))
    assert answer.status_code == 200
    await answers_of(service_of(parts), chat(TEXT, n=2))
    over_http, over_grpc = [request.prediction for request in parts.generator.requests]
    assert over_http == over_grpc == array("i", parts.tokenizer.encode(TEXT, add_special_tokens=False))
    assert fakes.END not in (over_http or ())


@pytest.mark.parametrize("stream", [False, True])
async def test_prediction_use_is_in_usage(parts: fakes.Servers, client: httpx.AsyncClient, *, stream: bool) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await client.post(CHAT, json=predicted(**options))
    usage = events(answer.text)[-1]["usage"] if stream else answer.json()["usage"]
    assert usage["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 2,
    }
    last = (await answers_of(service_of(parts), chat(TEXT)))[-1]
    assert (last.usage.accepted_prediction_tokens, last.usage.rejected_prediction_tokens) == (5, 2)


async def test_prediction_absent_or_empty_is_none(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    for body in (HELLO, HELLO | {"prediction": None}, predicted(""), predicted([])):
        assert (await client.post(CHAT, json=body)).status_code == 200
    await answers_of(service_of(parts), chat(""))
    assert [request.prediction for request in parts.generator.requests] == [None] * 5


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (predicted("a\0b"), "prediction: NUL characters are not allowed"),
        (predicted([{"type": "text"}]), "prediction.content.0.text: Field required"),
        (predicted([{"type": "image_url", "text": ""}]), "prediction.content.0.type: Input should be 'text'"),
        (predicted([{"type": "text", "text": ""}] * 257), "prediction.content: Value error, at most 256 entries"),
        (HELLO | {"prediction": "text"}, "prediction: Input should be an object"),
        (HELLO | {"prediction": {"content": "text"}}, "prediction.type: Field required"),
        (HELLO | {"prediction": {"type": "file", "content": ""}}, "prediction.type: Input should be 'content'"),
        (HELLO | {"prediction": {"type": "content", "content": "", "id": 1}}, "prediction.id: unknown field"),
    ],
)
async def test_prediction_invalid_is_refused_by_name(
    parts: fakes.Servers, client: httpx.AsyncClient, body: dict[str, Any], message: str
) -> None:
    answer = await client.post(CHAT, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "prediction"
    assert error_of(answer)["message"] == message
    assert not parts.generator.requests


async def test_prediction_beyond_bound_is_refused(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    text = "漢" * MAX_PREDICTION_TOKENS
    count = len(parts.tokenizer.encode(text, add_special_tokens=False))
    assert count > MAX_PREDICTION_TOKENS
    answer = await client.post(CHAT, json=predicted(text))
    assert (answer.status_code, error_of(answer)["param"]) == (400, "prediction")
    message = f"prediction must have at most {MAX_PREDICTION_TOKENS} tokens, got {count}"
    assert error_of(answer)["message"] == message
    with pytest.raises(InvalidRequest, match=message):
        await answers_of(service_of(parts), chat(text))
    unread = "a" * (MAX_PREDICTION_TOKENS * MAX_CHARS_PER_TOKEN + 1)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_PREDICTION_TOKENS} tokens, got {len(unread)} characters"):
        await parts.frontend.prompts.encode_prediction(unread)


async def test_prediction_of_plain_prompt_is_refused(parts: fakes.Servers, client: httpx.AsyncClient) -> None:
    answer = await client.post(PLAIN, json={"prompt": "a", "prediction": {"type": "content", "content": "b"}})
    assert (answer.status_code, error_of(answer)["param"]) == (400, "prediction")
    with pytest.raises(InvalidRequest, match="prediction: is allowed with a conversation only"):
        await answers_of(service_of(parts), pb.GenerateRequest(prompt="a", prediction="b"))


async def test_prediction_does_not_change_what_a_stream_is_continued_as(
    parts: fakes.Servers, client: httpx.AsyncClient
) -> None:
    """A stream may be continued with another prediction, or none."""
    for body in (HELLO, predicted(), predicted("else")):
        assert (await client.post(CHAT, json=body | {"seed": 1})).status_code == 200
    first, *others = [(one.sampling, one.prompt_token_ids, one.hash_root) for one in parts.generator.requests]
    assert others == [first, first]
