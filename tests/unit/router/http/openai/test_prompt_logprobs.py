"""Prompt log probabilities at the servers: shapes of answers, and accepted options."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import pytest

from router.grpc.server import GrpcServer, build_server
from router.http.openai import prompt_logprobs
from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    made = fakes.make_servers(tokenizer, RouterConfig(max_answer_values=2000))
    made.say("hello", logprobs=True)
    return made


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


async def ask(client: httpx.AsyncClient, route: str, **body: Any) -> dict[str, Any]:
    response = await client.post(route, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("slice_values", [1, 7, 2048])
async def test_prompt_logprobs_show_own_and_most_likely_tokens(
    client: httpx.AsyncClient, parts: fakes.Servers, slice_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_VALUES", slice_values)
    answer = await ask(client, PLAIN, prompt=[[9, 1, 7], [5]], prompt_logprobs=2, n=2)
    text = parts.tokenizer.bytes_of(7).decode(errors="replace")
    long = [
        None,
        {
            "1": {"logprob": -1.0, "rank": 3, "decoded_token": "<|end|>"},
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "<|bos|>"},
        },
        {
            "7": {"logprob": -7.0, "rank": 3, "decoded_token": text},
            "0": {"logprob": 0.0, "rank": 1, "decoded_token": "<|bos|>"},
            "1": {"logprob": -1.0, "rank": 2, "decoded_token": "<|end|>"},
        },
    ]
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [long, long, [None], [None]]
    assert {choice["text"] for choice in answer["choices"]} == {"hello"}


async def test_chat_prompt_logprobs_are_next_to_choices(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    answer = await ask(client, CHAT, **HELLO, prompt_logprobs=0, n=2)
    prompt = parts.generator.requests[0].prompt_token_ids
    logprobs = answer["prompt_logprobs"]
    assert [list(place) for place in logprobs[1:]] == [[str(token)] for token in prompt[1:]]
    assert "prompt_logprobs" not in answer["choices"][0]
    assert "prompt_logprobs" not in await ask(client, CHAT, **HELLO)


@pytest.mark.parametrize("slice_values", [1, 5, 2048])
async def test_echoed_prompt_has_logprobs(
    client: httpx.AsyncClient, parts: fakes.Servers, slice_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "SLICE_VALUES", slice_values)
    ids = parts.say("hello", logprobs=True)
    fox = parts.tokenizer.encode("the fox")
    answer = await ask(client, PLAIN, prompt=fox, echo=True, logprobs=1, max_tokens=4)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "the foxhello"
    assert logprobs["token_logprobs"] == [None, *(-float(token) for token in fox[1:]), *(-0.5 for _ in ids)]
    assert logprobs["top_logprobs"][:2] == [None, {"<|bos|>": 0.0}]
    assert "".join(logprobs["tokens"][:-1]) == "the foxhello"
    assert [
        choice["text"][begin:][: len(t)] for begin, t in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
    ] == [
        *logprobs["tokens"][:-1],
        "",
    ]
    assert answer["usage"]["completion_tokens"] == len(ids)


async def test_echo_without_answer_shows_prompt_only(client: httpx.AsyncClient, parts: fakes.Servers) -> None:
    answer = await ask(client, PLAIN, prompt=[[9, 8], [7]], echo=True, logprobs=0, max_tokens=0)
    assert [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]] == [[None, -8.0], [None]]
    assert [choice["logprobs"]["top_logprobs"] for choice in answer["choices"]] == [[None, {}], [None]]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert (answer["usage"]["completion_tokens"], answer["usage"]["prompt_tokens"]) == (0, 3)
    plain = await ask(client, PLAIN, prompt="fox", echo=True, max_tokens=0)
    assert (plain["choices"][0]["text"], plain["choices"][0]["logprobs"]) == ("fox", None)
    whole = [5] * fakes.CONTEXT
    answer = await ask(client, PLAIN, prompt=whole, echo=True, logprobs=0, max_tokens=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == fakes.CONTEXT
    assert (await client.post(PLAIN, json={"prompt": whole, "echo": True, "max_tokens": 1})).status_code == 400


@pytest.mark.parametrize(
    ("fewer", "param"),
    [({"prompt_logprobs": 5, "prompt": [5] * 300}, "prompt"), ({"echo": True, "logprobs": 3, "n": 2}, "prompt")],
)
async def test_prompt_logprobs_beyond_bound_are_refused(
    client: httpx.AsyncClient, parts: fakes.Servers, fewer: dict[str, Any], param: str
) -> None:
    body = {"prompt": [[5] * 110, [6] * 110], "max_tokens": 1} | fewer
    refused = await client.post(PLAIN, json=body)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == param
    assert not parts.generator.requests


async def test_prompt_logprobs_over_grpc_equal_http(parts: fakes.Servers) -> None:
    ids = parts.say("hello")
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    prompt = pb.TokenIds(ids=[9, 8, 7])
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        stub = InferenceStub(channel)
        answers = [one async for one in stub.Generate(pb.GenerateRequest(prompt_token_ids=prompt, prompt_logprobs=1))]
        places = [place for one in answers for place in one.prompt_logprobs]
        assert [(p.token_id, p.logprob, p.rank, p.top[0].token_id) for p in places] == [
            (8, -8.0, 3, 0),
            (7, -7.0, 3, 0),
        ]
        assert [token for one in answers for token in one.token_ids] == ids
        nothing = common.SamplingParams(max_tokens=0)
        request = pb.GenerateRequest(prompt_token_ids=prompt, prompt_logprobs=0, sampling=nothing)
        answers = [one async for one in stub.Generate(request)]
        assert [len(one.prompt_logprobs) for one in answers] == [2, 0]
        assert answers[-1].usage.completion_tokens == 0
        for wrong in ({"prompt_logprobs": 21}, {"prompt_logprobs": 1, "stream_ids": True}):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(stub.Generate(pb.GenerateRequest(prompt="a", **wrong))))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
