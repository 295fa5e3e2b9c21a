"""Workers of several ranks answer like `transformers`, in one pool or two; losing a rank ends its worker."""

import asyncio
import os
import signal
import time

import psutil
import pytest
import pytest_asyncio

from engine.distributed.ranks.processes import RANK_MODULE
from tests.support.oracle import prompts
from tests.support.running_cluster import WAIT_S, running
from worker.kv_exchange.pool_region import RANK_MODULE as REGION_RANK_MODULE

MAX_TOKENS = 24
# Most steps of a prompt sample nothing: what ends them is not what ends the others.
CHUNKED = {"engine__prefill_chunk_tokens": 64, "engine__max_batched_tokens": 256}
WAYS = {
    "colocated-4": {"prefill__replicas": 0, "decode__tensor_parallel_size": 4},
    "shm-2": {
        "transfer__transport": "shm",
        "prefill__tensor_parallel_size": 2,
        "decode__tensor_parallel_size": 2,
        **CHUNKED,
    },
    "tcp-1-2": {"transfer__transport": "tcp", "prefill__tensor_parallel_size": 1, "decode__tensor_parallel_size": 2},
    "private-2": {
        "engine__kv_memory": "private",
        "prefill__tensor_parallel_size": 2,
        "decode__tensor_parallel_size": 2,
        **CHUNKED,
    },
}
LONG_WAYS = {
    "colocated-2": {"prefill__replicas": 0, "decode__tensor_parallel_size": 2},
    "tcp-2": {"transfer__transport": "tcp", "prefill__tensor_parallel_size": 2, "decode__tensor_parallel_size": 2},
    "shm-4": {"transfer__transport": "shm", "prefill__tensor_parallel_size": 4, "decode__tensor_parallel_size": 4},
    "shm-2-1": {"transfer__transport": "shm", "prefill__tensor_parallel_size": 2, "decode__tensor_parallel_size": 1},
    "shm-1-4": {"transfer__transport": "shm", "prefill__tensor_parallel_size": 1, "decode__tensor_parallel_size": 4},
    "tcp-4-2": {
        "transfer__transport": "tcp",
        "prefill__tensor_parallel_size": 4,
        "decode__tensor_parallel_size": 2,
        **CHUNKED,
    },
    "private-1-4": {
        "engine__kv_memory": "private",
        "prefill__tensor_parallel_size": 1,
        "decode__tensor_parallel_size": 4,
    },
    "private-4-1": {
        "engine__kv_memory": "private",
        "prefill__tensor_parallel_size": 4,
        "decode__tensor_parallel_size": 1,
    },
    "private-2-4": {
        "engine__kv_memory": "private",
        "prefill__tensor_parallel_size": 2,
        "decode__tensor_parallel_size": 4,
    },
}
TURNS = {"colocated-4": 0, "shm-2": 1, "tcp-1-2": 2, "private-2": 3}
pytestmark = pytest.mark.asyncio(loop_scope="module")


def ways(*names: str):
    """Some run in CI, some of those in turns, all others nightly."""
    often = [pytest.param(name, marks=pytest.mark.turn(TURNS[name]) if name in TURNS else ()) for name in names]
    others = [pytest.param(name, marks=pytest.mark.slow) for name in WAYS | LONG_WAYS if name not in names]
    return pytest.mark.parametrize("cluster", [*often, *others], indirect=True, scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(request):
    async with running(**(WAYS | LONG_WAYS)[request.param]) as made:
        yield made


@ways(*WAYS)
async def test_tensor_parallel_cluster_answers_equal_transformers(cluster, oracle):
    cases = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 6, seed=3)]
    hands_off = cluster.local.config.prefill.replicas > 0
    before = await cluster.disaggregated()
    for salt in ("cold", "warm", "warm"):
        answers = await asyncio.gather(*(cluster.tokens(p, MAX_TOKENS, cache_salt=salt) for p, _ in cases))
        assert [
            i for i, (answer, (_, expected)) in enumerate(zip(answers, cases, strict=True)) if answer != expected
        ] == []
    assert (await cluster.disaggregated() - before > 0) == hands_off
    assert await cluster.figure("tandem_dispatch_retries_total") == 0, "a hand-off failed"
    await cluster.until_idle()


@ways("shm-2", "private-2")
@pytest.mark.parametrize("victim", ["follower", pytest.param("leader", marks=pytest.mark.slow)])
async def test_worker_losing_a_rank_restarts(cluster, oracle, victim):
    config = cluster.local.config
    in_ranks = config.decode.tensor_parallel_size > 1
    name, pool = ("decode-0", config.decode) if in_ranks else ("prefill-0", config.prefill)
    leader = psutil.Process(cluster.pid(name))
    followers = [child for child in leader.children() if {RANK_MODULE, REGION_RANK_MODULE} & {*child.cmdline()}]
    assert len(followers) == pool.tensor_parallel_size - 1 > 0
    group = [os.pidfd_open(process.pid) for process in (leader, *followers)]
    started = time.monotonic()
    os.kill(leader.pid if victim == "leader" else followers[-1].pid, signal.SIGKILL)
    await asyncio.gather(*(ended(fd) for fd in group))
    print(f"{victim}: all gone after {time.monotonic() - started:.3f} s")
    await cluster.local.wait_ready(name, after_pid=leader.pid)
    await cluster.until_workers(len(cluster.local.workers))
    prompt = oracle.story(77, 200)
    assert await cluster.tokens(prompt, MAX_TOKENS) == oracle.tokens(prompt, MAX_TOKENS)
    if victim == "follower":
        rank = len(followers)
        message = f"rank {rank} (pid {followers[-1].pid}) was ended by SIGKILL: this worker cannot go on without it"
        assert any(line.startswith(name) and message in line for line in cluster.logs.lines)
    await cluster.until_idle()


async def ended(pid_fd):
    """Until the process is gone."""
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pid_fd, gone.set)
    try:
        async with asyncio.timeout(WAIT_S):
            await gone.wait()
    finally:
        loop.remove_reader(pid_fd)
        os.close(pid_fd)
