"""tandem.client against a real gRPC server: answers whole and streamed, typed errors, keys, certificates, breaks."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc.aio
import pytest
import trustme

from router.grpc.server import GrpcServer, build_server
from tandem.client import base
from tandem.client.aio import AsyncClient
from tandem.client.options import Options, Structure, Tls, Turn
from tandem.client.progress import StreamProgress
from tandem.client.requests import generate_request
from tandem.client.sync import Client
from tandem.config.cluster import RouterConfig
from tandem.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server
from tests.support.router.servers import fakes

HELLO = [Turn(role="user", content="hello")]
TEXT = "hello wörld 😀"


@pytest.fixture
def parts() -> fakes.Servers:
    return fakes.make_servers(fakes.make_tokenizer())


@asynccontextmanager
async def server_of(parts: fakes.Servers) -> AsyncIterator[str]:
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    async with GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as running:
        yield f"127.0.0.1:{running.port}"


async def test_client_chat_generate_tokenize_and_models(parts: fakes.Servers) -> None:
    ids = parts.say(TEXT, logprobs=True)
    async with server_of(parts) as address, AsyncClient(address) as client:
        options = Options(
            max_tokens=40, n=2, num_logprobs=1, seed=4, logit_bias={5: 1.5}, stop=["nothing"], priority=-1
        )
        answer = await client.chat(HELLO, options)
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        assert [choice.token_ids for choice in answer.choices] == [ids, ids]
        assert (answer.choices[0].finish_reason, answer.usage.cached_tokens) == ("stop", 7)
        assert answer.usage.completion_tokens == 2 * len(ids)
        assert answer.choices[1].logprobs[0].top[ids[0]] == -0.5
        assert answer.timing["prefill_s"] == 0.5
        (routed,) = parts.generator.requests
        assert (routed.num_choices, routed.sampling.seed, routed.priority) == (2, 4, -1)
        assert dict(routed.sampling.logit_bias) == {5: 1.5}
        assert (await client.generate([10, 11])).text == TEXT
        assert parts.generator.requests[-1].prompt_token_ids == (10, 11)
        tokens = await client.tokenize(TEXT, add_special_tokens=False)
        assert await client.detokenize(tokens) == TEXT
        assert (await client.tokenize(HELLO))[-1] == fakes.ASSISTANT
        assert [model.id for model in await client.models()] == [fakes.MODEL]


@pytest.fixture
def server_in_thread(parts: fakes.Servers) -> Iterator[str]:
    """Run the server on a loop of its own: a synchronous client would block this one."""
    loop, started, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    addresses: list[str] = []

    async def serve() -> None:
        async with server_of(parts) as address:
            addresses.append(address)
            started.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(20.0)
    yield addresses[0]
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def test_sync_client_streams_generates_and_chats(parts: fakes.Servers, server_in_thread: str) -> None:
    ids = parts.say(TEXT)
    with Client(server_in_thread) as client:
        pieces = list(client.stream("a"))
        assert "".join(piece.text for piece in pieces) == TEXT
        assert pieces[-1].usage is not None
        assert client.generate("a").choices[0].token_ids == ids
        assert client.chat(HELLO).timing["decode_s"] == 1.0
        assert client.detokenize(client.tokenize("hello")) == "hello"
        assert client.models()[0].max_model_len == fakes.CONTEXT
        with pytest.raises(InvalidRequest) as wrong:
            client.generate("a", Options(temperature=3.0))
        assert wrong.value.param == "temperature"
    with pytest.raises(RuntimeError, match="not open"):
        client.models()


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        (Options(n=0), InvalidRequest, "n"),
        (Options(max_tokens=-1), InvalidRequest, "max_tokens"),
        (Options(stop=[3]), InvalidRequest, "stop"),  # type: ignore[list-item]
        (Options(model="other"), ModelNotFound, "model"),
        (Options(cache_salt=""), InvalidRequest, "cache_salt"),
        (Options(structure=Structure(json_schema="{")), InvalidRequest, "structured_output"),
        (Options(max_tokens=10, min_tokens=511, truncate_prompt_tokens=5000), InvalidRequest, "truncate_prompt_tokens"),
    ],
)
async def test_client_errors_have_type_and_field(
    parts: fakes.Servers, options: Options, kind: type[Exception], param: str
) -> None:
    async with server_of(parts) as address, AsyncClient(address) as client:
        with pytest.raises(kind) as caught:
            await client.generate("a", options)
        assert caught.value.param == param  # type: ignore[attr-defined]


async def test_client_server_refusals_are_not_retried(parts: fakes.Servers) -> None:
    async with server_of(parts) as address, AsyncClient(address) as client:
        for error in (Overloaded("full", retry_after_s=2.25), Unavailable("nobody is here", retry_after_s=0.5)):
            parts.generator.requests.clear()
            parts.generator.script = fakes.Script(error=error)
            with pytest.raises(type(error)) as caught:
                await client.generate("a")
            assert (caught.value.retry_after_s, caught.value.message) == (error.retry_after_s, error.message)
            assert len(parts.generator.requests) == 1
        with pytest.raises(ContextLengthExceeded):
            await client.generate([5] * fakes.CONTEXT)


async def test_client_api_key_is_sent_and_wrong_one_refused(parts: fakes.Servers) -> None:
    guarded = fakes.make_servers(fakes.make_tokenizer(), RouterConfig(api_keys=["key-a"]))
    guarded.say(TEXT)
    async with server_of(guarded) as address:
        async with AsyncClient(address, api_key="key-a") as client:
            assert (await client.generate("a")).text == TEXT
        async with AsyncClient(address, api_key="key-b") as client:
            with pytest.raises(Unauthenticated):
                await client.models()


async def test_client_mutual_tls_is_used(parts: fakes.Servers) -> None:
    parts.say(TEXT)
    authority = trustme.CA()
    ours, theirs = authority.issue_cert("router.example"), authority.issue_cert("client.example")
    credentials = grpc.ssl_server_credentials(
        [(ours.private_key_pem.bytes(), ours.cert_chain_pems[0].bytes())],
        root_certificates=authority.cert_pem.bytes(),
        require_client_auth=True,
    )
    server = build_server(parts.frontend, parts.generator, parts.config, parts.metrics)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    tls = Tls(
        ca=authority.cert_pem.bytes(),
        cert=theirs.cert_chain_pems[0].bytes(),
        key=theirs.private_key_pem.bytes(),
        server_name="router.example",
    )
    try:
        async with AsyncClient(f"127.0.0.1:{port}", tls=tls) as client:
            assert (await client.generate("a")).text == TEXT
    finally:
        await server.stop(0.0)


async def test_client_broken_stream_resumes_at_next_router(parts: fakes.Servers) -> None:
    """The first router dies after three tokens."""
    first, other = parts, fakes.make_servers(fakes.make_tokenizer(), mint_seed=lambda: 1)
    ids = first.say(TEXT, hang_after=3)
    other.say(TEXT)
    server = build_server(first.frontend, first.generator, first.config, first.metrics)
    dying, pieces = GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0), []
    async with dying, server_of(other) as address, AsyncClient([f"127.0.0.1:{dying.port}", address]) as client:
        async for piece in client.stream("a", Options(temperature=1.0)):
            pieces.append(piece)
            if len(pieces) == 3:
                await server.stop(0.0)
    assert [token for piece in pieces for token in piece.token_ids] == ids
    assert "".join(piece.text for piece in pieces) == TEXT
    assert len({piece.id for piece in pieces}) == 1
    assert other.generator.requests[0].sampling.seed == first.generator.requests[0].sampling.seed


@asynccontextmanager
async def relay_to(address: str, is_cut: asyncio.Event) -> AsyncIterator[str]:
    """A relay to a router; once cut, it drops everything without closing a connection."""
    host, _, port = address.rpartition(":")
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not is_cut.is_set():
                writer.write(data)

    async def on_client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        both = [asyncio.create_task(pump(reader, far_writer)), asyncio.create_task(pump(far_reader, writer))]
        pumps.update(both)
        await asyncio.wait(both)
        for one in (writer, far_writer):
            one.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in pumps:
            task.cancel()


async def test_client_vanished_router_is_abandoned_and_stream_resumes(
    parts: fakes.Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a power loss: no connection ends. Streams quiet for long are included."""
    options = dict(base._CHANNEL_OPTIONS)
    patience_ms = options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"]  # type: ignore[operator]
    for limit_ms in (patience_ms, options["grpc.http2.ping_timeout_ms"]):
        assert limit_ms < 1e3 * RouterConfig().takeover_s  # type: ignore[operator]
    quick = options | {
        "grpc.keepalive_time_ms": 100,
        "grpc.keepalive_timeout_ms": 1_000,
        "grpc.http2.ping_timeout_ms": 1_000,
    }
    monkeypatch.setattr(base, "_CHANNEL_OPTIONS", tuple(quick.items()))
    first, other = parts, fakes.make_servers(fakes.make_tokenizer(), mint_seed=lambda: 1)
    ids, is_cut = first.say(TEXT, hang_after=3), asyncio.Event()
    other.say(TEXT)
    got: list[int] = []
    async with (
        asyncio.timeout(45.0),  # a ping of gRPC's own that is not answered would take a minute
        server_of(first) as vanishing,
        relay_to(vanishing, is_cut) as way,
        server_of(other) as address,
        AsyncClient([way, address]) as client,
    ):
        async for piece in client.stream("a", Options(temperature=1.0)):
            got += piece.token_ids
            if len(got) == 3:
                await asyncio.sleep(0.8)  # more pings than gRPC sends by itself to somebody who sends nothing
                is_cut.set()
    assert got == ids


