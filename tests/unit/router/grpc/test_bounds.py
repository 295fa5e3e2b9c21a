"""The gRPC server beyond its call limit, and without a key: every call gets a status."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.access.api_keys import ApiKeyStore
from router.grpc import server as server_module
from router.grpc.call_guard import StatusInterceptor
from router.grpc.server import SERVICE_NAME, GrpcServer, build_server
from router.grpc.service import InferenceService
from router.metrics.router_metrics import RouterMetrics
from tandem.config.cluster import RouterConfig
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub, add_InferenceServicer_to_server
from tests.support.router.servers import fakes
from tests.unit.router.grpc.test_server import refused
from tests.unit.router.grpc.test_status_details import details_of

WAIT_S = 60.0
BURST = 3000
WITH_KEY = (("authorization", "Bearer key-a"),)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return fakes.make_tokenizer()


@asynccontextmanager
async def opened(server: grpc.aio.Server) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
        asyncio.timeout(WAIT_S),
    ):
        yield channel


async def outcome(call: Any) -> str:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


@pytest.mark.in_turns(always=1)
@pytest.mark.parametrize("most_streams", [BURST // 4, None])
async def test_grpc_burst_on_one_channel_is_answered(
    tokenizer: Any, most_streams: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client queues calls beyond the stream limit, and loses none."""
    if most_streams is not None:
        monkeypatch.setattr(server_module, "_STREAMS", most_streams)
    parts = fakes.make_servers(tokenizer)
    async with opened(build_server(parts.frontend, parts.generator, parts.config, parts.metrics)) as channel:
        stub = InferenceStub(channel)
        calls = [outcome(stub.ListModels(pb.ListModelsRequest())) for _ in range(BURST)]
        assert Counter(await asyncio.gather(*calls)) == {"OK": BURST}


async def test_grpc_calls_beyond_bound_get_retry_after(tokenizer: Any) -> None:
    parts = fakes.make_servers(tokenizer)
    parts.say("hello", hang_after=0)
    keys = ApiKeyStore()
    server = grpc.aio.server(interceptors=(StatusInterceptor(parts.metrics, keys, most_calls=20),))
    add_InferenceServicer_to_server(InferenceService(parts.frontend, parts.generator, keys, parts.metrics), server)
    async with opened(server) as channel:
        stub = InferenceStub(channel)
        hanging = [stub.Generate(pb.GenerateRequest(prompt="a"), timeout=WAIT_S) for _ in range(20)]
        reading = [asyncio.create_task(outcome(anext(aiter(call)))) for call in hanging]
        while parts.generator.open_streams < 20:  # noqa: ASYNC110  # the server's own affair
            await asyncio.sleep(0.01)
        for _ in range(3):
            error = await refused(stub.ListModels(pb.ListModelsRequest()))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert dict(error.trailing_metadata())["retry-after"] == "1.000"
            assert details_of(error)[1][RetryInfo].retry_delay.seconds == 1
        for call in hanging:
            call.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        while parts.generator.open_streams:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await stub.ListModels(pb.ListModelsRequest())).models, "what has ended makes room"


def reflected(channel: grpc.aio.Channel, metadata: Any) -> Any:
    requests = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests, metadata=metadata)


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)])
async def test_grpc_reflection_without_key_is_refused(tokenizer: Any, metadata: Any) -> None:
    parts = fakes.make_servers(tokenizer, RouterConfig(api_keys=("key-a",)))
    async with opened(build_server(parts.frontend, parts.generator, parts.config, parts.metrics)) as channel:
        assert (await refused(reflected(channel, metadata))).code() is grpc.StatusCode.UNAUTHENTICATED
        (answer,) = [one async for one in reflected(channel, WITH_KEY)]
        assert SERVICE_NAME in {service.name for service in answer.list_services_response.service}
        for name in (f"/{SERVICE_NAME}/Secret", "/a.Secret/Method", "/grpc.health.v1.Health/Secret", "/grpc.health.v1"):
            for begin in (channel.unary_unary, channel.unary_stream):
                call = begin(name)(b"", metadata=metadata)
                assert (await refused(call)).code() is grpc.StatusCode.UNAUTHENTICATED, name
            known = channel.unary_unary(name)(b"", metadata=WITH_KEY)
            assert (await refused(known)).code() is grpc.StatusCode.UNIMPLEMENTED, name
        request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        assert (await health_pb2_grpc.HealthStub(channel).Check(request)).status, "orchestrators have no keys"
    assert "Secret" not in counted(parts.metrics)


async def test_grpc_reflection_without_configured_keys_is_open(tokenizer: Any) -> None:
    parts = fakes.make_servers(tokenizer)
    async with opened(build_server(parts.frontend, parts.generator, parts.config, parts.metrics)) as channel:
        assert [one async for one in reflected(channel, ())]
        unknown = channel.unary_unary(f"/{SERVICE_NAME}/Secret")(b"")
        assert (await refused(unknown)).code() is grpc.StatusCode.UNIMPLEMENTED


def counted(metrics: RouterMetrics) -> str:
    page = metrics.render().decode()
    assert 'tandem_grpc_requests_total{code="UNAUTHENTICATED",method="unknown"}' in page
    assert 'tandem_grpc_requests_total{code="UNAUTHENTICATED",method="ServerReflectionInfo"}' in page
    return page
