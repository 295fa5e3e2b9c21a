"""A router is lost during its streams: clients resume at another one without loss."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager

import httpx
import pytest
import pytest_asyncio

from cluster.processes.effective_config import PortDrawer
from tandem.client.aio import AsyncClient
from tandem.client.options import Options
from tests.support.running_cluster import WAIT_S, RunningCluster, body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER = 600
SEEN = 12


@asynccontextmanager
async def second_router(cluster, release=None):
    """Another `python -m router` of the same YAML and workers, as a second replica; maybe of another version."""
    config = cluster.local.config_path
    prefix = () if release is None else release.prefix()
    config = config if release is None else release.config(config, "second-router")
    with PortDrawer() as ports:
        http, grpc = (ports.draw("127.0.0.1", "router.host") for _ in range(2))
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-m", "router", "--config", str(config)),
        env={**os.environ, "TANDEM_ROUTER__PORT": str(http), "TANDEM_ROUTER__GRPC_PORT": str(grpc)},
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{http}", timeout=WAIT_S, trust_env=False) as client:
            replica = RunningCluster(cluster.local, client, cluster.logs)

            async def is_ready():
                try:
                    return (await client.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await replica.until(is_ready)
            await replica.until_workers(len(cluster.local.workers))
            replica.grpc_address = f"127.0.0.1:{grpc}"
            yield replica
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers):
    async with running(command=fork_servers.command, decode__replicas=2) as made:
        yield made


class Reader:
    """A client that resumes from the last id that it saw."""

    def __init__(self, request):
        self.request = request | {"stream": True, "stream_options": {"include_usage": True}}
        self.texts = {}
        self.token_ids = {}
        self.usage = None
        self.last_id = None
        self.has_some = asyncio.Event()

    async def read(self, http):
        """Read on; True at the stream's end."""
        headers = {"X-Tandem-Stream-Ids": "1"} | ({"Last-Event-ID": self.last_id} if self.last_id else {})
        try:
            async with http.stream("POST", "/v1/completions", json=self.request, headers=headers) as response:
                assert response.status_code == 200, await response.aread()
                event_id = None
                async for line in response.aiter_lines():
                    if line.startswith("id: "):
                        event_id = line.removeprefix("id: ")
                    elif line == "data: [DONE]":
                        return True
                    elif line.startswith("data: "):
                        self._take(json.loads(line.removeprefix("data: ")))
                        self.last_id = event_id
        except httpx.TransportError:
            return False
        return False

    def _take(self, chunk):
        assert "error" not in chunk, chunk
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + choice["text"]
            self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        if all(len(ids) >= SEEN for ids in self.token_ids.values()) and self.token_ids:
            self.has_some.set()


def requests(oracle):
    """Greedy, seeded by the client, seeded by the router, and two choices at once."""
    prompts = [oracle.story(9100 + i, 100 + 40 * i) for i in range(4)]
    return [
        body(prompts[0], ANSWER),
        body(prompts[1], ANSWER, temperature=0.9, seed=7),
        body(prompts[2], ANSWER, temperature=0.8, seed=11, n=2),
        body(prompts[3], ANSWER, logprobs=1),
    ]


class OwnClient:
    """`tandem.client`, which resumes by itself."""

    def __init__(self, prompt):
        self.prompt = prompt
        self.token_ids = []
        self.usage = None
        self.has_some = asyncio.Event()

    async def read(self, *addresses):
        options = Options(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
        async with AsyncClient(addresses) as client:
            async for piece in client.stream(self.prompt, options):
                self.token_ids += piece.token_ids
                self.usage = piece.usage or self.usage
                if len(self.token_ids) >= SEEN:
                    self.has_some.set()


@pytest.mark.turn(1)
async def test_other_router_takes_over_streams(cluster, oracle):
    sent = requests(oracle)
    undisturbed = [Reader(one) for one in sent]
    assert all(await asyncio.gather(*(reader.read(cluster.http) for reader in undisturbed)))
    async with second_router(cluster) as other:
        readers, pid = [Reader(one) for one in sent], cluster.pid("router")
        reading = [asyncio.ensure_future(reader.read(cluster.http)) for reader in readers]
        own = OwnClient(oracle.story(9250, 120))
        by_itself = asyncio.ensure_future(own.read(cluster.local.grpc_address, other.grpc_address))
        await asyncio.gather(*(reader.has_some.wait() for reader in (*readers, own)))
        cluster.local.kill("router", signal.SIGKILL)
        assert not any(await asyncio.gather(*reading)), "all were under way"
        assert all(await asyncio.gather(*(reader.read(other.http) for reader in readers)))
        for reader, quiet in zip(readers, undisturbed, strict=True):
            assert reader.texts == quiet.texts
            assert reader.token_ids == quiet.token_ids
            assert (reader.usage["completion_tokens"], reader.usage["prompt_tokens"]) == (
                quiet.usage["completion_tokens"],
                quiet.usage["prompt_tokens"],
            )
        await by_itself
        assert own.token_ids == oracle.tokens(own.prompt, ANSWER)
        assert (own.usage.prompt_tokens, own.usage.completion_tokens) == (120, ANSWER)
        assert await other.figure("tandem_placements_total", reason="adopted") == 6
        await other.until_idle()
    await cluster.local.wait_ready("router", after_pid=pid)
    await cluster.until_workers(3)


async def test_restarted_router_takes_over_its_streams(cluster, oracle):
    """One router is enough: clients come back to it, although only its former process knew the seed."""
    request = body(oracle.story(9200, 150), ANSWER, temperature=0.7)
    reader, pid = Reader(request), cluster.pid("router")
    reading = asyncio.ensure_future(reader.read(cluster.http))
    await reader.has_some.wait()
    cluster.local.kill("router", signal.SIGKILL)
    assert not await reading
    await cluster.local.wait_ready("router", after_pid=pid)
    await cluster.until_workers(3)
    assert await reader.read(cluster.http)
    assert len(reader.token_ids[0]) == reader.usage["completion_tokens"] == ANSWER
    await cluster.until_idle()


async def test_orphaned_streams_are_given_up(cluster, oracle):
    """Within `takeover_s`; blocks and queues are empty afterwards."""
    reader, pid = Reader(body(oracle.story(9300, 150), ANSWER)), cluster.pid("router")
    reading = asyncio.ensure_future(reader.read(cluster.http))
    await reader.has_some.wait()
    cluster.local.kill("router", signal.SIGKILL)
    assert not await reading
    await cluster.local.wait_ready("router", after_pid=pid)
    await cluster.until_workers(3)
    await cluster.until_idle()
