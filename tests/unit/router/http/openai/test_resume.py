"""A broken stream resumes after its last event's id, at any router: nothing twice, nothing lost."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from router.http.app import create_app
from router.http.server.http_server import HttpServer
from router.text.tokenizer import Tokenizer
from tandem.errors import StreamTaken
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN, app_of, client_of, error_of

TEXT = "the quick brown fox 漢字 😀 jumps over"
ASK = {"X-Tandem-Stream-Ids": "1"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return fakes.make_tokenizer()


class Router:
    """One router's server, whose secret another router of the cluster may share."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 99, **script: Any) -> None:
        self.parts = fakes.make_servers(tokenizer, mint_seed=lambda: seed)
        self.parts.say(TEXT, cached_tokens=7, **script)
        self._app = app_of(self.parts)

    async def events(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
        """Events as {"id", "data"}; [DONE] stands last."""
        async with client_of(self._app) as client:
            response = await client.post(path, json=body | {"stream": True}, headers=headers)
        assert response.status_code == 200, response.text
        return [
            dict(line.split(": ", 1) for line in event.split("\n")) for event in response.text.split("\n\n") if event
        ]


def shown(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What a client has received of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["data"] == "[DONE]":
            continue
        for choice in json.loads(event["data"])["choices"]:
            has = choices.setdefault(choice["index"], {"text": "", "tokens": [], "ends": [], "roles": 0, "probs": []})
            delta = choice.get("delta", choice)
            has["text"] += delta.get("text", delta.get("content", "")) or ""
            has["roles"] += "role" in delta
            has["tokens"] += choice.get("token_ids") or []
            has["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            if probs := choice["logprobs"]:
                has["probs"] += (
                    list(zip(probs["tokens"], probs["text_offset"], strict=True))
                    if "tokens" in probs
                    else [entry["token"] for entry in probs["content"]]
                )
    return choices


BODIES = [
    (CHAT, HELLO | {"return_token_ids": True}),
    (CHAT, HELLO | {"n": 3, "seed": 5, "return_token_ids": True}),
    (CHAT, HELLO | {"logprobs": True, "top_logprobs": 1}),
    (CHAT, HELLO | {"stop": ["over"], "stream_options": {"include_usage": True}}),
    (PLAIN, {"prompt": "hello", "max_tokens": 60, "return_token_ids": True, "echo": True}),
    (PLAIN, {"prompt": "hello", "max_tokens": 60, "logprobs": 1, "stream_options": {"include_usage": True}}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("per_delta", [1, 3])
async def test_stream_broken_anywhere_is_resumed(
    tokenizer: Tokenizer, path: str, body: dict[str, Any], per_delta: int
) -> None:
    logprobs = "logprobs" in body
    whole = await Router(tokenizer, per_delta=per_delta, logprobs=logprobs).events(path, body, ASK)
    # Batched otherwise, and the seed that it mints itself would be another.
    other = Router(tokenizer, seed=1, per_delta=2, logprobs=logprobs)
    for place, event in enumerate(whole[:-1]):
        if "id" not in event:
            continue
        other.parts.generator.requests.clear()
        rest = await other.events(path, body, {"Last-Event-ID": event["id"]})
        assert shown(whole[: place + 1] + rest) == shown(whole)
        usages = [json.loads(e["data"]).get("usage") for e in whole[: place + 1] + rest if e["data"] != "[DONE]"]
        expected = [json.loads(e["data"]).get("usage") for e in whole[:-1]]
        assert [u for u in usages if u] == [u for u in expected if u]
        for chunk in rest[:-1]:
            ours, theirs = json.loads(chunk["data"]), json.loads(event["data"])
            assert (ours["id"], ours["created"]) == (theirs["id"], theirs["created"])
        for request in other.parts.generator.requests:
            assert request.sampling.seed == body.get("seed", 99)
            assert request.resumptions == 1


async def test_stream_broken_repeatedly_is_resumed(tokenizer: Tokenizer) -> None:
    body, has, headers = HELLO | {"n": 2}, [], ASK
    whole = await Router(tokenizer).events(CHAT, body, ASK)
    for round_ in range(1, 200):
        router = Router(tokenizer)
        events = await router.events(CHAT, body, headers)
        if events == [{"data": "[DONE]"}]:
            break
        # The client gets no further than to two new events each time.
        cut = [event for event in events[:3] if event["data"] != "[DONE]"]
        while cut and "id" not in cut[-1]:
            cut.append(events[len(cut)])
        has += cut
        headers = {"Last-Event-ID": cut[-1]["id"]} if cut else headers
        if not cut:
            break
        assert round_ < 100
    assert shown(has) == shown(whole)


async def test_every_id_names_the_worker_that_has_the_stream(tokenizer: Tokenizer) -> None:
    """The first event's too, which has no text: else a stream that broke there could never be adopted."""
    whole = await Router(tokenizer, worker=8).events(CHAT, HELLO, ASK)
    other = Router(tokenizer)
    for event in whole[:3]:
        await other.events(CHAT, HELLO, {"Last-Event-ID": event["id"]})
    resumed = [request.resume for request in other.parts.generator.requests]
    assert [[point.worker for point in points] for points in resumed if points] == [[8]] * 3


async def test_stream_ids_are_sent_on_request_only(tokenizer: Tokenizer) -> None:
    assert all("id" not in event for event in await Router(tokenizer).events(CHAT, HELLO, {}))
    several = {"prompt": ["a", "b"], "max_tokens": 4}
    assert all("id" not in event for event in await Router(tokenizer).events(PLAIN, several, ASK))


async def test_complete_stream_resumed_generates_nothing(tokenizer: Tokenizer) -> None:
    body = HELLO | {"stream_options": {"include_usage": True}}
    whole = await Router(tokenizer).events(CHAT, body, ASK)
    other = Router(tokenizer)
    assert await other.events(CHAT, body, {"Last-Event-ID": whole[-2]["id"]}) == [{"data": "[DONE]"}]
    assert not other.parts.generator.requests


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (HELLO | {"temperature": 0.5}, {}),
        (HELLO | {"messages": [{"role": "user", "content": "goodbye"}]}, {}),
        (HELLO | {"stop": ["x"]}, {}),
        (HELLO | {"cache_salt": "mine"}, {}),
        (HELLO | {"n": 2}, {}),
    ],
)
async def test_stream_id_of_other_request_is_refused(
    tokenizer: Tokenizer, body: dict[str, Any], headers: dict[str, str]
) -> None:
    router = Router(tokenizer)
    whole = await router.events(CHAT, HELLO, ASK)
    async with client_of(router.parts) as client:
        headers = {"Last-Event-ID": whole[3]["id"], **headers}
        refused = await client.post(CHAT, json=body | {"stream": True}, headers=headers)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "Last-Event-ID"


async def test_resumed_stream_keeps_original_deadline(tokenizer: Tokenizer) -> None:
    router = Router(tokenizer)
    whole = await router.events(CHAT, HELLO, ASK)
    ids, bound_s = router.parts.frontend.stream_ids, router.parts.config.request_timeout_s
    began_s = ids.read(whole[3]["id"]).head.created_s
    ids._wall_clock = lambda: began_s + 1.0 + 0.75 * bound_s
    await router.events(CHAT, HELLO, {"Last-Event-ID": whole[3]["id"]})
    first, again = (request.deadline_s for request in router.parts.generator.requests)
    assert first is not None
    assert again is not None
    assert first - again == pytest.approx(0.75 * bound_s)
    ids._wall_clock = lambda: began_s + 1.0 + bound_s
    async with client_of(router.parts) as client:
        headers = {"Last-Event-ID": whole[3]["id"]}
        refused = await client.post(CHAT, json=HELLO | {"stream": True}, headers=headers)
    assert (refused.status_code, error_of(refused)["param"]) == (400, "Last-Event-ID")
    assert len(router.parts.generator.requests) == 2


async def test_forged_stream_id_is_refused(tokenizer: Tokenizer) -> None:
    router = Router(tokenizer)
    async with client_of(router.parts) as client:
        refused: httpx.Response = await client.post(
            CHAT, json=HELLO | {"stream": True}, headers={"Last-Event-ID": "made-up"}
        )
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "Last-Event-ID"
    await asyncio.sleep(0)
    assert not router.parts.generator.requests


async def test_stream_taken_before_first_event_is_409(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """Over a real socket: without an answer uvicorn sends 500 in plain text and logs an error."""
    parts = fakes.make_servers(tokenizer)
    parts.generator.script = fakes.Script(error=StreamTaken("the client has taken this stream elsewhere"))
    app = create_app(parts.frontend, parts.generator, parts.ready, parts.config, parts.metrics)
    async with (
        HttpServer(app, host="127.0.0.1", port=0, grace_s=1.0) as listener,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        answer = await client.post(f"http://127.0.0.1:{listener.port}{CHAT}", json=HELLO | {"stream": True})
    assert answer.status_code == 409
    error = error_of(answer)
    assert (error["code"], error["type"]) == ("stream_taken", "ConflictError")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
