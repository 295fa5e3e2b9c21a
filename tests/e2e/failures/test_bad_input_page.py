"""All of docs/operate/bad_inputs.md sent to the servers, without effect on sixteen running streams."""

import asyncio
import json
from contextlib import suppress
from urllib.parse import urlsplit

import grpc.aio
import httpx
import orjson
import pytest
import pytest_asyncio

from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.e2e.bad_requests import BAD, GOOD, PLAIN
from tests.support.running_cluster import WAIT_S, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUM_STREAMS, NUM_TOKENS = 16, 32
MAX_BODY = 4 << 20


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers):
    async with running(command=fork_servers.command, router__max_body_bytes=MAX_BODY) as made:
        yield made


@pytest.fixture(scope="module")
def expected(oracle):
    """Prompts and their undisturbed answers."""
    prompts = [oracle.story(7000 + index, 40) for index in range(NUM_STREAMS)]
    return list(zip(prompts, oracle.batch(prompts, NUM_TOKENS), strict=True))


async def run_beside_streams(cluster, oracle, expected, mischief):
    """Run it while sixteen streams repeat; every answer must be the undisturbed one."""
    task = asyncio.ensure_future(mischief)
    try:
        while True:
            answers = await asyncio.gather(*(cluster.stream(prompt, NUM_TOKENS) for prompt, _ in expected))
            assert [one.token_ids for one in answers] == [ids for _, ids in expected]
            assert [one.text for one in answers] == [oracle.decode(ids) for _, ids in expected]
            if task.done():
                break
        await task
    finally:
        task.cancel()
    await cluster.until_idle()


async def test_http_bad_requests_are_refused(cluster, oracle, expected):
    async def send_all():
        wrong = {}
        for name, (path, content, headers, statuses) in BAD.items():
            data = content if isinstance(content, bytes) else json.dumps(content)
            async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
                try:
                    answer = await http.post(path, content=data, headers=headers)
                except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                    # A head beyond all bounds: its connection is closed, the answer may not be read.
                    if "1 MiB" not in name:
                        wrong[name] = "closed"
                    continue
            if answer.status_code not in statuses:
                wrong[name] = (answer.status_code, answer.text[:200])
            elif answer.status_code >= 400 and answer.headers.get("content-type") == "application/json":
                assert answer.json()["error"]["message"], name
        assert not wrong

    await run_beside_streams(cluster, oracle, expected, send_all())


async def test_http_endless_body_is_cut_off(cluster, oracle, expected):
    async def endless():
        while True:
            yield b" " * 65536

    async def send():
        for _ in range(3):
            async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
                with suppress(httpx.ReadError, httpx.WriteError):
                    assert (await http.post(PLAIN, content=endless())).status_code == 413

    await run_beside_streams(cluster, oracle, expected, send())


def address(cluster):
    url = urlsplit(cluster.local.http_url)
    return url.hostname, url.port


async def exchange(cluster, data, *, reads=True):
    """Send over a new connection; returns the answer."""
    reader, writer = await asyncio.open_connection(*address(cluster))
    received = b""
    with suppress(OSError):
        writer.write(data)
        await writer.drain()
        if reads:
            received = await reader.read()
    writer.close()
    return received


async def test_http_request_id_cannot_inject_headers(cluster):
    for forged in (b"a\r\nX-Forged: 1", b"a\nX-Forged: 1", b"a\rX-Forged: 1", b"a\r\n\r\nHTTP/1.1 200 OK"):
        response = await exchange(
            cluster,
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: " + forged + b"\r\n\r\n",
        )
        head = response.partition(b"\r\n\r\n")[0].lower()
        assert b"x-forged" not in head
        assert head.count(b"http/1.1 ") <= 1 or b"400" in response


async def test_http_client_leaving_at_any_byte_leaves_nothing(cluster, oracle, expected):
    content = orjson.dumps(GOOD | {"stream": True})
    head = f"POST {PLAIN} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    data = head.encode() + content

    async def leave():
        for size in range(len(data) + 1):
            await exchange(cluster, data[:size], reads=False)

    await run_beside_streams(cluster, oracle, expected, leave())


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return refused.value.code()


async def test_grpc_bad_calls_are_refused(cluster, oracle, expected):
    options = (("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 64 << 20))
    good = pb.GenerateRequest(prompt="x", sampling=common.SamplingParams(max_tokens=4))

    async def send():
        async with grpc.aio.insecure_channel(cluster.local.grpc_address, options) as channel:
            stub = InferenceStub(channel)
            big = pb.GenerateRequest(prompt="a" * (MAX_BODY + 1))
            assert await code_of(stub.Generate(big)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await code_of(stub.Generate(pb.GenerateRequest())) is grpc.StatusCode.INVALID_ARGUMENT
            huge = [(f"x-{index}", "a" * 8000) for index in range(16)]
            assert await code_of(stub.Generate(good, metadata=huge)) in {
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.INTERNAL,
            }
            assert await code_of(stub.Generate(good, timeout=0)) is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "".join([one.text async for one in stub.Generate(good)])

    await run_beside_streams(cluster, oracle, expected, send())


async def test_grpc_reset_calls_leave_nothing(cluster, oracle, expected):
    """Reset during each step on a worker: a reservation, a hand-off, a first token."""
    prompt = pb.TokenIds(ids=oracle.story(8000, 200))

    async def reset():
        async with grpc.aio.insecure_channel(cluster.local.grpc_address) as channel:
            stub = InferenceStub(channel)
            for index in range(24):
                ask = pb.GenerateRequest(prompt_token_ids=prompt, cache_salt=f"{index}")
                ask.sampling.max_tokens = 100
                call = stub.Generate(ask)
                if index % 4:
                    await call.wait_for_connection()
                if index % 8 == 7:
                    await call.read()
                call.cancel()

    await run_beside_streams(cluster, oracle, expected, reset())
