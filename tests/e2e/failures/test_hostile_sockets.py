"""Unauthenticated peers at the workers' ports are refused without effect on others."""

import asyncio
import random
import struct
from contextlib import suppress

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from tandem.protocol.session_versions import SPOKEN
from tandem.rpc.cluster_grpc import ClusterAuth
from tandem.v1 import handoff_pb2 as handoff
from tandem.v1 import session_pb2 as session
from tandem.v1.handoff_pb2_grpc import HandoffStub
from tandem.v1.session_pb2_grpc import WorkerStub
from tests.support.running_cluster import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORKERS = ("prefill-0", "decode-0")

PICKLE = b"\x80\x04\x95\n\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x01a\x94K\x01s."
"""What `pickle.dumps({"a": 1})` gives: a peer that unpickles what it reads would notice nothing odd."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster():
    async with running(transfer__transport="tcp") as made:
        yield made


def rubbish():
    """Invalid data: noise, truncated frames, absurd lengths."""
    draw = random.Random(1)
    header = struct.Struct("!4sBB2xQ16sIIIIIIQ")  # of kv_transfer's tcp frames
    return [
        b"",
        b"\0",
        draw.randbytes(64),
        draw.randbytes(1 << 20),
        PICKLE,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + draw.randbytes(4096),
        header.pack(b"TKVT", 1, 1, 0, bytes(16), 0, 0, 0, 0, 0, 0, 0),
        header.pack(b"TKVT", 1, 2, 1, bytes(16), 0, 1, 0, 1, 0, 1, 2**63),
        header.pack(b"TKVT", 1, 2, 1, draw.randbytes(16), *[2**32 - 1] * 6, 2**64 - 1),
        header.pack(b"TKVT", 1, 1, 0, bytes(16), 0, 0, 0, 0, 0, 0, 0)[:20],
        (16).to_bytes(4, "little") + draw.randbytes(16),  # a ticket for a session, but of nobody's
        (16).to_bytes(4, "little") + draw.randbytes(7),
        (2**32 - 1).to_bytes(4, "little") + draw.randbytes(4096),
    ]


def ports(cluster, name):
    """Every TCP port on which a worker listens."""
    connections = psutil.Process(cluster.pid(name)).net_connections("tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def direct_port(cluster, view):
    """The port at which a worker's session goes on, by whom the router is connected to: no longer over gRPC."""
    connections = psutil.Process(cluster.pid("router")).net_connections("tcp")
    reached = {one.raddr.port for one in connections if one.status == psutil.CONN_ESTABLISHED and one.raddr}
    assert int(view.address.rpartition(":")[2]) not in reached
    (port,) = reached & ports(cluster, view.name)
    return port


async def test_sessions_go_on_beside_grpc(cluster):
    assert len({direct_port(cluster, view) for view in cluster.local.workers}) == len(WORKERS)
    assert set((await cluster.figures("tandem_worker_session_direct")).values()) == {1.0}


