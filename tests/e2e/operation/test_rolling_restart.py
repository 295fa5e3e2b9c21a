"""Every process of a cluster is replaced under HTTP and gRPC streams without disturbing one."""

import asyncio
import json
import os
import re
import ssl
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from cluster.control.operations import carry_out
from cluster.control.wire import FlipRequest, RestartRequest, ScaleRequest
from cluster.processes.effective_config import PortDrawer
from tandem.v1 import common_pb2
from tandem.v1 import inference_pb2 as pb
from tandem.v1.inference_pb2_grpc import InferenceStub
from tests.e2e.failures.test_router_takeover import Reader
from tests.support.certificates import Authority
from tests.support.running_cluster import WAIT_S, body, running

pytestmark = pytest.mark.asyncio(loop_scope="module")

API_PAGE = Path(__file__).parents[3] / "docs/use/api.md"
PROMPTS = 6
ANSWER = 48
LONG_ANSWER = 1900
LONG_STREAMS = 4
LONG_TRIES = 5
SHORT_DRAIN_S = 0.5
ROUNDS = 3


@dataclass(slots=True)
class Load:
    """Clients that send request after request. A stream that fails or differs from `transformers` is a failure."""

    cluster: object
    endpoints: object
    expected: dict
    ca: object = None
    """Certificate of the authority of endpoints that speak TLS."""
    over: bool = False
    answers: dict = field(default_factory=lambda: {"kept": 0, "fresh": 0, "grpc": 0, "eager": 0})
    """`eager` speaks gRPC, too, and does not wait for an endpoint that is not there."""
    failures: list = field(default_factory=list)
    longest_pause_s: float = 0.0
    """Between two pieces of one stream."""

    async def ask(self, kind, number):
        """One client, until the end of the load."""
        prompts = list(self.expected)
        async with (
            httpx.AsyncClient(
                base_url=self.endpoints.http_url, timeout=WAIT_S, trust_env=False, **self._trust()
            ) as http,
            self._channel() as channel,
        ):
            stub = InferenceStub(channel)
            while not self.over:
                number += 1
                prompt = prompts[number % len(prompts)]
                try:
                    speaks_grpc = kind in ("grpc", "eager")
                    received = await (
                        self._call(stub, kind, prompt) if speaks_grpc else self._stream(http, kind, prompt)
                    )
                except (httpx.HTTPError, grpc.aio.AioRpcError, AssertionError) as error:
                    self.failures.append((kind, repr(error)))
                else:
                    self.answers[kind] += 1
                    if received != self.expected[prompt]:
                        self.failures.append((kind, f"{len(received)} tokens, other than expected"))

    def _trust(self):
        return {} if self.ca is None else {"verify": ssl.create_default_context(cafile=self.ca)}

    def _channel(self):
        options = [("grpc.service_config", json.dumps(repeats_cancelled_calls()))]
        if self.ca is None:
            return grpc.aio.insecure_channel(self.endpoints.grpc_address, options=options)
        credentials = grpc.ssl_channel_credentials(self.ca.read_bytes())
        return grpc.aio.secure_channel(self.endpoints.grpc_address, credentials, options=options)

    async def _stream(self, http, kind, prompt):
        received, pieces_s = [], []
        headers = {"Connection": "close"} if kind == "fresh" else {}
        request = body(prompt, ANSWER) | {"stream": True}
        async with http.stream("POST", "/v1/completions", json=request, headers=headers) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    received += [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
                    pieces_s.append(time.monotonic())
        self._note(pieces_s)
        return received

    async def _call(self, stub, kind, prompt):
        received, pieces_s = [], []
        greedy = common_pb2.SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.0)
        request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=prompt), sampling=greedy)
        async for piece in stub.Generate(request, timeout=WAIT_S, wait_for_ready=kind == "grpc"):
            received += piece.token_ids
            pieces_s.append(time.monotonic())
        self._note(pieces_s)
        return received

    def _note(self, pieces_s):
        gaps = [later - earlier for earlier, later in pairwise(pieces_s)]
        self.longest_pause_s = max(self.longest_pause_s, *gaps, 0.0)


def repeats_cancelled_calls():
    """Return the service config that our pages recommend, for CANCELLED alone: an endpoint that is gone is a failure.

    gRPC's server cannot avoid these: https://github.com/grpc/grpc/issues/41785.
    """
    (shown,) = re.findall(r"```json\n(\{\"methodConfig\".*?)```", API_PAGE.read_text(), re.DOTALL)
    config = json.loads(shown)
    codes = config["methodConfig"][0]["retryPolicy"]["retryableStatusCodes"]
    codes.remove("UNAVAILABLE")
    assert codes == ["CANCELLED"]
    return config