async def test_client_idempotent_call_is_retried_at_next_router(parts: fakes.Servers, server_in_thread: str) -> None:
    async with server_of(parts) as gone:
        pass
    addresses = [gone, server_in_thread]
    async with AsyncClient(addresses) as client:
        assert [model.id for model in await client.models()] == [fakes.MODEL]
    async with AsyncClient([gone, gone]) as client:
        with pytest.raises(Unavailable):
            await client.models()
    async with AsyncClient(addresses) as client:
        with pytest.raises(Unavailable):
            await client.delete_cached("cachedContents/0")
        assert [model.id for model in await client.models()] == [fakes.MODEL]
    with Client(addresses) as threads:
        assert (await asyncio.to_thread(threads.tokenize, HELLO))[-1] == fakes.ASSISTANT


async def test_client_call_that_a_leaving_router_cancels_is_repeated_unless_it_changes_something() -> None:
    """gRPC ends calls that a server has not passed on when it shuts down with CANCELLED, without a status of ours."""

    class Leaving(InferenceServicer):
        num_asked = 0

        async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
            return await self._answer(pb.ListModelsResponse(models=[pb.Model(id="m")]), context)

        async def DeleteCachedContent(self, request: pb.DeleteCachedContentRequest, context: Any) -> Any:
            return await self._answer(pb.DeleteCachedContentResponse(), context)

        async def _answer(self, answer: Any, context: Any) -> Any:
            self.num_asked += 1
            if self.num_asked % 2:
                await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
            return answer

    server, leaving = grpc.aio.server(), Leaving()
    add_InferenceServicer_to_server(leaving, server)  # type: ignore[no-untyped-call]  # generated
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with AsyncClient(address) as client:
            assert [model.id for model in await client.models()] == ["m"]
            assert leaving.num_asked == 2
            with pytest.raises(Cancelled):
                await client.delete_cached("cachedContents/0")
            assert leaving.num_asked == 3
    finally:
        await server.stop(0.0)


