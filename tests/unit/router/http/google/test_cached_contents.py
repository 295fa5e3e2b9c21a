"""Named caches at the HTTP server, in process: created, used, extended, deleted, bounded, per tenant."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from router.api.named_cache_prompts import NamedCacheService
from router.api.request.client_request import PreparedRequest
from router.text.conversation import Message
from router.text.tokenizer import Tokenizer
from tandem.config.admission import ApiKey
from tandem.config.cluster import RouterConfig
from tandem.values.prefix_pin import PinKey, PinOutcome
from tests.support.router.delta_readers import QuickReader
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, client_of, error_of
from tests.support.router.servers.named_cache_world import LONG, World
from tests.support.router.servers.openapi_check import Described

PATH = "/v1beta/cachedContents"
MODEL = f"models/{fakes.MODEL}"
ASK = {"messages": [{"role": "user", "content": "what does the fox do"}]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


@pytest.fixture
def world(tokenizer: Tokenizer) -> World:
    return World(tokenizer)


@pytest.fixture(scope="module")
def refusing(tokenizer: Tokenizer) -> fakes.Servers:
    return World(tokenizer).parts


@pytest.fixture
async def client(world: World) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(world.parts) as client:
        yield client


def content(text: str = LONG, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "contents": [{"role": "user", "parts": [{"text": text}]}], **more}


async def made(client: httpx.AsyncClient, body: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    answer = await client.post(PATH, json=(body or content()) | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_cached_content_is_created_read_and_deleted(world: World, client: httpx.AsyncClient) -> None:
    cache = await made(client, ttl="300s", displayName="fox")
    (order,) = world.keeper.orders
    request = world.parts.generator.requests[0]
    assert (order.key, order.ttl_s) == (PinKey("", cache["name"]), 300.0)
    assert cache == {
        "name": cache["name"],
        "model": MODEL,
        "displayName": "fox",
        "createTime": "2023-11-14T22:13:20.000000Z",
        "updateTime": "2023-11-14T22:13:20.000000Z",
        "expireTime": "2023-11-14T22:18:20.000000Z",
        "usageMetadata": {"totalTokenCount": len(request.prompt_token_ids) - 1},
    }
    assert request.sampling.max_tokens == 1
    found = await client.get(f"/v1beta/{cache['name']}")
    assert found.json() == cache
    assert (await client.delete(f"/v1beta/{cache['name']}")).json() == {}
    assert world.keeper.unpinned == [order.key]
    gone = await client.get(f"/v1beta/{cache['name']}")
    assert (gone.status_code, gone.json()["error"]["status"]) == (404, "NOT_FOUND")


async def test_cached_content_deleted_during_chat_stays_deleted(world: World, client: httpx.AsyncClient) -> None:
    cache = await made(client)
    world.parts.generator.meanwhile = lambda: client.delete(f"/v1beta/{cache['name']}")  # type: ignore[attr-defined]
    answer = await client.post(CHAT, json=ASK | {"cached_content": cache["name"]})
    assert answer.status_code == 200
    assert len(world.keeper.orders) == 1
    assert [key.name for key in world.keeper.unpinned] == [cache["name"]]


async def test_cached_content_shortened_during_chat_stays_shortened(world: World, client: httpx.AsyncClient) -> None:
    cache = await made(client, ttl="300s")
    sooner = {"ttl": "20s"}
    world.parts.generator.meanwhile = lambda: client.patch(f"/v1beta/{cache['name']}", json=sooner)  # type: ignore[attr-defined]
    assert (await client.post(CHAT, json=ASK | {"cached_content": cache["name"]})).status_code == 200
    assert [order.ttl_s for order in world.keeper.orders] == [300.0, 20.0, 20.0]


async def test_cached_content_used_by_chat_keeps_worker_and_expiry(world: World, client: httpx.AsyncClient) -> None:
    body = content(ttl="300s") | {"systemInstruction": {"parts": [{"text": "lazy dog"}]}}
    body["contents"].append({"role": "model", "parts": [{"text": "ok"}]})
    cache = await made(client, body)
    world.passes(100.0)
    answer = await client.post(CHAT, json=ASK | {"cached_content": cache["name"]})
    assert answer.status_code == 200, answer.text
    kept, request = world.parts.generator.requests
    num_tokens = cache["usageMetadata"]["totalTokenCount"]
    assert request.prompt_token_ids[:num_tokens] == kept.prompt_token_ids[:num_tokens]
    text = world.parts.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    beginning = f"<|bos|><|user|>lazy dog<|end|><|user|>{LONG}<|end|><|assistant|>ok<|end|>"
    assert text == f"{beginning}<|user|>what does the fox do<|end|><|assistant|>"
    assert [order.ttl_s for order in world.keeper.orders] == [300.0, 200.0]
    again = await client.post(CHAT, json={"messages": [{"role": "system", "content": "x"}], "cached_content": "y"})
    assert again.status_code == 404


async def test_cached_content_expires_unless_prolonged(world: World, client: httpx.AsyncClient) -> None:
    cache = await made(client, ttl="10s")
    patched = await client.patch(f"/v1beta/{cache['name']}?updateMask=ttl", json={"ttl": "60.5s"})
    assert patched.json()["expireTime"] == "2023-11-14T22:14:20.500000Z"
    assert world.keeper.orders[-1].ttl_s == 60.5
    world.passes(20.0)
    later = await client.patch(f"/v1beta/{cache['name']}", json={"expireTime": "2023-11-14T23:15:00+01:00"})
    assert later.json()["expireTime"] == "2023-11-14T22:15:00.000000Z"
    assert later.json()["updateTime"] == "2023-11-14T22:13:40.000000Z"
    world.passes(80.0)
    assert (await client.get(f"/v1beta/{cache['name']}")).status_code == 404
    assert (await client.patch(f"/v1beta/{cache['name']}", json={"ttl": "60s"})).status_code == 404
    missing = await client.post(CHAT, json=ASK | {"cached_content": cache["name"]})
    assert error_of(missing)["param"] == "cached_content"
    assert (await client.get(PATH)).json() == {"cachedContents": []}


async def test_cached_contents_are_listed_by_page_and_bounded(world: World, client: httpx.AsyncClient) -> None:
    names = [(await made(client))["name"] for _ in range(3)]
    full = await client.post(PATH, json=content())
    assert (full.status_code, full.json()["error"]["status"]) == (429, "RESOURCE_EXHAUSTED")
    first = (await client.get(PATH, params={"pageSize": 2})).json()
    rest = (await client.get(PATH, params={"pageSize": 2, "pageToken": first["nextPageToken"]})).json()
    assert [one["name"] for one in first["cachedContents"] + rest["cachedContents"]] == names
    assert "nextPageToken" not in rest


async def test_cached_content_no_worker_keeps_is_not_created(world: World, client: httpx.AsyncClient) -> None:
    world.keeper.says = PinOutcome.NO_ROOM
    refused = await client.post(PATH, json=content())
    assert (refused.status_code, refused.json()["error"]["status"]) == (429, "RESOURCE_EXHAUSTED")
    assert "no_room" in refused.json()["error"]["message"]
    assert (await client.get(PATH)).json() == {"cachedContents": []}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ttl": "300"}, "ttl"),
        ({"ttl": "-3s"}, "ttl"),
        ({"ttl": "0s"}, "ttl"),
        ({"ttl": "7201s"}, "ttl"),
        ({"ttl": "3s", "expireTime": "2023-11-14T22:15:00Z"}, "either"),
        ({"expireTime": "tomorrow"}, "expireTime"),
        ({"expireTime": "2023-13-14T22:15:00Z"}, "expireTime"),
        ({"expireTime": "2023-11-14T22:13:20Z"}, "ttl"),
        ({"contents": []}, "contents"),
        ({"contents": [{"parts": []}]}, "parts"),
        ({"contents": [{"role": "tool", "parts": [{"text": "x"}]}]}, "role"),
        ({"contents": [{"parts": [{"inlineData": {}}]}]}, "contents"),
        ({"contents": [{"parts": [{"text": "x"}]}]}, "at least 16"),
        ({"tools": [{}]}, "tools"),
        ({"toolConfig": {}}, "toolConfig"),
        ({"displayName": "x" * 129}, "displayName"),
    ],
)
async def test_cached_content_invalid_body_is_refused(
    refusing: fakes.Servers, refusing_client: httpx.AsyncClient, change: dict[str, Any], words: str
) -> None:
    answer = await refusing_client.post(PATH, json=content() | change)
    assert (answer.status_code, answer.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert words in answer.json()["error"]["message"]
    assert not refusing.generator.requests


async def test_cached_content_unknown_name_is_refused(world: World, client: httpx.AsyncClient) -> None:
    cache = await made(client, {"model": fakes.MODEL, "systemInstruction": {"parts": [{"text": LONG}]}})
    name = cache["name"]
    assert (await client.post(PATH, json=content() | {"model": "models/other"})).status_code == 404
    twice = ASK | {"cached_content": name, "messages": [{"role": "system", "content": "x"}, *ASK["messages"]]}
    assert error_of(await client.post(CHAT, json=twice))["param"] == "messages"
    salted = await client.post(CHAT, json=ASK | {"cached_content": name, "cache_salt": "s"})
    assert error_of(salted)["param"] == "cache_salt"
    for query, body in (("", {}), ("?updateMask=displayName", {"ttl": "3s"}), ("", {"displayName": "x"})):
        assert (await client.patch(f"/v1beta/{name}{query}", json=body)).status_code == 400
    assert (await client.get(PATH, params={"filter": "x"})).status_code == 400
    assert (await client.put(f"/v1beta/{name}", json={})).status_code == 405


async def test_cached_content_of_departed_client_is_removed(world: World) -> None:
    """Both in one turn of the loop: the session must live, and no unnamed pin may stay."""
    world.keeper.says = None
    named = NamedCacheService.from_frontend(world.parts.frontend)
    assert named is not None
    computed = asyncio.Event()

    async def compute(prepared: PreparedRequest) -> None:
        await world.parts.generator.run(prepared.request, QuickReader())
        computed.set()

    message, ends_s = Message(role="user", content=LONG), world.unix_s + 300.0
    making = named.create("", [message], expires_s=ends_s, display_name=None, compute=compute)
    task = asyncio.create_task(making)
    async with asyncio.timeout(10.0):
        await computed.wait()
    (order,) = world.keeper.orders
    task.cancel()
    world.keeper.report_outcome(order.key, PinOutcome.HELD)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.keeper.unpinned == [order.key]
    assert not named.caches.all("")


async def test_cached_content_is_private_to_tenant(tokenizer: Tokenizer) -> None:
    keys = tuple(ApiKey(key=SecretStr(f"secret-of-{name}"), tenant=name) for name in "ab")
    world = World(tokenizer, RouterConfig(api_keys=keys, max_body_bytes=1 << 20))
    async with client_of(world.parts) as client:
        one, other = ({"authorization": f"Bearer secret-of-{name}"} for name in "ab")
        cache = (await client.post(PATH, json=content(), headers=one)).json()
        path = f"/v1beta/{cache['name']}"
        seen = [(await client.get(path, headers=headers)).status_code for headers in (one, other, {})]
        used = await client.post(CHAT, json=ASK | {"cached_content": cache["name"]}, headers=other)
        shown = [(await client.get("/debug/pins", headers=headers)).json()["data"] for headers in (one, other)]
    assert seen == [200, 404, 401]
    assert used.status_code == 404
    assert [[pin["name"] for pin in pins] for pins in shown] == [[cache["name"]], []]


async def test_cached_content_disabled_is_reported(tokenizer: Tokenizer) -> None:
    parts = fakes.make_servers(tokenizer)
    async with client_of(parts) as client:
        assert (await client.post(PATH, json=content())).status_code == 404
        refused = await client.post(CHAT, json=ASK | {"cached_content": "cachedContents/x"})
    assert error_of(refused)["param"] == "cached_content"


async def test_cached_content_answers_match_openapi(client: httpx.AsyncClient) -> None:
    described = await Described.by(client)
    await made(client, displayName="fox")
    cache = (await made(client))["name"].removeprefix("cachedContents/")
    for method, name, query, body in (
        ("POST", "", "", content(ttl="60s")),
        ("POST", "", "", content(ttl="sixty")),
        ("GET", "", "?pageSize=1", None),
        ("GET", "", "?pageSize=x", None),
        ("GET", f"/{cache}", "", None),
        ("PATCH", f"/{cache}", "?updateMask=ttl", {"ttl": "60s"}),
        ("DELETE", f"/{cache}", "", None),
        ("DELETE", f"/{cache}", "", None),
    ):
        answer = await client.request(method, f"{PATH}{name}{query}", json=body)
        described.check(method, PATH + ("/{id}" if name else ""), answer)