@asynccontextmanager
async def loaded(cluster, oracle, first, endpoints=None):
    """Run clients of all kinds meanwhile: nothing of theirs fails, and each has had answers.

    `endpoints`: of another router than the cluster's own.
    """
    prompts = [tuple(oracle.story(first + i, 80)) for i in range(PROMPTS)]
    expected = dict(zip(prompts, oracle.batch(prompts, ANSWER), strict=True))
    load = Load(cluster, endpoints or cluster.local, expected, ca=getattr(endpoints, "ca", None))
    clients = [asyncio.create_task(load.ask(kind, number)) for number, kind in enumerate([*load.answers, "kept"])]
    try:
        yield load
    finally:
        load.over = True
        await asyncio.gather(*clients)
    assert not load.failures, (load.failures[:5], cluster.logs.lines[-40:])
    assert min(load.answers.values()) > 0, load.answers
    print(f"answers {load.answers}, failed 0, longest pause of a stream {load.longest_pause_s:.2f} s")


async def roll(cluster, load, *changes):
    """Carry them out, with answers of every kind before, during and after."""
    for change in changes:
        await answered(load)
        await carry_out(cluster.local, change, cluster.logs.lines.append)
    await answered(load)


async def answered(load):
    """Wait until each kind of client has had another answer."""
    before = dict(load.answers)

    async def has_more():
        return all(load.failures or load.answers[kind] > count for kind, count in before.items())

    await load.cluster.until(has_more)


def pids(cluster):
    return {view.pid for view in cluster.local.processes}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers):
    """Run one prefill and one decode worker."""
    async with running(command=fork_servers.command, transfer__succession_s=1.0) as made:
        yield made


@pytest.mark.turn(2)
async def test_restart_under_load_replaces_every_process(cluster, oracle):
    before = pids(cluster)
    async with loaded(cluster, oracle, 9700) as load:
        await roll(cluster, load, RestartRequest())
        assert before.isdisjoint(pids(cluster))
        assert len(cluster.local.processes) == len(before)
        await roll(cluster, load, ScaleRequest(prefill=2), FlipRequest(to="decode"), ScaleRequest(decode=1))
    assert [view.role.value for view in cluster.local.workers] == ["prefill", "decode"]
    assert before.isdisjoint(pids(cluster))
    await cluster.until_idle()


@pytest.mark.slow
async def test_rolling_restart_in_place_loses_no_request(cluster, oracle):
    """Without room for a second process, the others take over its work."""
    async with loaded(cluster, oracle, 9760) as load:
        await roll(cluster, load, ScaleRequest(decode=2))
        before = pids(cluster)
        await roll(cluster, load, RestartRequest(roles=("decode", "prefill"), in_place=True), ScaleRequest(decode=1))
        assert len(before & pids(cluster)) == 1, "the router"


