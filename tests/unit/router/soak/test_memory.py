"""A router that serves for long keeps no more than one that has just begun (docs/extend/incidents.md).

Peers' routers grew by tens of gigabytes a day: at a hundred requests a second, kilobytes for each request.
"""

import asyncio
import logging
from collections import Counter
from random import Random
from typing import Any

import orjson
import pytest

from router.http.app import OptionalRoutes, create_app
from router.workers.health import WorkerBreakers
from router.workers.poison_request import PoisonRequestTracker
from router.workers.prefix_map import PrefixMap
from tests.support.router.kept_objects import Meter
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import CHAT, HELLO, PLAIN
from tests.support.router.whole_router import Fate, WholeRouter

MOST_OBJECTS_MORE = 2_400
"""However many requests were served: logs and decisions are never equally full. A kept request is dozens of them."""
CROWD = 50
NUM_SAMPLES = 8
FATES = (*[Fate.ANSWER] * 12, *Fate)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the test would keep every warning."""
    caplog.set_level(logging.CRITICAL, logger="router")


class Soak:
    """Repeats everything that may happen to a router."""

    def __init__(self, seed: int) -> None:
        self.whole = WholeRouter(seed)
        self._rng = Random(seed + 5)
        self.whole.draw = lambda: self._rng.choice(FATES)
        self._num_names = 0

    @property
    def roots(self) -> dict[str, Any]:
        whole = self.whole
        return {name: getattr(whole, name) for name in ("registry", "dispatcher", "gate", "metrics", "decisions")}

    async def go_on(self, num_requests: int) -> int:
        """Serve so many; returns how many were answered in full."""
        whole, rng, served = self.whole, self._rng, 0
        for _ in range(num_requests // CROWD):
            served += await whole.crowd(CROWD, lambda: rng.choice((0, 1, 2, 4, 6, 10, 25, 25, 25)))
            whole.now_s += 2.0
            self.restart_one()
            whole.metrics.render()
        return served

    def restart_one(self) -> None:
        """A worker leaves, and returns under its own name or another one."""
        one = self._rng.choice(self.whole.workers)
        one.leave(on_request=self._rng.random() < 0.5)
        if self._rng.random() < 0.5:
            self._num_names += 1
            one.name = f"{one.name[0]}{self._num_names + 100}"
        one.join()

    async def measured(self, num_requests: int, *, warm_up: int = 800, num_samples: int = NUM_SAMPLES) -> Meter:
        """Samples once all bounded logs are full; each with empty caches."""
        for _ in range(600):
            self.restart_one()
        await self.go_on(warm_up)
        meter = Meter(self.roots)
        for number in range(num_samples):
            await self.go_on(num_requests // num_samples)
            self.whole.assert_nothing_is_left()
            for one in self.whole.workers:
                one.leave(on_request=False)
                one.join()
            meter.sample(number * (num_requests // num_samples))
        return meter


@pytest.mark.parametrize("num_requests", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.turn(2)
async def test_memory_does_not_grow_with_served_requests(num_requests: int) -> None:
    soak = Soak(1)
    # One sample may be off by 2,000 objects, as full as the logs happen to be: the slope needs many.
    meter = await soak.measured(num_requests, num_samples=max(NUM_SAMPLES, num_requests // 2_500))
    assert not meter.grown(num_requests // 20), "no container has an entry for every twentieth request"
    assert meter.objects_per_request() * num_requests < MOST_OBJECTS_MORE, meter.samples
    assert await soak.go_on(200) > 50


class ServerUnderTest:
    """The HTTP server in front of all that, called as an ASGI server calls an application."""

    def __init__(self, soak: Soak) -> None:
        self._whole, self._rng = soak.whole, Random(7)
        self._parts = fakes.make_servers(fakes.make_tokenizer(), clock=soak.whole.clock)
        parts, whole = self._parts, soak.whole
        self.app = create_app(
            parts.frontend,
            whole.gate,
            whole.readiness,
            parts.config,
            whole.metrics,
            OptionalRoutes(decisions=whole.decisions),
        )
        self._number = 0
        self.statuses: Counter[int] = Counter()

    async def crowd(self, count: int) -> None:
        """So many at once, valid and invalid, of which some leave early."""
        tasks = {asyncio.create_task(self._ask(left := asyncio.Event())): left for _ in range(count)}
        turn = 0
        while not all(task.done() for task in tasks):
            for left in tasks.values():
                if turn > 200 or self._rng.random() < 0.02:
                    left.set()
            turn += 1
            await asyncio.sleep(0)
        assert not [task.exception() for task in tasks if task.exception() is not None]

    async def _ask(self, left: asyncio.Event) -> None:
        rng = self._rng
        self._number += 1
        path = rng.choice((CHAT, PLAIN, PLAIN, PLAIN, f"/nowhere/{self._number}", "/v1/models"))
        body: dict[str, Any] = {"max_tokens": 2, "stream": rng.random() < 0.5, "user": f"u{self._number}", "n": 1}
        body |= {"prompt": f"hello {self._number}"} if path == PLAIN else HELLO
        body |= rng.choice(({}, {}, {"cache_salt": str(self._number % 9)}, {"n": 10**6}, {"stop": f"s{self._number}"}))
        data = rng.choice((orjson.dumps(body),) * 9 + (b"{",))
        messages = [{"type": "http.request", "body": data, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.statuses[message["status"]] += 1

        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"id-%d" % self._number)]
        scope = {"type": "http", "http_version": "1.1", "method": rng.choice(("POST",) * 8 + ("GET", "BREW"))}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "state": {}}
        await self.app(scope, receive, send)


@pytest.mark.parametrize("num_requests", [800, pytest.param(30_000, marks=pytest.mark.slow)])
@pytest.mark.turn(1)
async def test_memory_of_http_server_does_not_grow(num_requests: int) -> None:
    soak = Soak(2)
    server = ServerUnderTest(soak)
    meter = Meter(soak.roots | {"app": server.app, "frontend": server._parts.frontend})
    for number in range(-2, NUM_SAMPLES):
        for _ in range(num_requests // NUM_SAMPLES // CROWD):
            await server.crowd(CROWD)
            soak.whole.now_s += 2.0
            soak.whole.metrics.render()
        soak.whole.assert_nothing_is_left()
        if number >= 0:
            meter.sample(number * (num_requests // NUM_SAMPLES))
    assert {200, 400, 404, 405} <= server.statuses.keys()
    assert not meter.grown(num_requests // 20)
    assert meter.objects_per_request() * num_requests < MOST_OBJECTS_MORE, meter.samples


def never_evict(*_: object, **__: object) -> None:
    """Replaces any eviction."""


@pytest.mark.parametrize(
    ("owner", "forgets", "keeper"),
    [
        (PoisonRequestTracker, "forget", "_choices"),
        (WorkerBreakers, "keep", "breakers.by_worker"),
        (PrefixMap, "expire", "_lapses"),
    ],
)
@pytest.mark.in_turns
async def test_memory_meter_finds_a_leak(
    owner: type, forgets: str, keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, forgets, never_evict)
    monkeypatch.setattr(WholeRouter, "assert_nothing_is_left", never_evict)
    meter = await Soak(1).measured(400, warm_up=100)
    assert any(keeper in way for way in meter.grown(5)), meter.grown(1)
