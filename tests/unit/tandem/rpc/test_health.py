"""A worker's health over a real gRPC server, queried as the kubelet does: without credentials."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.rpc.cluster_grpc import ClusterAuth, ClusterChannels, listen, make_server
from tandem.rpc.health import health_handler
from tandem.v1 import session_pb2 as pb
from tandem.v1.session_pb2_grpc import WorkerStub

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_health_needs_no_token_and_sessions_do() -> None:
    takes_work = True
    server = make_server(ClusterAuth(b"s" * 32))
    server.add_generic_rpc_handlers((health_handler(lambda: takes_work),))
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with ClusterChannels(None).open(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for service in ("", "anything", "x" * 100_000):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == _SERVING
            takes_work = False
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == _NOT_SERVING
            watched = stub.Watch(health_pb2.HealthCheckRequest())
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await watched.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            session = WorkerStub(channel).Session()
            await session.write(pb.RouterMessage())
            with pytest.raises(grpc.aio.AioRpcError) as kept_out:
                await session.read()
            assert kept_out.value.code() is grpc.StatusCode.UNAUTHENTICATED
    finally:
        await server.stop(None)


async def test_cluster_port_closes_connections_beyond_its_bound() -> None:
    server = make_server(ClusterAuth(b"s" * 32), max_connections=4)
    server.add_generic_rpc_handlers((health_handler(lambda: True),))
    port = listen(server, "127.0.0.1", 0)
    await server.start()
    try:
        async with asyncio.timeout(20.0):
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            ends = {asyncio.create_task(_read_all(reader)) for reader, _ in silent}
            done, open_ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert (len(done), len(open_)) == (1, 4)
            async with ClusterChannels(None).open(f"127.0.0.1:{port}") as channel:
                check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                await asyncio.sleep(0.1)
                assert not check.done(), "there is no room"
                for _, writer in silent:
                    writer.close()
                assert (await check).status == _SERVING
            await asyncio.gather(*ends)
    finally:
        await server.stop(None)


async def _read_all(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        await reader.read()