@pytest.mark.slow
async def test_stream_waits_while_only_decode_worker_restarts_in_place(fork_servers, oracle):
    """New requests wait as well, in order."""
    settings = {"decode__drain_s": SHORT_DRAIN_S, "transfer__succession_s": 1.0}
    prompt, received, had = oracle.story(9750, 100), [], []
    async with running(command=fork_servers.command, **settings) as cluster:
        begun, waited = asyncio.Event(), []

        async def read():
            async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
                request = body(prompt, LONG_ANSWER) | {"stream": True}
                async with http.stream("POST", "/v1/completions", json=request) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: {"):
                            choices = json.loads(line.removeprefix("data: "))["choices"]
                            received.extend(token for choice in choices for token in choice.get("token_ids") or ())
                            begun.set()

        def on_progress(text):
            if text.startswith("starting a "):
                had.append(len(received))
                waited.append(asyncio.create_task(ask_once(cluster, prompt)))

        reading = asyncio.create_task(read())
        await begun.wait()
        await carry_out(cluster.local, RestartRequest(roles=("decode",), in_place=True), on_progress)
        await reading
        assert 0 < had[0] < LONG_ANSWER, "the worker left in the middle"
        assert received == oracle.tokens(prompt, LONG_ANSWER)
        (response,) = await asyncio.gather(*waited)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == received[:ANSWER]
        assert len(await cluster.tokens(prompt, ANSWER)) == ANSWER


async def ask_once(cluster, prompt):
    async with httpx.AsyncClient(base_url=cluster.local.http_url, timeout=WAIT_S, trust_env=False) as http:
        return await http.post("/v1/completions", json=body(prompt, ANSWER))


class LoneRouter:
    """A manual `python -m router` of the cluster's YAML, at ports that its successor shares."""

    def __init__(self, cluster, ports, folder, *, speaks_tls=False):
        self._config = cluster.local.config_path
        self._environment = os.environ | {
            "TANDEM_ROUTER__PORT": str(ports[0]),
            "TANDEM_ROUTER__GRPC_PORT": str(ports[1]),
            "TANDEM_ROUTER__HANDOVER_SOCKET": str(folder / "handover.sock"),
        }
        self.http_url = f"http{'s' if speaks_tls else ''}://127.0.0.1:{ports[0]}"
        self.grpc_address = f"127.0.0.1:{ports[1]}"
        self.ca = None
        if speaks_tls:
            files = Authority().issue(folder, name="127.0.0.1")
            self.ca = files.ca
            self._environment["TANDEM_ROUTER__TLS"] = json.dumps({"cert": str(files.cert), "key": str(files.key)})
        self.running = []

    async def start(self, drain_s=30.0, release=None):
        """One more; it serves when the one before has ended, or when the first one is ready. `release`: another
        version's.
        """
        environment = self._environment | {"TANDEM_DECODE__DRAIN_S": str(drain_s)}
        prefix = () if release is None else release.prefix()
        config = self._config if release is None else release.config(self._config, "lone-router")
        command = (*prefix, sys.executable, "-m", "router", "--config", str(config))
        process = await asyncio.create_subprocess_exec(*command, env=environment)
        self.running.append(process)
        if len(self.running) > 1:
            assert await self.running[-2].wait() == 0
        else:
            await self._ready()

    async def _ready(self):
        trust = True if self.ca is None else ssl.create_default_context(cafile=self.ca)
        async with httpx.AsyncClient(base_url=self.http_url, timeout=WAIT_S, trust_env=False, verify=trust) as http:
            async with asyncio.timeout(WAIT_S):
                while True:
                    with suppress(httpx.TransportError):
                        if (await http.get("/readyz")).status_code == 200:
                            return
                    await asyncio.sleep(0.05)

    async def stop(self):
        """Stop the serving process, and any that a failed test has left."""
        for process in self.running:
            if process.returncode is None:
                process.terminate()
                await process.wait()


@asynccontextmanager
async def running_lone_router(cluster, folder, **more):
    """Starts no process; in the end none is left, and each has exited with success."""
    folder.chmod(0o700)
    with PortDrawer() as drawer:
        ports = [drawer.draw("127.0.0.1", "router.host") for _ in range(2)]
    lone = LoneRouter(cluster, ports, folder, **more)
    try:
        yield lone
    finally:
        await lone.stop()
    assert {process.returncode for process in lone.running} == {0}


@pytest.mark.parametrize("speaks_tls", [False, True], ids=["plain", "tls"])
async def test_single_router_hands_its_listeners_to_its_successor(cluster, oracle, tmp_path, speaks_tls):
    async with running_lone_router(cluster, tmp_path, speaks_tls=speaks_tls) as lone:
        await lone.start()
        async with loaded(cluster, oracle, 9730, lone) as load:
            await answered(load)
            await lone.start()
            await answered(load)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_stream_outliving_its_router_continues_at_successor(cluster, oracle, tmp_path):
    async with running_lone_router(cluster, tmp_path) as lone:
        await lone.start(SHORT_DRAIN_S)
        streams = LongStreams(lone.http_url, oracle.story(9740, 100))
        reading = asyncio.gather(*(streams.read() for _ in range(LONG_STREAMS)))
        for _ in range(LONG_TRIES):
            await lone.start(SHORT_DRAIN_S)
            if streams.num_broken:
                break
        streams.over = True
        await reading
    assert streams.num_broken, "none was longer than the drain"
    assert {tuple(answer) for answer in streams.answers} == {tuple(oracle.tokens(streams.prompt, LONG_ANSWER))}


class LongStreams:
    """Long streams with ids: a broken one is resumed."""

    def __init__(self, url, prompt):
        self.prompt = prompt
        self.over = False
        self.answers = []
        self.num_broken = 0
        self._url = url

    async def read(self):
        async with httpx.AsyncClient(base_url=self._url, timeout=WAIT_S, trust_env=False) as http:
            while not self.over:
                reader = Reader(body(self.prompt, LONG_ANSWER))
                while not await reader.read(http):
                    self.num_broken += 1
                self.answers.append(reader.token_ids[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_rolling_restarts_of_routers_on_shared_port_lose_nothing(fork_servers, oracle):
    settings = {"router__processes": 2, "decode__replicas": 2, "transfer__succession_s": 1.0}
    async with running(command=fork_servers.command, **settings) as cluster, loaded(cluster, oracle, 9720) as load:
        for _ in range(ROUNDS):
            before = pids(cluster)
            await roll(cluster, load, RestartRequest())
            assert before.isdisjoint(pids(cluster))
            assert not load.failures
