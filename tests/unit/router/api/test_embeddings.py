"""Embeddings at both servers: vectors of length one, in the order of the inputs; what is refused."""

import asyncio
import base64
import dataclasses
import json
import struct
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import pytest

from router.api import embeddings
from router.grpc.server import GrpcServer, build_server
from router.text.tokenizer import Tokenizer
from tandem.client.aio import AsyncClient
from tandem.client.sync import Client
from tandem.config.admission import QueueConfig
from tandem.config.cluster import RouterConfig
from tandem.errors import InvalidRequest
from tandem.pooling_model import DenseLayer, PoolingModel, PoolingTask
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tandem.values.pooling import PoolingMode
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, client_of, error_of

EMBED = "/v1/embeddings"
UNIT = pytest.approx([0.6, 0.0, -0.8], abs=1e-6)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer, RouterConfig(max_answer_values=600))


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer, RouterConfig(max_answer_values=600))


@pytest.fixture
async def client(parts: fakes.Servers) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(parts) as client:
        yield client


@pytest.mark.parametrize(
    ("inputs", "count"), [("fox", 1), (["fox", "a dog"], 2), ([5, 6, 7], 1), ([[5], [6, 7]], 2), (["fox"] * 200, 200)]
)
async def test_embeddings_accept_every_input_form(
    client: httpx.AsyncClient, parts: fakes.Servers, inputs: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "_TOGETHER", 8)
    response = await client.post(EMBED, json={"input": inputs, "model": fakes.MODEL, "user": "me"})
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["object"], body["model"]) == ("list", fakes.MODEL)
    assert [one["index"] for one in body["data"]] == list(range(count))
    assert all(one["object"] == "embedding" and one["embedding"] == UNIT for one in body["data"])
    tokens = sum(len(request.prompt_token_ids) for request in parts.generator.requests)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["pooling"], body["trained_for_embeddings"]) == ("mean", False)
    assert len(parts.generator.requests) == count
    (spent,) = json.loads(parts.metrics.usage.render())["tenants"].values()
    assert (spent["requests"], spent["prompt_tokens"], spent["completion_tokens"]) == (count, tokens, 0)
    assert 'vllm:request_success_total{engine="router",finished_reason="length"' in parts.metrics.render().decode()


async def test_embeddings_base64_is_little_endian_floats(client: httpx.AsyncClient) -> None:
    body = (await client.post(EMBED, json={"input": "fox", "encoding_format": "base64"})).json()
    assert list(struct.unpack("<3f", base64.b64decode(body["data"][0]["embedding"]))) == UNIT


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"dimensions": 2}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", [5]]}, "input"),
        ({"input": [5.5]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [5] * (fakes.CONTEXT + 1)}, "input"),
        ({"input": ["a"] * 201}, "input"),
        ({"input": None}, "input"),
        ({"temperature": 1.0}, "temperature"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"prompt": "query: "}, "prompt"),
        ({"prompt_name": "query", "task": "query"}, "task"),
    ],
)
async def test_embeddings_invalid_request_is_refused(
    refusing_client: httpx.AsyncClient, change: dict[str, Any], param: str
) -> None:
    response = await refusing_client.post(EMBED, json={"input": "a"} | change)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param


async def test_embeddings_accept_input_of_context_length(client: httpx.AsyncClient) -> None:
    assert (await client.post(EMBED, json={"input": [5] * fakes.CONTEXT})).status_code == 200
    assert (await client.post(EMBED, json={"input": "a", "model": "other"})).status_code == 404


