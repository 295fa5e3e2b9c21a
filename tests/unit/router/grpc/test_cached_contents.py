"""Named caches over gRPC with the client: created, found, used, extended and deleted, at either server."""

from collections.abc import AsyncIterator

import pytest

from router.text.tokenizer import Tokenizer
from tandem.client.aio import AsyncClient
from tandem.client.options import Options, Turn
from tandem.client.sync import Client
from tandem.errors import CacheNotFound, InvalidRequest, ModelNotFound
from tandem.v1 import inference_pb2 as pb
from tandem.values.prefix_pin import PinOutcome
from tests.support.router.servers import fakes
from tests.support.router.servers.both_servers import Call, service_of
from tests.support.router.servers.http_client import client_of
from tests.support.router.servers.named_cache_world import LONG, World
from tests.unit.tandem.client.test_client import HELLO, server_of

TALK = [Turn(role="system", content=LONG), Turn(role="user", content="hello"), Turn(role="assistant", content="hi")]
BEGINNING = pb.Chat(messages=[pb.ChatMessage(role="user", content=LONG)])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def world(tokenizer: Tokenizer) -> World:
    return World(tokenizer)


@pytest.fixture
async def client(world: World) -> AsyncIterator[AsyncClient]:
    async with server_of(world.parts) as address, AsyncClient(address) as client:
        yield client


async def test_grpc_cached_content_is_created_used_prolonged_and_deleted(world: World, client: AsyncClient) -> None:
    made = await client.create_cached(TALK, ttl_s=300.0, display_name="fox")
    assert (made.display_name, made.created_s, made.expires_s) == ("fox", world.unix_s, world.unix_s + 300.0)
    assert await client.get_cached(made.name) == made
    assert await client.list_cached() == [made]
    await client.chat(HELLO, Options(cached_content=made.name))
    kept, request = world.parts.generator.requests
    assert request.prompt_token_ids[: made.num_tokens] == kept.prompt_token_ids[: made.num_tokens]
    world.passes(10.0)
    later = await client.prolong_cached(made.name, 600.0)
    assert (later.expires_s, later.updated_s) == (world.unix_s + 600.0, world.unix_s)
    assert [order.ttl_s for order in world.keeper.orders] == [300.0, 300.0, 600.0]
    await client.delete_cached(made.name)
    assert len(world.keeper.unpinned) == 1
    with pytest.raises(CacheNotFound) as missing:
        await client.chat(HELLO, Options(cached_content=made.name))
    assert missing.value.param == "cached_content"
    assert await client.list_cached() == []


async def test_cached_content_is_shared_by_http_and_grpc(world: World, client: AsyncClient) -> None:
    made = await client.create_cached(TALK)
    async with client_of(world.parts) as http:
        found = (await http.get(f"/v1beta/{made.name}")).json()
        assert found["usageMetadata"]["totalTokenCount"] == made.num_tokens
        assert made.expires_s == world.unix_s + 3600.0, "an hour, as over HTTP"
        await http.delete(f"/v1beta/{made.name}")
    with pytest.raises(CacheNotFound):
        await client.get_cached(made.name)


def test_cached_content_works_with_sync_client() -> None:
    calls = {name for name in dir(Client) if name.endswith("_cached")}
    assert calls == {name for name in dir(AsyncClient) if name.endswith("_cached")}
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("request_", "kind", "param"),
    [
        (pb.CreateCachedContentRequest(), InvalidRequest, "chat"),
        (pb.CreateCachedContentRequest(chat=BEGINNING, model="other"), ModelNotFound, "model"),
        (pb.CreateCachedContentRequest(chat=BEGINNING, ttl_s=0.0), InvalidRequest, "ttl"),
        (pb.CreateCachedContentRequest(chat=BEGINNING, ttl_s=float("nan")), InvalidRequest, "ttl"),
        (pb.CreateCachedContentRequest(chat=BEGINNING, ttl_s=7201.0), InvalidRequest, "ttl"),
        (pb.CreateCachedContentRequest(chat=BEGINNING, expires_s=1.0), InvalidRequest, "ttl"),
        (pb.CreateCachedContentRequest(chat=BEGINNING, ttl_s=1.0, expires_s=1.0), InvalidRequest, "expires_s"),
        (pb.CreateCachedContentRequest(chat=BEGINNING, display_name="x" * 129), InvalidRequest, "display_name"),
        (
            pb.CreateCachedContentRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x")])),
            InvalidRequest,
            "contents",
        ),
        (
            pb.CreateCachedContentRequest(
                chat=pb.Chat(messages=[pb.ChatMessage(role="user", content=LONG, cache_control=pb.CacheControl())])
            ),
            InvalidRequest,
            "cache_control",
        ),
    ],
)
async def test_grpc_cached_content_invalid_request_is_refused(
    world: World, request_: pb.CreateCachedContentRequest, kind: type[InvalidRequest], param: str
) -> None:
    with pytest.raises(kind) as refused:
        await service_of(world.parts).CreateCachedContent(request_, Call())
    assert refused.value.param == param
    assert not world.parts.generator.requests


async def test_grpc_cached_content_unknown_name_is_refused(world: World, tokenizer: Tokenizer) -> None:
    service = service_of(world.parts)
    made = await service.CreateCachedContent(pb.CreateCachedContentRequest(chat=BEGINNING), Call())
    with pytest.raises(InvalidRequest, match="nothing else can be changed"):
        await service.UpdateCachedContent(pb.UpdateCachedContentRequest(name=made.name), Call())
    with pytest.raises(CacheNotFound):
        await service.DeleteCachedContent(pb.DeleteCachedContentRequest(name="cachedContents/x"), Call())
    world.keeper.says = PinOutcome.NO_ROOM
    with pytest.raises(Exception, match="no_room"):
        await service.CreateCachedContent(pb.CreateCachedContentRequest(chat=BEGINNING), Call())
    nothing = service_of(fakes.make_servers(tokenizer))
    with pytest.raises(InvalidRequest) as refused:
        await nothing.ListCachedContents(pb.ListCachedContentsRequest(), Call())
    assert refused.value.param == "cached_content"
