"""The gRPC server over real sockets: the same text as HTTP, status codes, cancellation, health, reflection."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from pydantic import SecretStr

from router.grpc.server import SERVICE_NAME, GrpcServer, build_server
from router.text.tokenizer import Tokenizer
from tandem.config.cluster import RouterConfig
from tandem.errors import Overloaded
from tandem.v1 import common_pb2
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.router.servers import fakes
from tests.support.router.servers.grpc_client import HELLO, WAIT_S, refused


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def parts(tokenizer: Tokenizer) -> fakes.Servers:
    return fakes.make_servers(tokenizer, RouterConfig(max_body_bytes=1 << 16))


@pytest.fixture
async def grpc_server(parts: fakes.Servers) -> AsyncIterator[GrpcServer]:
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server:
        yield grpc_server


@pytest.fixture
async def channel(grpc_server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> InferenceStub:
    return InferenceStub(channel)


async def test_grpc_trailers_have_timing(parts: fakes.Servers, stub: InferenceStub) -> None:
    parts.say("hello")
    call = stub.Generate(pb.GenerateRequest(chat=HELLO))
    usage = [answer async for answer in call][-1].usage
    trailing = dict(await call.trailing_metadata())
    timing = json.loads(trailing["tandem-timing"])
    assert (timing["queue_s"], timing["decode_queue_s"], timing["cost"]["kv_byte_s"]) == (0.25, 0.25, 2048.0)
    assert trailing["server-timing"].startswith("queue;dur=250.000, prefill;dur=500.000")
    assert (usage.times.cached.prefill_pool, usage.times.cached.fetched, usage.times.cached.host) == (4, 2, 1)


async def test_grpc_generate_streams_text(parts: fakes.Servers, stub: InferenceStub) -> None:
    ids = parts.say("hello wörld 😀 STOP", logprobs=True)
    sampling = common_pb2.SamplingParams(temperature=0.0, seed=4, num_logprobs=2)
    request = pb.GenerateRequest(chat=HELLO, sampling=sampling, n=2, priority=-1, cache_salt="s")
    answers = [answer async for answer in stub.Generate(request)]
    for choice in (0, 1):
        mine = [a for a in answers if a.choice_index == choice]
        assert "".join(a.text for a in mine) == "hello wörld 😀 STOP"
        assert [i for a in mine for i in a.token_ids] == ids
        assert mine[-1].finish_reason == common_pb2.FINISH_REASON_STOP
        assert mine[0].logprobs[0].top[0].token_id == ids[0]
    usage = answers[-1].usage
    assert not any(a.HasField("usage") for a in answers[:-1])
    assert (usage.completion_tokens, usage.cached_tokens, usage.times.transfer_s) == (2 * len(ids), 7, 0.125)
    (routed,) = parts.generator.requests
    assert routed.sampling.greedy
    assert (routed.sampling.seed, routed.num_choices, routed.priority) == (4, 2, -1)
    assert usage.prompt_tokens == len(routed.prompt_token_ids)


async def test_grpc_absent_fields_get_defaults(parts: fakes.Servers, stub: InferenceStub) -> None:
    parts.say("hello")
    inputs = (
        pb.GenerateRequest(prompt="hello"),
        pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5, 6]), sampling=common_pb2.SamplingParams()),
    )
    for request in inputs:
        assert "".join([a.text async for a in stub.Generate(request)]) == "hello"
        routed = parts.generator.requests[-1]
        assert (routed.sampling.max_tokens, routed.sampling.temperature, routed.sampling.seed) == (16, 1.0, 99)


async def test_grpc_stop_strings_end_the_text(parts: fakes.Servers, stub: InferenceStub) -> None:
    parts.say("hello STOP here")
    request = pb.GenerateRequest(prompt="a", stop=["STOP"])
    assert "".join([a.text async for a in stub.Generate(request)]) == "hello "


async def test_grpc_generated_text_equals_http(parts: fakes.Servers, stub: InferenceStub) -> None:
    answer = await stub.Tokenize(pb.TokenizeRequest(text="hello 😀"))
    assert list(answer.token_ids) == parts.tokenizer.encode("hello 😀")
    assert answer.max_model_len == fakes.CONTEXT
    assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.token_ids))).text == "hello 😀"
    assert (await stub.Tokenize(pb.TokenizeRequest(chat=HELLO))).token_ids[0] == fakes.BOS
    assert [m.id for m in (await stub.ListModels(pb.ListModelsRequest())).models] == [fakes.MODEL]


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: pb.GenerateRequest(), "input"),
        (lambda: pb.GenerateRequest(prompt=""), "prompt"),
        (lambda: pb.GenerateRequest(prompt="a", n=0), "n"),
        (lambda: pb.GenerateRequest(prompt="a", n=2**31), "n"),
        (lambda: pb.GenerateRequest(prompt="a\0"), "prompt"),
        (lambda: pb.GenerateRequest(prompt="a", stop=[""]), "stop"),
        (lambda: pb.GenerateRequest(chat=pb.Chat()), "messages"),
        (lambda: pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[2**32 - 1])), "prompt_token_ids"),
        (lambda: pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=[5] * fakes.CONTEXT)), "prompt"),
        (lambda: pb.GenerateRequest(prompt="a", sampling=common_pb2.SamplingParams(max_tokens=0)), "max_tokens"),
        (
            lambda: pb.GenerateRequest(prompt="a", sampling=common_pb2.SamplingParams(temperature=float("nan"))),
            "temperature",
        ),
    ],
)
async def test_grpc_invalid_requests_are_refused(
    stub: InferenceStub, parts: fakes.Servers, make: Callable[[], pb.GenerateRequest], param: str
) -> None:
    error = await refused(stub.Generate(make()))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(error.trailing_metadata())["tandem-error-param"] == param
    assert not parts.generator.requests


async def test_grpc_errors_have_status_codes(
    stub: InferenceStub, parts: fakes.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        await refused(stub.Generate(pb.GenerateRequest(model="gpt-4", prompt="a")))
    ).code() is grpc.StatusCode.NOT_FOUND
    assert (await refused(stub.Tokenize(pb.TokenizeRequest()))).code() is grpc.StatusCode.INVALID_ARGUMENT
    big = await refused(stub.Generate(pb.GenerateRequest(prompt="a" * (1 << 17))))
    assert big.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    parts.generator.script = fakes.Script(error=Overloaded("full", retry_after_s=2.5))
    full = await refused(stub.Generate(pb.GenerateRequest(prompt="a")))
    assert (full.code(), full.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert dict(full.trailing_metadata())["retry-after"] == "2.500"

    def broken(_request: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(parts.generator, "generate", broken)
    bug = await refused(stub.Generate(pb.GenerateRequest(prompt="a")))
    assert (bug.code(), bug.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    page = parts.metrics.render().decode()
    assert 'tandem_grpc_requests_total{code="NOT_FOUND",method="Generate"} 1.0' in page


async def test_grpc_cancel_and_deadline_close_the_request(stub: InferenceStub, parts: fakes.Servers) -> None:
    parts.say("hello world", hang_after=2)
    call = stub.Generate(pb.GenerateRequest(prompt="a"))
    assert (await call.read()).text
    call.cancel()
    async with asyncio.timeout(WAIT_S):
        await parts.generator.closed.wait()
    parts.generator.closed.clear()
    parts.say("hello world", hang_after=0)
    late = await refused(stub.Generate(pb.GenerateRequest(prompt="a"), timeout=0.3))
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.timeout(WAIT_S):
        await parts.generator.closed.wait()
    assert parts.generator.open_streams == 0
    assert parts.generator.requests[1].deadline_s < 1000.0 + 0.3 + 0.1


async def test_grpc_without_key_is_unauthenticated(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer, RouterConfig(api_keys=(SecretStr("key-a"),)))
    parts.say("hello")
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        stub = InferenceStub(channel)
        for call in (stub.Generate(pb.GenerateRequest(prompt="a")), stub.ListModels(pb.ListModelsRequest())):
            assert (await refused(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer key-a"),)
        assert (await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)).models


async def test_grpc_health_and_reflection(grpc_server: GrpcServer, channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    await grpc_server.set_serving(True)
    assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    (answer,) = [a async for a in call]
    assert SERVICE_NAME in {service.name for service in answer.list_services_response.service}


async def test_grpc_server_on_port_in_use_raises(grpc_server: GrpcServer, parts: fakes.Servers) -> None:
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    with pytest.raises(OSError, match="cannot listen"):
        async with GrpcServer(server, host="127.0.0.1", port=grpc_server.port):
            pass