@pytest.mark.slow
async def test_client_silent_router_is_abandoned(parts: fakes.Servers) -> None:
    """Within the answer's own timeout."""
    parts.say(TEXT)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with server_of(parts) as address, AsyncClient([silent_address, address]) as client:
            assert (await client.chat(HELLO, Options(timeout_s=15.0))).text == TEXT


async def test_client_timeout_or_reconnect_limit_raises(parts: fakes.Servers) -> None:
    parts.say(TEXT, hang_after=1)
    async with server_of(parts) as address, AsyncClient(address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("a", Options(timeout_s=0.5))
    async with AsyncClient("127.0.0.1:1", max_reconnects=2) as client:
        with pytest.raises(Unavailable):
            await client.generate("a")


def progress_of(most: int = 2) -> StreamProgress:
    return StreamProgress(generate_request("a", Options()), max_reconnects=most, rng=Random(1))


def test_client_progress_after_break() -> None:
    broken = Unavailable("Socket closed")
    progress = progress_of()
    waits = [progress.after(broken, from_server=False) for _ in range(3)]
    assert [wait is not None for wait in waits] == [True, True, False]
    assert waits[0] is not None
    assert 0.05 <= waits[0].wait_s <= 0.1

    progress = progress_of()
    assert progress.after(Unavailable("drains", retry_after_s=3.0), from_server=True) is None
    progress.on_message(pb.GenerateResponse(text="a", stream_id="there"))
    assert progress.request().last_stream_id == "there"
    again = progress.after(Unavailable("no worker yet", retry_after_s=3.0), from_server=True)
    assert again is not None
    assert again.wait_s == 3.0
    assert progress.after(InvalidRequest("wrong"), from_server=True) is None
    assert not progress.is_over
    progress.on_message(pb.GenerateResponse(usage=pb.Usage(prompt_tokens=1)))
    assert progress.is_over


def test_client_imports_no_heavy_module() -> None:
    heavy = "torch numpy pydantic starlette uvicorn transformers tokenizers redis"
    code = (
        "import sys, tandem.client.aio, tandem.client.sync; "
        f"found = [name for name in '{heavy}'.split() if name in sys.modules]; assert not found, found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
