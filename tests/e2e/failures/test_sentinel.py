"""A whole cluster whose Redis fails over by Sentinel while clients chat through two routers.

A conversation's second turn goes through the other router, which knows of the first one by Redis alone.
"""

import asyncio
import time
from dataclasses import dataclass
from random import Random

import pytest
import pytest_asyncio

from cluster.cli.demo import STORY
from tests.e2e.failures.test_router_takeover import second_router
from tests.support.redis_sentinels import MASTER_NAME, SentinelGroup
from tests.support.running_cluster import running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
NUM_CLIENTS = 3
WINDOW = 12
"""Second turns whose mean is the hit rate."""
MOST_S = 10.0
"""Between the promotion of the new master and the hit rate's return."""


@pytest.fixture(scope="module")
def group():
    with SentinelGroup(password="hush-hush", sentinel_user="watcher", sentinel_password="tell-nobody") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers, group):
    redis_options = {
        "redis__sentinels": group.addresses,
        "redis__sentinel_master": MASTER_NAME,
        "redis__password": "hush-hush",
        "redis__sentinel_username": "watcher",
        "redis__sentinel_password": "tell-nobody",
    }
    async with running(command=fork_servers.command, prefill__replicas=2, decode__replicas=2, **redis_options) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Turn:
    """A second turn: when it was sent and answered, and how much of the first was cached."""

    sent_s: float
    ended_s: float
    hit: float


class Chats:
    """Clients that hold one conversation after another, until they are stopped."""

    def __init__(self, routers):
        self._routers = routers
        self._stopping = False
        self._num_conversations = 0
        self.turns = []
        self._tasks = [asyncio.ensure_future(self._client(Random(number))) for number in range(NUM_CLIENTS)]

    async def _client(self, rng):
        words = STORY.split()
        while not self._stopping:
            self._num_conversations += 1
            one, other = rng.sample(self._routers, 2)
            text = " ".join((f"{self._num_conversations}.", *rng.choices(words, k=70)))
            messages = [{"role": "user", "content": text}]
            answer, _ = await self._turn(one, messages)
            await asyncio.sleep(0.5)  # people read
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And then?"}]
            sent_s = time.monotonic()
            _, hit = await self._turn(other, messages)
            self.turns.append(Turn(sent_s, time.monotonic(), hit))

    async def _turn(self, router, messages):
        body = {"messages": messages, "max_tokens": 4, "temperature": 0}
        response = await router.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        usage = answer["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["message"]["content"], cached / usage["prompt_tokens"]

    def rate(self, since_s):
        """The hit rate of the first WINDOW second turns sent since then, and the end of the last of them."""
        turns = [turn for turn in self.turns if turn.sent_s >= since_s][:WINDOW]
        if len(turns) < WINDOW:
            return None
        return sum(turn.hit for turn in turns) / WINDOW, max(turn.ended_s for turn in turns)

    async def until(self, reached):
        """Wait for the condition; ends at once when a request has failed."""
        async with asyncio.timeout(120.0):
            while (found := reached()) is None:
                for task in self._tasks:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.02)
        return found

    async def stop(self):
        self._stopping = True
        await asyncio.gather(*self._tasks)


async def test_failover_under_chats_fails_no_request_and_hit_rate_returns(cluster, group):
    async with second_router(cluster) as replica:
        chats = Chats([cluster, replica])
        begun_s = time.monotonic()
        await chats.until(lambda: chats.rate(begun_s))  # the model and every connection are warm
        warm_s = time.monotonic()
        level, _ = await chats.until(lambda: chats.rate(warm_s))
        group.first.kill()
        killed_s = time.monotonic()
        await chats.until(lambda: True if group.role(group.second) == b"master" else None)
        promoted_s = time.monotonic()

        def is_back():
            for turn in chats.turns:
                if turn.sent_s >= promoted_s and (rate := chats.rate(turn.sent_s)) and rate[0] >= 0.9 * level:
                    return turn.sent_s
            return None

        back_s = await chats.until(is_back)
        await chats.stop()
        between = [turn.hit for turn in chats.turns if killed_s <= turn.sent_s < back_s]
        told = f"{len(chats.turns)} conversations, 0 failed; hit rate {level:.2f} before"
        told += f", {sum(between) / max(1, len(between)):.2f} over {len(between)} turns meanwhile"
        told += f"; promoted after {promoted_s - killed_s:.1f} s, back {back_s - promoted_s:.1f} s later"
        print(told)
        assert level > 0.5
        assert back_s - promoted_s <= MOST_S, told
        for router in (cluster, replica):
            assert await router.figure("tandem_redis_bad_entries_total") == 0
    lines = [line for line in cluster.logs.lines if "hush-hush" in line or "tell-nobody" in line]
    assert not lines