async def test_embeddings_over_grpc_equal_http(parts: fakes.Servers) -> None:
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    ids = pb.EmbedInput(token_ids=pb.TokenIds(ids=[5, 6]))
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        stub = InferenceStub(channel)
        answer = await stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="fox"), ids]))
        assert [list(one.values) for one in answer.embeddings] == [UNIT, UNIT]
        assert (answer.pooling, answer.trained_for_embeddings) == ("mean", False)
        assert answer.usage.prompt_tokens == sum(len(r.prompt_token_ids) for r in parts.generator.requests)
        for wrong in (
            pb.EmbedRequest(),
            pb.EmbedRequest(inputs=[pb.EmbedInput()]),
            pb.EmbedRequest(inputs=[pb.EmbedInput(text="")]),
            pb.EmbedRequest(inputs=[ids], cache_salt=""),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Embed(wrong)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_embeddings_work_with_own_client(parts: fakes.Servers) -> None:
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server:
        address = f"127.0.0.1:{grpc_server.port}"
        async with AsyncClient(address) as client:
            assert await client.embed(["fox", [5, 6]], cache_salt="mine") == [UNIT, UNIT]
            with pytest.raises(InvalidRequest) as caught:
                await client.embed(["fox"], prompt_name="query", dimensions=2)
            assert caught.value.param == "dimensions"
            with pytest.raises(InvalidRequest) as caught:
                await client.embed([])
        assert caught.value.param == "input"

        def in_a_thread() -> list[list[float]]:
            with Client(address) as client:
                return client.embed([[5, 6]])

        assert await asyncio.to_thread(in_a_thread) == [UNIT]
    assert list(parts.generator.requests[1].prompt_token_ids) == [5, 6]


TRAINED = PoolingModel(
    task=PoolingTask.EMBED,
    modes=(PoolingMode.MEAN, PoolingMode.LAST),
    pooled_size=3,
    includes_prompt=False,
    normalizes=False,
    prompts={"query": "the fox ", "document": ""},
    max_tokens=20,
    dense=(
        DenseLayer(folder="d", in_features=3, out_features=3, has_bias=False, activation="tanh", has_residual=False),
    ),
)


async def ask(tokenizer: Tokenizer, body: dict[str, Any], **changes: Any) -> tuple[httpx.Response, fakes.Servers]:
    """Ask a model whose files define its embeddings."""
    parts = fakes.make_servers(tokenizer, pooling=dataclasses.replace(TRAINED, **changes))
    async with client_of(parts) as client:
        return await client.post(EMBED, json=body), parts


async def test_embeddings_trained_model_is_pooled_as_its_files_say(tokenizer: Tokenizer) -> None:
    response, parts = await ask(tokenizer, {"input": ["a dog", "fox"], "prompt_name": "query"})
    assert response.status_code == 200, response.text
    body = response.json()
    assert (body["pooling"], body["trained_for_embeddings"]) == ("mean+lasttoken", True)
    prompt = tokenizer.encode("the fox ")
    for request, text, shown in zip(parts.generator.requests, ("a dog", "fox"), body["data"], strict=True):
        ids = tokenizer.encode("the fox " + text)
        assert list(request.prompt_token_ids) == ids
        assert request.scoring is not None
        assert (request.scoring.pooling, request.scoring.through_head) == (TRAINED.modes, True)
        assert request.scoring.num_skipped == len(prompt)
        assert shown["embedding"] == [3.0 * len(ids), 0.0, -4.0 * len(ids)], "not scaled: no Normalize"


@pytest.mark.parametrize("name", ["prompt_name", "task"])
async def test_embeddings_prompt_without_skipping_or_for_ids(tokenizer: Tokenizer, name: str) -> None:
    response, parts = await ask(tokenizer, {"input": "fox", name: "query"}, includes_prompt=True)
    assert response.status_code == 200
    (request,) = parts.generator.requests
    assert request.scoring is not None
    assert request.scoring.num_skipped == 0
    response, parts = await ask(tokenizer, {"input": "fox"}, default_prompt_name="query")
    assert len(parts.generator.requests[0].prompt_token_ids) == len(tokenizer.encode("the fox fox"))
    response, parts = await ask(tokenizer, {"input": "fox", "prompt": ""}, default_prompt_name="query")
    assert len(parts.generator.requests[0].prompt_token_ids) == len(tokenizer.encode("fox"))
    response, parts = await ask(tokenizer, {"input": [5, 6]}, default_prompt_name="query")
    assert response.status_code == 200
    assert list(parts.generator.requests[0].prompt_token_ids) == [5, 6]


async def test_embeddings_dimensions_cut_and_scale_again(tokenizer: Tokenizer) -> None:
    response, _ = await ask(tokenizer, {"input": "fox", "dimensions": 2}, normalizes=True)
    assert response.json()["data"][0]["embedding"] == [1.0, 0.0]
    response, _ = await ask(tokenizer, {"input": "fox", "dimensions": 1})
    assert len(response.json()["data"][0]["embedding"]) == 1
    response, _ = await ask(tokenizer, {"input": "fox", "normalize": True})
    assert response.json()["data"][0]["embedding"] == UNIT


async def test_embeddings_long_input_is_refused_or_cut(tokenizer: Tokenizer) -> None:
    text = "漢字 " * 30
    response, _ = await ask(tokenizer, {"input": text})
    assert response.status_code == 400
    assert "this model takes at most 20" in error_of(response)["message"]
    for most, kept in ((-1, 20), (7, 7), (20, 20)):
        for sent in (text, tokenizer.encode(text)):
            response, parts = await ask(tokenizer, {"input": sent, "truncate_prompt_tokens": most})
            assert response.status_code == 200, response.text
            assert list(parts.generator.requests[0].prompt_token_ids) == tokenizer.encode(text)[:kept]


async def test_embeddings_cut_into_an_unpooled_prompt_is_refused_before_any_order(tokenizer: Tokenizer) -> None:
    count = len(tokenizer.encode("the fox "))
    body = {"input": ["fox", "a dog"], "prompt_name": "query"}
    for kept, param in ((1, "truncate_prompt_tokens"), (count, "truncate_prompt_tokens"), (count + 1, None)):
        response, parts = await ask(tokenizer, body | {"truncate_prompt_tokens": kept})
        assert response.status_code == (200 if param is None else 400), response.text
        if param is not None:
            assert error_of(response)["param"] == param
            assert f"behind the prompt's {count}, which are not pooled" in error_of(response)["message"]
            assert parts.generator.requests == []
    for sent in ({}, {"truncate_prompt_tokens": -1}):
        response, parts = await ask(tokenizer, {"input": "fox", "prompt": "zxqjvkw" * 9} | sent)
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
        assert parts.generator.requests == []
    response, _ = await ask(tokenizer, body | {"truncate_prompt_tokens": 1}, includes_prompt=True)
    assert response.status_code == 200, "what is pooled may be cut"


async def test_embeddings_text_that_melts_into_an_unpooled_prompt_is_refused(tokenizer: Tokenizer) -> None:
    text = "the quick brown fox"
    places = range(1, len(text))
    at = next(at for at in places if len(tokenizer.encode(text[:at])) == len(tokenizer.encode(text[: at + 1])))
    response, parts = await ask(tokenizer, {"input": ["dog", text[at]], "prompt": text[:at]})
    assert (response.status_code, error_of(response)["param"]) == (400, "input")
    assert parts.generator.requests == []


async def test_embeddings_tokens_of_one_call_are_bounded(tokenizer: Tokenizer) -> None:
    """A prompt in front makes many tokens of a small body."""
    parts = fakes.make_servers(
        tokenizer,
        RouterConfig(queue=QueueConfig(max_tokens=100)),
        pooling=dataclasses.replace(TRAINED, max_tokens=None),
    )
    async with client_of(parts) as client:
        body = {"input": ["a"] * 50, "prompt": "漢字" * 10}
        response = await client.post(EMBED, json=body)
        assert (response.status_code, error_of(response)["param"]) == (400, "input")
        expected = "input: more than 100 tokens in one call (router.queue.max_tokens): send fewer or shorter texts"
        assert error_of(response)["message"] == expected
        assert parts.generator.requests == []
        assert (await client.post(EMBED, json={"input": ["a"] * 50})).status_code == 200
        assert (await client.post(EMBED, json={"input": [[5] * 50] * 3})).status_code == 400


@pytest.mark.parametrize(
    ("body", "changes", "param"),
    [
        ({"dimensions": 0}, {}, "dimensions"),
        ({"dimensions": 4}, {}, "dimensions"),
        ({"dimensions": 1}, {"dimensions": (2,)}, "dimensions"),
        ({"prompt_name": "passage"}, {}, "prompt_name"),
        ({"prompt_name": "query", "prompt": "x"}, {}, "prompt"),
        ({"prompt": "x" * 8193}, {}, "prompt"),
        ({"input": [5], "prompt_name": "query"}, {}, "prompt_name"),
        ({"input": [5] * 21}, {}, "input"),
        ({"input": ["a", ""]}, {}, "input"),
        ({"input": "a\0"}, {}, "input"),
        ({"truncate_prompt_tokens": 21}, {}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 0}, {}, "truncate_prompt_tokens"),
        ({}, {"task": PoolingTask.CLASSIFY}, "model"),
    ],
)
async def test_embeddings_trained_model_refuses_invalid_request(
    tokenizer: Tokenizer, body: dict[str, Any], changes: dict[str, Any], param: str
) -> None:
    response, parts = await ask(tokenizer, {"input": "a"} | body, **changes)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert parts.generator.requests == []