async def send(port, data, *, is_answered):
    """Send, and keep the connection until the peer closes it or has sent enough.

    `is_answered`: False where nobody accepts, as at a direct port while no router comes.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if not is_answered:
        writer.write(data)
        writer.transport.abort()
        return
    with suppress(OSError):  # it hung up on us
        writer.write(data)
        await writer.drain()
        writer.write_eof()
        await reader.read()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def test_random_bytes_on_worker_ports_are_harmless(cluster, oracle):
    pids = [cluster.pid(name) for name in WORKERS]
    servers = {name: ports(cluster, name) for name in WORKERS}
    assert len(servers["decode-0"]) == 3, "gRPC, sessions after their hello, and the KV port of the tcp transport"
    direct = {direct_port(cluster, view) for view in cluster.local.workers}
    prompt = oracle.story(1, 200)
    expected = oracle.tokens(prompt, 200)
    # Half a frame, then silence: these connections stay open the whole time.
    silent = [await asyncio.open_connection("127.0.0.1", port) for port in servers["decode-0"]]
    for _, writer in silent:
        writer.write(b"TKVT\1")
    before = await cluster.disaggregated()
    streams = [asyncio.ensure_future(cluster.stream(prompt, 200, cache_salt=str(i))) for i in range(3)]
    for data in rubbish():
        everywhere = {port for name in WORKERS for port in servers[name]}
        await asyncio.gather(*(send(port, data, is_answered=port not in direct) for port in everywhere))
    assert [(await stream).token_ids for stream in streams] == [expected] * 3
    assert await cluster.disaggregated() == before + 3
    again = await cluster.tokens(prompt, 200, cache_salt="after")
    assert again == expected
    assert [cluster.pid(name) for name in WORKERS] == pids
    for _, writer in silent:
        writer.close()
    await cluster.until_idle()


@pytest.mark.parametrize("secret", [None, b"the secret of some other cluster"])
async def test_worker_ports_without_cluster_token_are_closed(cluster, secret):
    metadata = ClusterAuth(secret).client_metadata() if secret else ()
    for view in cluster.local.workers:
        async with grpc.aio.insecure_channel(view.address) as channel:
            hello = session.RouterMessage(hello=session.RouterHello(protocol_version=SPOKEN.newest, incarnation=1))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answers(WorkerStub(channel).Session(metadata=metadata), hello)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answers(HandoffStub(channel).Connect(metadata=metadata), handoff.HandoffMessage(incarnation=1))
            assert refused.value.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}


async def answers(call, message):
    """The answers to one message; raises the call's error."""
    with suppress(asyncio.InvalidStateError):  # refused before it was written
        await call.write(message)
    if (answer := await call.read()) is not grpc.aio.EOF:
        return answer
    code = await call.code()
    raise grpc.aio.AioRpcError(code, await call.initial_metadata(), await call.trailing_metadata())


async def test_worker_invalid_orders_are_refused_one_by_one(cluster, oracle):
    """A peer of the cluster that sends invalid messages harms only its own requests."""
    metadata = ClusterAuth(cluster.local.config.secret.get_secret_value().encode()).client_metadata()
    decode = cluster.local.workers[1]
    bad = {
        "token out of range": session.Submit(prompt_token_ids=[5000], hash_root=bytes(32)),
        "no tokens": session.Submit(hash_root=bytes(32)),
        "hash root of one byte": session.Submit(prompt_token_ids=[300], hash_root=b"x"),
        "route to nowhere": session.Submit(
            prompt_token_ids=[300], hash_root=bytes(32), prefill=session.PrefillRoute(transfer_id="t")
        ),
        "too long": session.Submit(prompt_token_ids=[300] * 5000, hash_root=bytes(32)),
    }
    async with grpc.aio.insecure_channel(decode.address) as channel:
        call = WorkerStub(channel).Session(metadata=metadata)
        await call.write(
            session.RouterMessage(hello=session.RouterHello(protocol_version=SPOKEN.newest, incarnation=99))
        )
        assert (await call.read()).HasField("hello")
        for name, submit in bad.items():
            submit.request_id, submit.attempt = name, 1
            await call.write(session.RouterMessage(submit=submit))
        await call.write(session.RouterMessage(cancel=session.Cancel(request_id="nobody", attempt=7)))
        await call.write(session.RouterMessage(reroute=session.Reroute(request_id="nobody", attempt=7)))
        refused = {}
        while len(refused) < len(bad):
            message = await call.read()
            if message.HasField("refused"):
                refused[message.refused.request_id] = message.refused.failure.code
        assert refused.keys() == bad.keys()
        call.cancel()
    prompt = oracle.story(2, 200)
    assert await cluster.tokens(prompt, 24) == oracle.tokens(prompt, 24)
    await cluster.until_idle()


async def test_session_of_other_protocol_version_is_refused(cluster):
    metadata = ClusterAuth(cluster.local.config.secret.get_secret_value().encode()).client_metadata()
    for message in (
        session.RouterMessage(hello=session.RouterHello(protocol_version=99, incarnation=1)),
        session.RouterMessage(cancel=session.Cancel(request_id="x")),
    ):
        async with grpc.aio.insecure_channel(cluster.local.workers[0].address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await answers(WorkerStub(channel).Session(metadata=metadata), message)
            assert refused.value.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}
