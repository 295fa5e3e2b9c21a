"""A leaving worker's cache migrates to another one before its process ends."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.proofs.kills.campaign import PATIENT, WITHIN, Workers
from tests.support.running_cluster import running

MAX_TOKENS = 24
ANSWER = 480
SLOW = {"engine__prefill_chunk_tokens": 80, "engine__max_batched_tokens": 96}
"""Computing is dear: whatever is held somewhere is worth fetching."""
MIGRATED = re.compile(r"^(\S+): .*cache migrated from (\S+) in \S+ s: (.*) blocks")


def migrated(cluster) -> list[tuple[str, str, str]]:
    """Return target, leaving worker and amount of every migration in the logs."""
    found = [MIGRATED.search(line) for line in cluster.logs.lines]
    return [(m[1], m[2], m[3]) for m in found if m]


async def leave(cluster, name: str) -> None:
    """Stop a worker; return when it has ended and another process has replaced it."""
    pid = cluster.pid(name)
    cluster.local.kill(name, signal.SIGTERM)
    await cluster.local.wait_ready(name, after_pid=pid)
    await cluster.until_workers(len(cluster.local.workers))


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
@pytest.mark.turn(0)
async def test_second_turn_after_migration_finds_its_prefix(oracle, fork_servers, transport):
    sizes = {"prefill__replicas": 0, "decode__replicas": 2, "transfer__succession_s": 25.0}
    async with running(command=fork_servers.command, **sizes, transfer__transport=transport, **SLOW) as cluster:
        prompts = [oracle.story(seed, 200) for seed in range(40, 44)]
        answers = await asyncio.gather(*(cluster.tokens(prompt, ANSWER) for prompt in prompts))  # on both workers
        await leave(cluster, "decode-0")
        [(who, whom, what)] = migrated(cluster)
        assert (who, whom) == ("decode-1", "decode-0"), what
        moved = await cluster.figure("tandem_worker_inherited_blocks_total", worker=who, outcome="moved")
        assert moved >= (200 + ANSWER) // 16, "\n".join(cluster.logs.lines)
        assert await cluster.figure("tandem_worker_inherited_bytes_total", worker=who, outcome="moved") > 0
        came = {"worker": who, "direction": "received", "kind": "fetch", "transport": transport}
        assert await cluster.figure("tandem_worker_transfer_bytes_total", outcome="committed", **came) > 0
        for seed, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            second = [*prompt, *answer, *oracle.story(140 + seed, 100)]
            response = await cluster.complete(second, MAX_TOKENS)
            assert response["choices"][0]["token_ids"] == oracle.tokens(second, MAX_TOKENS)
            held = (len(prompt) + ANSWER - 1) // 16 * 16
            assert response["usage"]["prompt_tokens_details"]["cached_tokens"] == held
        await cluster.until_idle()


async def test_last_worker_leaves_without_migration(oracle, fork_servers):
    async with running(command=fork_servers.command, prefill__replicas=0, transfer__succession_s=30.0) as cluster:
        await cluster.tokens(oracle.story(50, 100), MAX_TOKENS)
        await leave(cluster, "decode-0")
        assert not migrated(cluster)
        assert await cluster.tokens(oracle.story(51, 100), MAX_TOKENS) == oracle.tokens(
            oracle.story(51, 100), MAX_TOKENS
        )


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped that process."""
    return Path(f"/proc/{pid}/stat").read_text().split()[2] == "T"


async def first_frozen(cluster, pids: dict[str, int]) -> str:
    """Which of these processes stops first."""

    async def found() -> str | None:
        return next((name for name, pid in pids.items() if is_stopped(pid)), None)

    await cluster.until(found)
    return await found()


def fetches_with(attempts, incarnation: int) -> list[dict[str, Any]]:
    """The attempts among these that are fetches in flight between this process and that one."""
    return [each for each in attempts if each["fetch"] and each["peer"] == incarnation and each["state"] in WITHIN]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["leaver", "target"])
async def test_worker_killed_mid_migration_leaves_nothing_behind(oracle, fork_servers, victim):
    """Killed while blocks move between the two; another worker then inherits the cache."""
    sizes = {
        "prefill__replicas": 0,
        "decode__replicas": 3,
        "transfer__succession_s": 25.0,
        "transfer__transport": "tcp",
    }
    async with running(command=fork_servers.command, policy=PATIENT, **sizes, **SLOW) as cluster:
        workers = Workers(cluster, fork_servers.folder)
        prompts = [oracle.story(seed, 200) for seed in range(60, 69)]
        first_answers = await asyncio.gather(*(cluster.tokens(prompt, ANSWER) for prompt in prompts))
        able = ["decode-0"] if victim == "leaver" else ["decode-1", "decode-2"]
        seen = {name: await workers.look(name, freeze=name in able) for name in workers.names}
        cluster.local.kill("decode-0", signal.SIGTERM)
        frozen = await first_frozen(cluster, {name: seen[name]["pid"] for name in able})
        others = [name for name in workers.names if name != frozen]
        await workers.settle(frozen, seen[frozen])
        states = {name: await workers.look(name) for name in others}
        [peer] = [name for name in others if fetches_with(states[name]["attempts"], seen[frozen]["incarnation"])]
        assert victim == "leaver" or peer == "decode-0"
        pids = {name: cluster.pid(name) for name in {frozen, "decode-0"}}
        os.kill(seen[frozen]["pid"], signal.SIGKILL)
        if victim == "leaver":

            async def noticed() -> bool:
                ends = (await workers.look(peer))["ends"]
                return bool(fetches_with(ends, seen[frozen]["incarnation"])) and bool(migrated(cluster))

            await cluster.until(noticed)
            [(who, whom, what)] = migrated(cluster)
            assert (who, whom) == (peer, frozen)
            assert "failed" in what
        for name, pid in pids.items():
            await workers.come_back(name, pid)
        if victim == "target":
            [(who, whom, what)] = migrated(cluster)
            assert (who, whom) == (({"decode-1", "decode-2"} - {frozen}).pop(), "decode-0")
            assert "moved" in what
        second = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, first_answers, strict=True)]
        answers = await asyncio.gather(*(cluster.tokens(prompt, MAX_TOKENS) for prompt in second))
        assert answers == [oracle.tokens(prompt, MAX_TOKENS) for prompt in second]
        await cluster.until_idle()
        assert await workers.leftovers() == []
