"""A router's drain: both servers refuse new requests while accepted ones end, within one bound."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import httpx
import pytest

from router.dispatch.admission_queue import AdmissionQueue
from router.grpc.server import GrpcServer, build_server
from router.http.app import create_app
from router.http.server.http_server import HttpServer
from router.process import drain as router_drain
from router.process.drain import PortTakeover, drain
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.fake_worker import FakeWorker, Submission, hold
from tests.support.router.admission_queues import gated
from tests.support.router.cluster import Cluster
from tests.support.router.servers import fakes

BODY = {"prompt": "a", "max_tokens": 4}
_JSON = json.dumps(BODY).encode()
REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
REQUEST += b"Content-Length: %d\r\n\r\n%b" % (len(_JSON), _JSON)
WAIT_S = 20.0


@dataclass
class _Router:
    """Both servers over a real dispatcher."""

    core: Cluster
    queue: AdmissionQueue
    http: HttpServer
    rpc: GrpcServer
    client: httpx.AsyncClient
    stub: InferenceStub

    async def ask(self) -> httpx.Response:
        return await self.client.post(f"http://127.0.0.1:{self.http.port}/v1/completions", json=BODY)

    async def drain(self, drain_s: float, *, leaves_to: PortTakeover = PortTakeover.NOBODY) -> None:
        await drain(self.queue, self.http, self.rpc, drain_s=drain_s, leaves_to=leaves_to)


@asynccontextmanager
async def _router(worker: FakeWorker) -> AsyncIterator[_Router]:
    parts = fakes.make_servers(fakes.make_tokenizer())
    # Deadlines are on dispatch's clock.
    parts.frontend.clock = asyncio.get_running_loop().time
    async with gated(worker, running=100) as (queue, core):
        app = create_app(parts.frontend, queue, parts.ready, parts.config, parts.metrics)
        server = build_server(parts.frontend, queue, parts.config, parts.metrics)
        async with (
            HttpServer(app, host="127.0.0.1", port=0, grace_s=60.0) as http,
            GrpcServer(server, host="127.0.0.1", port=0, grace_s=60.0) as rpc,
            httpx.AsyncClient(trust_env=False, timeout=60.0) as client,
            grpc.aio.insecure_channel(f"127.0.0.1:{rpc.port}") as channel,
        ):
            yield _Router(core, queue, http, rpc, client, InferenceStub(channel))


async def test_drain_refuses_new_and_finishes_running_requests() -> None:
    worker = FakeWorker("d0", script=hold)
    async with _router(worker) as router:
        call = router.stub.Generate(pb.GenerateRequest(prompt="a"))
        reading = asyncio.create_task(call.read())
        running = await worker.submissions.get()
        draining = asyncio.create_task(router.drain(60.0))
        await asyncio.sleep(0)
        refused = await router.ask()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.stub.Generate(pb.GenerateRequest(prompt="a")).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert not draining.done()
        running.give_all()
        assert (await reading).token_ids
        while await call.read() is not grpc.aio.EOF:
            pass
        await draining
        with pytest.raises(httpx.ConnectError):
            await router.ask()


async def test_drain_both_servers_share_one_bound() -> None:
    worker = FakeWorker("d0", script=hold)
    async with _router(worker) as router:
        reading = asyncio.create_task(router.stub.Generate(pb.GenerateRequest(prompt="a")).read())
        response = asyncio.create_task(router.ask())
        for _ in range(2):
            await worker.submissions.get()
        # Either server alone would wait for a minute.
        await router.drain(0.1)
        with pytest.raises(grpc.aio.AioRpcError):
            await reading
        # Nothing of it has been sent, so it can be asked elsewhere.
        refused = await response
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "unavailable"


async def test_drain_with_siblings_leaves_new_connections_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open connections are still served, used or not."""
    monkeypatch.setattr(router_drain, "_HAND_OVER_S", 60.0)
    worker = FakeWorker("d0")
    async with _router(worker) as router:
        assert (await router.ask()).status_code == 200
        worker.script = hold
        call = router.stub.Generate(pb.GenerateRequest(prompt="a"))
        reading = asyncio.create_task(call.read())
        for _ in range(2):
            running = await worker.submissions.get()
        worker.script = _answer
        silent = await asyncio.open_connection("127.0.0.1", router.http.port)
        draining = asyncio.create_task(router.drain(60.0, leaves_to=PortTakeover.OTHERS))
        await _until_refused(router.http.port)
        await _until_refused(router.rpc.port)
        assert b"connection: close\r\n" in await _answered(*silent)
        kept = await router.ask()
        assert (kept.status_code, kept.headers["connection"]) == (200, "close")
        with pytest.raises(httpx.ConnectError):
            await router.ask()
        assert not draining.done()
        running.give_all()
        assert (await reading).token_ids
        await draining


async def _answer(submission: Submission) -> None:
    submission.give_all()


async def test_drain_serves_queued_connections() -> None:
    worker = FakeWorker("d0")
    async with _router(worker) as router:
        unseen = [socket.create_connection(("127.0.0.1", router.http.port)) for _ in range(20)]
        # The event loop has not run since, and does not before the queue is emptied.
        await router.http.hand_over(idle_s=60.0, most_s=0.0)
        await _until_refused(router.http.port)
        for connection in unseen:
            connection.setblocking(False)
            assert b"connection: close\r\n" in await _answered(*await asyncio.open_connection(sock=connection))


async def _answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """All bytes that the server sends until it closes."""
    writer.write(REQUEST)
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    return answer


async def _until_refused(port: int) -> None:
    """Wait until no process listens there."""
    async with asyncio.timeout(WAIT_S):
        while await _is_open(port):
            pass


async def _is_open(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    except ConnectionResetError:
        # Its handshake fell between the last look into the queue and the close: see router.http.server.shared_port.
        return True
    writer.close()
    return True
