"""A worker whose engine hangs behind live sessions: its streams continue elsewhere, and it recovers."""

import asyncio
import os
import signal

import psutil
import pytest

from engine.distributed.ranks.processes import RANK_MODULE
from tests.e2e.answers.test_tensor_parallel import ended
from tests.support.oracle import prompts
from tests.support.running_cluster import running

MAX_TOKENS = 24
STALL_S = 4.0


@pytest.mark.turn(0)
async def test_stopped_rank_ends_its_worker_but_no_stream(oracle):
    cases = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 6, seed=5)]
    pools = {"prefill__replicas": 0, "decode__replicas": 2, "decode__tensor_parallel_size": 2}
    async with running(**pools, engine__stall_s=STALL_S) as cluster:

        async def ask(salt: str) -> None:
            answers = await asyncio.gather(*(cluster.tokens(p, MAX_TOKENS, cache_salt=salt) for p, _ in cases))
            assert answers == [tokens for _, tokens in cases]

        await ask("all is well")
        leader = psutil.Process(cluster.pid("decode-0"))
        (follower,) = [child for child in leader.children() if RANK_MODULE in child.cmdline()]
        group = [os.pidfd_open(process.pid) for process in (leader, follower)]
        os.kill(follower.pid, signal.SIGSTOP)
        await ask("one is stopped")
        await asyncio.gather(*(ended(fd) for fd in group))
        warnings = [
            line
            for line in cluster.logs.lines
            if line.startswith("decode-0") and "the engine is stalled: a step" in line
        ]
        assert len(warnings) == 1, cluster.logs.lines
        assert not [line for line in cluster.logs.lines if line.startswith("decode-1") and "hangs" in line]
        await cluster.local.wait_ready("decode-0", after_pid=leader.pid)
        await cluster.until_workers(2)
        await ask("it is back")
        await cluster.until_idle()
