"""A call's only message over gRPC: missing, late, malformed, or without a key."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc.aio
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from pydantic import SecretStr

from router.access.access_files import AccessControl
from router.grpc.call_guard import MESSAGE_TIMEOUT_S, StatusInterceptor
from router.grpc.server import GrpcServer
from router.grpc.service import InferenceService
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from tests.support.router.servers import fakes
from tests.support.router.servers.grpc_client import WAIT_S, details_of

KEY = "sk-a-key-of-more-than-sixteen-characters"
METHODS = ("Generate", "Tokenize")


class Calls:
    """A client that sends any bytes, or none."""

    def __init__(self, channel: grpc.aio.Channel, key: str | None) -> None:
        self._channel = channel
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)

    def begin(self, method: str) -> Any:
        call = self._channel.stream_stream(f"/tandem.v1.Inference/{method}")
        return call(metadata=self._metadata, timeout=WAIT_S)

    async def sent(self, method: str, messages: Iterable[bytes]) -> Any:
        call = self.begin(method)
        for message in messages:
            await call.write(message)
        await call.done_writing()
        return call


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return fakes.make_tokenizer()


@pytest.fixture
def message_timeout_s() -> float:
    return MESSAGE_TIMEOUT_S


@pytest.fixture
async def channel(tokenizer: Any, message_timeout_s: float) -> AsyncIterator[grpc.aio.Channel]:
    config = RouterConfig(api_keys=(ApiKey(key=SecretStr(KEY)),))
    parts = fakes.make_servers(tokenizer, config)
    parts.say("hello")
    keys = AccessControl(config).keys
    interceptor = StatusInterceptor(parts.metrics, keys, message_timeout_s=message_timeout_s)
    server = grpc.aio.server(interceptors=(interceptor,))
    service = InferenceService(parts.frontend, parts.generator, keys, parts.metrics)
    add_InferenceServicer_to_server(service, server)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as grpc_server,
        grpc.aio.insecure_channel(f"127.0.0.1:{grpc_server.port}") as channel,
    ):
        yield channel


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """Its code and the reason in its details."""
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(call))
    return caught.value.code(), details_of(caught.value)[1][ErrorInfo].reason


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("messages", [(), (b"\xff" * 50,), (b"\x12\x04\xff\xfe\xfd\xfc",)])
async def test_grpc_malformed_bytes_are_refused_without_stack_trace(
    channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture, method: str, messages: tuple[bytes, ...]
) -> None:
    call = await Calls(channel, KEY).sent(method, messages)
    assert await refusal(call) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("method", METHODS)
async def test_grpc_missing_key_is_refused_before_message(channel: grpc.aio.Channel, method: str) -> None:
    call = Calls(channel, None).begin(method)
    assert await refusal(call) == (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")


@pytest.mark.parametrize("message_timeout_s", [0.05])
async def test_grpc_missing_message_times_out(channel: grpc.aio.Channel) -> None:
    for method in METHODS:
        call = Calls(channel, KEY).begin(method)
        assert await refusal(call) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED")


async def test_grpc_first_message_is_the_request(channel: grpc.aio.Channel) -> None:
    request = pb.TokenizeRequest(text="hello").SerializeToString()
    async with asyncio.timeout(60):
        while (call := await both_sent(channel, [request, b"\xff" * 50])) is None:
            pass
    assert pb.TokenizeResponse.FromString(await anext(aiter(call))).token_ids


async def both_sent(channel: grpc.aio.Channel, messages: list[bytes]) -> Any:
    """None: the call was answered before the second could be written, so gRPC cancels the whole call."""
    try:
        return await Calls(channel, KEY).sent("Tokenize", messages)
    except asyncio.InvalidStateError:
        return None
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.INTERNAL:
            raise
        return None
