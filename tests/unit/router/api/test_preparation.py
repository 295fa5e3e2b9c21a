"""Requests that wait for the tokenizer or for a grammar: no tenant's keep another's from being prepared."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import pytest
from pydantic import SecretStr

from router.api.cache_breakpoints import CacheBreakpoint, prepare_with_breakpoints
from router.api.prompts import TokenizerThreads
from router.api.request.client_request import ClientRequest
from router.grpc.server import GrpcServer, build_server
from router.text.chat_template import Message
from router.text.grammars.structured_output import Shape, StructuredOutput
from router.text.tokenizer import Tokenizer
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tandem.errors import Overloaded
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.support.router.servers import fakes
from tests.support.router.servers.grpc_client import HELLO as GRPC_HELLO
from tests.support.router.servers.http_client import client_of

PLACES = 8
HELLO = [Message(role="user", content="hello")]
ENDLESS = StructuredOutput(shape=Shape.REGEX, value="endless", param="field")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


class StuckGrammars:
    """A checker that never ends."""

    async def checked(self, grammar: str, param: str, tenant: str = "") -> str:
        await asyncio.Event().wait()
        return grammar


@asynccontextmanager
async def at_once(calls: Sequence[Coroutine[Any, Any, Any]]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run calls as far as they get, until the end of the block."""
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0.05)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_tenant_with_stuck_grammars_leaves_places_for_another(tokenizer: Tokenizer) -> None:
    config = RouterConfig(max_inflight_requests=PLACES)
    frontend = fakes.make_servers(tokenizer, config, grammars=StuckGrammars()).frontend
    stuck = ClientRequest(tenant="a", structure=ENDLESS)
    async with at_once([frontend.prepare_chat(HELLO, stuck) for _ in range(PLACES)]) as calls:
        refused = [call for call in calls if call.done()]
        assert len(refused) == PLACES // 2
        for call in refused:
            with pytest.raises(Overloaded, match="requests of this API key"):
                await call
        await frontend.prepare_chat(HELLO, ClientRequest(tenant="b"))
        await frontend.prepare_prompts(["hello"], ClientRequest(tenant="b"))


LONG = "x" * 5000  # tokenized in a thread
BLOCKED = "blocked " * 600
KEYS = tuple(ApiKey(key=SecretStr(f"key-{tenant}"), tenant=tenant) for tenant in "ab")
A, B = ({"authorization": f"Bearer key-{tenant}"} for tenant in "ab")


@dataclass
class Stuck:
    """A frontend whose tokenizer keeps every text that begins with `BLOCKED`, and how to let it go on."""

    parts: fakes.Servers
    release: threading.Event
    num_inside: int = 0


@pytest.fixture
async def stuck(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stuck]:
    """Nothing of it depends on how many processors the machine has."""
    config = RouterConfig(max_inflight_requests=PLACES, max_body_bytes=1 << 20, api_keys=KEYS)
    parts = fakes.make_servers(tokenizer, config, context=1 << 14)
    parts.frontend.prompts._threads = TokenizerThreads(most_of_tenant=2)
    found = Stuck(parts, threading.Event())
    encode, encode_chat = tokenizer.encode, tokenizer.encode_chat

    def wait(text: str) -> None:
        if text.startswith(BLOCKED):
            found.num_inside += 1
            assert found.release.wait(20.0)

    def encode_stuck(text: str, **options: Any) -> list[int]:
        wait(text)
        return encode(text, **options)

    def encode_chat_stuck(messages: Sequence[Message], **options: Any) -> list[int]:
        wait(messages[0].content)
        return encode_chat(messages, **options)

    monkeypatch.setattr(tokenizer, "encode", encode_stuck)
    monkeypatch.setattr(tokenizer, "encode_chat", encode_chat_stuck)
    yield found
    found.release.set()


async def test_tokenizing_routes_are_bounded_and_leave_room_for_another_tenant(stuck: Stuck) -> None:
    frontend = stuck.parts.frontend
    talk = [{"role": "user", "content": BLOCKED}]
    bodies = {
        "/tokenize": {"prompt": BLOCKED},
        "/v1/messages/count_tokens": {"model": fakes.MODEL, "messages": talk},
        "/v1/completions": {"prompt": BLOCKED},
    }
    async with client_of(stuck.parts) as client, asyncio.timeout(20.0):
        calls = [client.post("/tokenize", json=bodies["/tokenize"], headers=A) for _ in range(PLACES // 2)]
        async with at_once(calls) as tasks:
            assert not any(task.done() for task in tasks)
            for path, body in bodies.items():
                assert (await client.post(path, json=body, headers=A)).status_code == 429, path
            chat = await frontend.prepare_chat([Message(role="user", content=LONG)], ClientRequest(tenant="b"))
            assert len(chat.request.prompt_token_ids) > 1
            assert (await client.post("/tokenize", json={"prompt": LONG}, headers=B)).status_code == 200
            stuck.release.set()
            answers = await asyncio.gather(*tasks)
        assert [answer.status_code for answer in answers] == [200] * (PLACES // 2)


async def test_tokenizing_over_grpc_is_bounded(stuck: Stuck) -> None:
    server = build_server(stuck.parts.frontend, stuck.parts.generator, stuck.parts.config, stuck.parts.metrics)
    async with (
        GrpcServer(server, host="127.0.0.1", port=0, grace_s=0.0) as listener,
        grpc.aio.insecure_channel(f"127.0.0.1:{listener.port}") as channel,
        asyncio.timeout(20.0),
    ):
        stub = InferenceStub(channel)
        request, chat = pb.TokenizeRequest(text=BLOCKED), pb.TokenizeRequest(chat=GRPC_HELLO)
        calls = [stub.Tokenize(request, metadata=tuple(A.items())) for _ in range(PLACES // 2)]
        while sum(stuck.parts.frontend._limit._of_tenants.values()) < PLACES // 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for one in (request, chat):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Tokenize(one, metadata=tuple(A.items()))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Tokenize(chat, metadata=tuple(B.items()))).token_ids
        stuck.release.set()
        assert all([(await call).token_ids for call in calls])


async def test_breakpoints_are_counted_while_their_beginnings_are_tokenized(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend, counted = stuck.parts.frontend, []
    encode_chat = frontend.tokenizer.encode_chat

    def encode_chat_counted(messages: Sequence[Message], **options: Any) -> list[int]:
        counted.append(frontend._limit._of_tenants.get("a"))
        return encode_chat(messages, **options)

    monkeypatch.setattr(frontend.tokenizer, "encode_chat", encode_chat_counted)
    talk = [Message(role="user", content=LONG), Message(role="user", content="hello")]
    fields = ClientRequest(tenant="a")
    prepared = await prepare_with_breakpoints(frontend, talk, [CacheBreakpoint(1, len(LONG), 300.0)], fields)
    assert prepared.request.pins
    assert counted == [1, 1]
    assert not frontend._limit._of_tenants


async def test_left_text_keeps_its_tenants_thread_until_it_is_tokenized() -> None:
    threads, release = TokenizerThreads(most_of_tenant=1), threading.Event()
    try:
        async with at_once([threads.run(release.wait, "a")]):
            pass
        async with at_once([threads.run(int, "a")]) as (waiting,):
            assert not waiting.done()
            assert await threads.run(int, "b") == 0
            release.set()
            assert await waiting == 0
    finally:
        release.set()
