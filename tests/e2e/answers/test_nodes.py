"""Workers whose ranks are on two nodes: process trees that share nothing but connections between loopback addresses.

They say what `transformers` says, in one pool or two; what a node computes reaches other workers and what comes from
them reaches the node; a rank that dies is its worker's end, and both nodes come back.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager

import psutil
import pytest
import pytest_asyncio

from cluster.processes.effective_config import module_command
from tests.support.node_processes import OTHER_HOST, free_port
from tests.support.oracle import prompts
from tests.support.running_cluster import WAIT_S, running
from worker.node_group import RANK_MODULE

MAX_TOKENS = 24
TWO = {"tensor_parallel_size": 2, "nodes": 2, "join_s": 120.0}
FOUR = {"tensor_parallel_size": 4, "nodes": 2}
WAYS = {
    "both": {"prefill": TWO, "decode": TWO},
    "colocated-4": {"prefill": {"replicas": 0}, "decode": FOUR},
    "from-nodes": {"prefill": TWO, "decode": {"replicas": 2}},
    "to-nodes": {"prefill": {"tensor_parallel_size": 1}, "decode": FOUR},
    # Each rank has its KV for itself, as on GPUs, and moves it from its own node.
    "regions": {"prefill": TWO, "decode": TWO, "engine": {"kv_memory": "private"}},
    "regions-4-to-2": {"prefill": FOUR, "decode": TWO, "engine": {"kv_memory": "private"}},
    "regions-to-one": {"prefill": TWO, "decode": {"replicas": 2}, "engine": {"kv_memory": "private"}},
}
CHUNKED = {"engine__prefill_chunk_tokens": 64, "engine__max_batched_tokens": 256}
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Nodes:
    """The second nodes of a cluster's workers; each is started with its worker, and stays when that ends."""

    def __init__(self) -> None:
        self.starters: dict[str, subprocess.Popen[bytes]] = {}

    def command(self, plan, config_path, ready_fd):
        """How the cluster starts a process."""
        if plan.role.value in self.pools and plan.name not in self.starters:
            argv = [sys.executable, "-m", "cluster.cli.main", "follower", plan.role.value, "-c", str(config_path)]
            argv += ["-i", str(plan.index), "--node", "1", "--host", OTHER_HOST]
            self.starters[plan.name] = subprocess.Popen(argv)
        return module_command(plan, config_path, ready_fd)

    pools: tuple[str, ...] = ()

    def ranks(self, name):
        """Processes of a worker's second node."""
        children = psutil.Process(self.starters[name].pid).children()
        return [child for child in children if RANK_MODULE in child.cmdline()]

    def stop(self) -> list[int]:
        """As Kubernetes does; returns the exit codes."""
        for starter in self.starters.values():
            starter.terminate()
        return [starter.wait(WAIT_S) for starter in self.starters.values()]

    def kill(self) -> None:
        """Clean-up, whatever the test's outcome."""
        for starter in self.starters.values():
            starter.kill()
            starter.wait()


@asynccontextmanager
async def spread(pools, **more):
    """A cluster some of whose workers have two nodes."""
    nodes = Nodes()
    nodes.pools = tuple(name for name, pool in pools.items() if pool.get("nodes", 1) > 1)
    settings = {f"{pool}__{key}": value for pool, values in pools.items() for key, value in values.items()}
    ports = {f"{pool}__rank_port": free_port() for pool in nodes.pools}
    try:
        async with running(command=nodes.command, **settings, **ports, **more) as made:
            yield made, nodes
        assert nodes.stop() == [0] * len(nodes.starters)
    finally:
        nodes.kill()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(request):
    async with spread(WAYS[request.param], transfer__transport="tcp", **CHUNKED) as made:
        yield made


def ways(*names: str):
    """Some run in CI, all others nightly."""
    others = [pytest.param(name, marks=pytest.mark.slow) for name in WAYS if name not in names]
    return pytest.mark.parametrize("cluster", [*names, *others], indirect=True, scope="module")


@ways("both", "regions")
@pytest.mark.turn(2)
async def test_multi_node_cluster_answers_equal_transformers(cluster, oracle):
    made, nodes = cluster
    cases = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 6, seed=5)]
    hands_off = made.local.config.prefill.replicas > 0
    before = await made.disaggregated()
    for salt in ("cold", "warm", "warm"):
        answers = await asyncio.gather(*(made.tokens(p, MAX_TOKENS, cache_salt=salt) for p, _ in cases))
        assert [
            i for i, (answer, (_, expected)) in enumerate(zip(answers, cases, strict=True)) if answer != expected
        ] == []
    assert (await made.disaggregated() - before > 0) == hands_off
    assert await made.figure("tandem_dispatch_retries_total") == 0, "a hand-off failed"
    per_node = [made.local.config.decode.ranks_per_node] if "decode-0" in nodes.starters else []
    assert [len(nodes.ranks("decode-0")) for _ in per_node] == per_node
    await made.until_idle()


@ways()
async def test_streams_after_death_of_a_remote_rank_continue(cluster, oracle):
    made, nodes = cluster
    name = "decode-0" if "decode-0" in nodes.starters else "prefill-0"
    leader, [follower, *_] = made.pid(name), nodes.ranks(name)
    prompt = oracle.story(91, 200)
    expected = oracle.tokens(prompt, 200)
    killed = asyncio.Event()

    def kill(_got) -> None:
        if not killed.is_set():
            killed.set()
            os.kill(follower.pid, signal.SIGKILL)

    got = await asyncio.gather(*(made.stream(prompt, 200, on_token=kill, cache_salt=str(i)) for i in range(3)))
    assert [one.token_ids for one in got] == [expected] * 3
    await made.comes_back(name, leader)
    # Either the process that watches the rank notices first, or the engine, whose step needed it.
    said_so = re.compile(rf"{name}: .*(this worker cannot go on without it|the engine failed: RankLost)")
    assert any(said_so.match(line) for line in made.logs.lines)
    assert follower.pid not in [child.pid for child in nodes.ranks(name)]
    assert await made.tokens(prompt, MAX_TOKENS) == expected[:MAX_TOKENS]
    await made.until_idle()
