"""`tandem up --ray` on a Ray cluster of several nodes that asks for a token: a node dies, the cluster grows.

Streams go on, token for token, and their clients notice nothing but a pause.
"""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path
from time import monotonic

import httpx
import pytest
import pytest_asyncio

from cluster.effective import PortDrawer
from tests.e2e.ray_nodes import ray_nodes
from tests.e2e.running_cluster import WAIT_S, Logs, RunningCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
STREAMS = 16
ANSWER = 500
START_S = 180.0
"""For processes to start, however busy the machine is."""
BEGUN = 12
SECRET = "the-secret-of-this-cluster"
"""Tokens of every stream before the node is killed."""


class Upped:
    """A `tandem up` that runs, and what it has said."""

    def __init__(self, process, port):
        self.process = process
        self.port = port
        self.logs = Logs()
        self._said = asyncio.Condition()

    async def listen(self):
        """Until it ends."""
        async for line in self.process.stdout:
            self.logs.lines.append(line.decode(errors="replace").rstrip())
            async with self._said:
                self._said.notify_all()

    async def says(self, *parts, since=0):
        """Wait for a line with all of these."""

        def said():
            return any(all(part in line for part in parts) for line in self.logs.lines[since:])

        try:
            async with asyncio.timeout(START_S), self._said:
                await self._said.wait_for(said)
        except TimeoutError:
            raise AssertionError(f"never said {parts}:\n" + "\n".join(self.logs.lines[-40:])) from None


async def tandem(environment, *arguments):
    """A `tandem` command, both its outputs in one."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "cluster.cli", *arguments),
        cwd=ROOT,
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes():
    async with ray_nodes() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def upped(nodes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    environment = nodes.environment | {
        "XDG_RUNTIME_DIR": str(folder),
        "TANDEM_ENGINE__NUM_THREADS": "1",
        "TANDEM_SECRET": SECRET,
    }
    with PortDrawer() as ports:
        port, grpc_port = (ports.draw("127.0.0.1", "a test") for _ in range(2))
    sizes = ("--prefill", "1", "--decode", "2", "--port", str(port), "--grpc-port", str(grpc_port))
    process = await tandem(environment, "up", "--ray", nodes.address, *sizes)
    made = Upped(process, port)
    listening = asyncio.ensure_future(made.listen())
    try:
        await made.says("Try it:")
        made.environment = environment
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            await listening
        assert await process.wait() == 0, made.logs.lines[-40:]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(upped):
    limits = httpx.Limits(max_connections=None)
    url = f"http://127.0.0.1:{upped.port}"
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits, trust_env=False) as http:
        made = RunningCluster(None, http, upped.logs)
        await made.until_workers(3)
        yield made


@pytest.fixture(scope="module")
def answers(oracle):
    prompts = [oracle.story(5000 + i, 120) for i in range(STREAMS)]
    return prompts, oracle.batch(prompts, ANSWER)


class Pauses:
    """How long clients waited between two words."""

    def __init__(self):
        self.longest_s = 0.0
        self._last = {}

    def heard(self, stream):
        now = monotonic()
        self.longest_s = max(self.longest_s, now - self._last.get(id(stream), now))
        self._last[id(stream)] = now


async def test_a_node_dies_under_streams_and_none_is_lost(nodes, upped, cluster, answers):
    prompts, expected = answers
    pauses, begun = Pauses(), set()
    all_begun = asyncio.Event()

    def heard(stream):
        pauses.heard(stream)
        if len(stream.token_ids) >= BEGUN:
            begun.add(id(stream))
        if len(begun) == STREAMS:
            all_begun.set()

    streams = [asyncio.ensure_future(cluster.stream(prompt, ANSWER, on_token=heard)) for prompt in prompts]
    async with asyncio.timeout(WAIT_S):
        await all_begun.wait()
    since = len(upped.logs.lines)
    had, killed_s = await nodes.kill_one(), monotonic()
    assert any(name.startswith("decode") for name in had)
    assert not all(stream.done() for stream in streams)
    told = await asyncio.gather(*streams)
    assert [one.token_ids for one in told] == expected
    assert await cluster.figure("tandem_dispatch_retries_total") > 0, "the streams of the dead node went on elsewhere"

    for name in had:
        await upped.says(name, "lost with its node", since=since)
        await upped.says(name, "is back", since=since)
    replaced_s = monotonic() - killed_s
    await cluster.until_workers(3)
    print(
        f"\n{len(told)} streams, 0 lost, longest pause {pauses.longest_s:.2f} s; {had} replaced in {replaced_s:.1f} s"
    )
    again = await asyncio.gather(*(cluster.tokens(prompt, 24, cache_salt="again") for prompt in prompts))
    assert again == [one[:24] for one in expected]
    await cluster.until_idle()


async def test_new_workers_join_upon_an_order(upped, cluster, answers):
    ordered_s = monotonic()
    scaling = await tandem(upped.environment, "scale", "decode=3", "--port", str(upped.port))
    out, _ = await scaling.communicate()
    assert scaling.returncode == 0, out.decode()
    await cluster.until_workers(4)
    print(f"\njoined {monotonic() - ordered_s:.1f} s after the order")
    prompts, expected = answers
    told = await asyncio.gather(*(cluster.tokens(prompt, 24, cache_salt="grown") for prompt in prompts))
    assert told == [one[:24] for one in expected]


async def test_ray_writes_no_secret_down(nodes, upped):
    """Of a cluster whose actors have been started, signalled and lost by now."""
    written = {path: path.read_bytes() for path in nodes.session.rglob("*") if path.is_file()}
    assert any(b"WorkerHost" in told for told in written.values()), "there is something to look at"
    assert [path for path, told in written.items() if SECRET.encode() in told] == []
    assert not any(SECRET in line for line in upped.logs.lines)


@pytest.mark.parametrize(
    ("token", "told"), [("wrong" * 8, "refuses this token"), (None, "no Ray token")], ids=["wrong", "none"]
)
async def test_whoever_has_not_the_token_is_told_so(nodes, tmp_path, token, told):
    environment = nodes.environment | {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": token or ""}
    process = await tandem(environment, "up", "--ray", nodes.address, "--port", "0", "--grpc-port", "0")
    out, _ = await process.communicate()
    assert process.returncode == 2, out.decode()
    assert out.decode().startswith("error: "), out.decode()
    assert told in out.decode()


@pytest.mark.slow
async def test_workers_do_not_outlive_the_command(nodes, tmp_path):
    before = await nodes.workers()
    environment = nodes.environment | {"XDG_RUNTIME_DIR": str(tmp_path), "TANDEM_ENGINE__NUM_THREADS": "1"}
    process = await tandem(
        environment, "up", "--ray", nodes.address, "--port", "0", "--grpc-port", "0", "--prefill", "0"
    )
    made = Upped(process, 0)
    listening = asyncio.ensure_future(made.listen())
    await made.says("Try it:")
    assert len(await nodes.workers()) == len(before) + 1
    process.kill()
    async with asyncio.timeout(WAIT_S):
        await listening
        await process.wait()
        while await nodes.workers() != before:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.05)
