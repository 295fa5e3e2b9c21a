"""gRPC clients that do not read, over real sockets: ended by the same bounds as for HTTP."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from router.grpc.server import GrpcServer, build_server
from router.types.requests import Generator
from tandem.config.cluster import RouterConfig
from tandem.config.servers import ConnectionsConfig
from tandem.v1 import common_pb2
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.fake_worker import FakeWorker, Submission
from tests.support.router.cluster import cluster
from tests.support.router.servers import fakes

WAIT_S = 30.0
# A client's core reads so far ahead by itself.
_NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


@asynccontextmanager
async def grpc_server(
    parts: fakes.Servers, generator: Generator, *, write_timeout_s: float = WAIT_S
) -> AsyncIterator[InferenceStub]:
    server = build_server(parts.frontend, generator, parts.config, parts.metrics, write_timeout_s=write_timeout_s)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as rpc,
        grpc.aio.insecure_channel(f"127.0.0.1:{rpc.port}", options=_NARROW) as channel,
        asyncio.timeout(WAIT_S),
    ):
        yield InferenceStub(channel)


async def _rest(call: grpc.aio.UnaryStreamCall) -> grpc.aio.AioRpcError:
    """How a call ends for a client that starts to read late."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    pytest.fail("the call went well")


async def test_grpc_client_not_reading_is_disconnected() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    parts.say("hello world " * 20_000, per_delta=64)
    async with grpc_server(parts, parts.generator, write_timeout_s=0.05) as stub:
        call = stub.Generate(pb.GenerateRequest(prompt="a", n=4))
        await parts.generator.closed.wait()
        assert parts.generator.open_streams == 0
        error = await _rest(call)
        assert error.code() is grpc.StatusCode.CANCELLED
        assert "did not read" in error.details()


async def test_grpc_client_leaving_unread_answer_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "router.grpc.call_guard")
    parts = fakes.make_servers(fakes.make_tokenizer())
    parts.say("hello world " * 20_000, per_delta=64)
    async with grpc_server(parts, parts.generator, write_timeout_s=0.05) as stub:
        call = stub.Generate(pb.GenerateRequest(prompt="a", n=4))
        await parts.generator.closed.wait()
        call.cancel()
        while not caplog.records:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert {(record.levelname, record.name) for record in caplog.records} == {("DEBUG", "router.grpc.call_guard")}


async def test_grpc_deadline_ends_unread_request() -> None:
    """Clients that do not read hold both slots; at the deadline a third gets one."""
    parts = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(request_timeout_s=1.0))
    parts.frontend.clock = asyncio.get_running_loop().time

    async def flood(submission: Submission) -> None:
        for start in range(0, 4000, 8):
            submission.give([5] * 8, first_index=start)

    worker = FakeWorker("d0", script=flood)
    async with cluster(worker) as core, grpc_server(parts, core.dispatcher) as stub:
        sampling = common_pb2.SamplingParams(max_tokens=450, ignore_eos=True)
        calls = [stub.Generate(pb.GenerateRequest(prompt="a", n=8, sampling=sampling)) for _ in range(2)]
        submissions = [await worker.submissions.get() for _ in range(16)]
        for submission in submissions:
            await submission.cancelled.wait()
        core.assert_idle()
        for call in calls:
            assert (await _rest(call)).code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_grpc_slow_client_gets_whole_answer() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    ids = parts.say("hello world " * 500)
    async with grpc_server(parts, parts.generator) as stub:
        got: list[int] = []
        call = stub.Generate(pb.GenerateRequest(prompt="a"))
        while (answer := await call.read()) is not grpc.aio.EOF:
            got += answer.token_ids
            await asyncio.sleep(0)
        assert got == ids


async def test_grpc_connections_are_bounded_and_silent_ones_closed() -> None:
    config = RouterConfig(connections=ConnectionsConfig(head_timeout_s=0.5))
    parts = fakes.make_servers(fakes.make_tokenizer(), config)
    parts.say("hello")
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics, max_connections=4)
    async with GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as rpc, asyncio.timeout(WAIT_S):
        silent = [await asyncio.open_connection("127.0.0.1", rpc.port) for _ in range(12)]
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{rpc.port}") as channel:
                # A channel connects again and again until there is room.
                call = InferenceStub(channel).Generate(pb.GenerateRequest(prompt="a"), wait_for_ready=True)
                assert "".join([answer.text async for answer in call]) == "hello"
            for reader, _ in silent:
                await _closed(reader)
        finally:
            for _, writer in silent:
                writer.close()


async def _closed(reader: asyncio.StreamReader) -> None:
    """Return when the server has closed it, whatever it sends before."""
    with contextlib.suppress(ConnectionError):
        await reader.read()
