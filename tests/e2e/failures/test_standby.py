"""A standby worker replaces a lost one; streams continue on it, token for token."""

import asyncio
import os

import psutil
import pytest

from tests.support.running_cluster import WAIT_S, running

PROMPT = list(range(20, 60))
MAX_TOKENS = 160


def standbys() -> list[int]:
    """Standby workers of clusters that this process runs."""
    found = []
    for child in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if "cluster.processes.standby" in child.cmdline():
                found.append(child.pid)
        except psutil.Error:
            continue  # it has just ended
    return found


async def one_standby(other_than: int | None = None) -> int:
    """The pid of the standby, as soon as there is one."""
    async with asyncio.timeout(WAIT_S):
        while not (pids := [pid for pid in standbys() if pid != other_than]):  # noqa: ASYNC110 - in other processes
            await asyncio.sleep(0.1)
    return pids[0]


@pytest.mark.turn(0)
async def test_standby_replaces_worker_killed_during_stream() -> None:
    async with running(standby_workers=1, prefill__replicas=0, decode__replicas=1) as cluster:
        expected = await cluster.tokens(PROMPT, MAX_TOKENS)
        waiting, first = await one_standby(), cluster.pid("decode-0")
        killed = False

        def kill_once(_got) -> None:
            nonlocal killed
            if not killed:
                killed = True
                cluster.local.kill("decode-0")

        got = await cluster.stream(PROMPT, MAX_TOKENS, on_token=kill_once)
        assert got.token_ids == expected
        await cluster.local.wait_ready("decode-0", after_pid=first)
        [worker] = cluster.local.workers
        assert worker.pid == waiting
        command = psutil.Process(waiting).cmdline()
        assert command[1:3] == ["-m", "decode_worker"]
        assert command[command.index("--index") + 1] == "0"
        # It is a worker like any other now: it is watched, and its own death is noticed.
        other = await one_standby(other_than=waiting)
        cluster.local.kill("decode-0")
        await cluster.local.wait_ready("decode-0", after_pid=waiting)
        assert [worker.pid for worker in cluster.local.workers] == [other]
    assert standbys() == []