@pytest.mark.parametrize(("task", "kind"), [(PoolingTask.EMBED, "embeddings"), (PoolingTask.CLASSIFY, "relevance")])
async def test_embeddings_model_without_head_generates_no_text(
    tokenizer: Tokenizer, task: PoolingTask, kind: str
) -> None:
    parts = fakes.make_servers(tokenizer, pooling=dataclasses.replace(TRAINED, task=task))
    async with client_of(parts) as client:
        for path, body in (
            (PLAIN, {"prompt": "a"}),
            (CHAT, HELLO),
            (PLAIN, {"prompt": "a", "echo": True, "logprobs": 1}),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 400
            assert error_of(response)["param"] == "model"
            assert kind in error_of(response)["message"]


async def test_embeddings_options_over_grpc_equal_http(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer, pooling=TRAINED)
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        stub = InferenceStub(channel)
        fields = {"prompt_name": "query", "dimensions": 1, "normalize": True, "truncate_prompt_tokens": 6}
        answer = await stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a dog")], **fields))
        assert (answer.pooling, answer.trained_for_embeddings) == ("mean+lasttoken", True)
        assert list(answer.embeddings[0].values) == [1.0]
        assert len(parts.generator.requests[0].prompt_token_ids) == 6
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Embed(pb.EmbedRequest(inputs=[pb.EmbedInput(text="a")], prompt="x", prompt_name="query"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
