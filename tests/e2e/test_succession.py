"""A worker that leaves does not take its cache along: another one has it before the process ends."""

import asyncio
import re
import signal

import pytest

from tests.e2e.running_cluster import running

MAX_TOKENS = 24
ANSWER = 160
SLOW = {"engine__prefill_chunk_tokens": 80, "engine__max_batched_tokens": 96}
"""Computing is dear: whatever is held somewhere is worth fetching."""
INHERITED = re.compile(r"^(\S+): .*inherited from (\S+) in \S+ s: (.*) blocks")


def inherited(cluster) -> list[tuple[str, str, str]]:
    """(successor, whom, what)."""
    found = [INHERITED.search(line) for line in cluster.logs.lines]
    return [(m[1], m[2], m[3]) for m in found if m]


async def leave(cluster, name: str) -> None:
    """Tell a worker to stop; return when it has ended and another process has taken its place."""
    pid = cluster.pid(name)
    cluster.local.kill(name, signal.SIGTERM)
    await cluster.local.wait_ready(name, after_pid=pid)
    await cluster.until_workers(len(cluster.local.workers))


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
async def test_turn_two_finds_its_prefix_where_the_cache_went(oracle, transport):
    sizes = {"prefill__replicas": 0, "decode__replicas": 2, "transfer__succession_s": 25.0}
    async with running(**sizes, transfer__transport=transport, **SLOW) as cluster:
        prompts = [oracle.story(seed, 200) for seed in range(40, 44)]
        said = await asyncio.gather(*(cluster.tokens(prompt, ANSWER) for prompt in prompts))  # on both workers
        await leave(cluster, "decode-0")
        [(who, whom, what)] = inherited(cluster)
        assert (who, whom) == ("decode-1", "decode-0"), what
        moved = await cluster.figure("tandem_worker_inherited_blocks_total", worker=who, outcome="moved")
        assert moved >= (200 + ANSWER) // 16, "\n".join(cluster.logs.lines)
        assert await cluster.figure("tandem_worker_inherited_bytes_total", worker=who, outcome="moved") > 0
        came = {"worker": who, "direction": "received", "kind": "fetch", "transport": transport}
        assert await cluster.figure("tandem_worker_transfer_bytes_total", outcome="committed", **came) > 0
        for seed, (prompt, answer) in enumerate(zip(prompts, said, strict=True)):
            second = [*prompt, *answer, *oracle.story(140 + seed, 100)]
            told = await cluster.complete(second, MAX_TOKENS)
            assert told["choices"][0]["token_ids"] == oracle.tokens(second, MAX_TOKENS)
            held = (len(prompt) + ANSWER - 1) // 16 * 16
            assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == held
        await cluster.until_idle()


async def test_the_last_worker_of_all_leaves_at_once(oracle):
    async with running(prefill__replicas=0, transfer__succession_s=30.0) as cluster:
        await cluster.tokens(oracle.story(50, 100), MAX_TOKENS)
        await leave(cluster, "decode-0")
        assert not inherited(cluster)
        assert await cluster.tokens(oracle.story(51, 100), MAX_TOKENS) == oracle.tokens(
            oracle.story(51, 100), MAX_TOKENS
        )


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["decode-0", "decode-1"])
@pytest.mark.parametrize("after_s", [0.0, 0.02, 0.05])
async def test_whoever_dies_in_the_middle_leaves_nothing_behind(oracle, victim, after_s):
    """The worker that leaves, or its successor."""
    sizes = {"prefill__replicas": 0, "decode__replicas": 2, "transfer__succession_s": 25.0}
    async with running(**sizes, transfer__transport="tcp", **SLOW) as cluster:
        prompts = [oracle.story(seed, 200) for seed in range(60, 68)]
        said = await asyncio.gather(*(cluster.tokens(prompt, ANSWER) for prompt in prompts))
        pids = {name: cluster.pid(name) for name in ("decode-0", victim)}
        cluster.local.kill("decode-0", signal.SIGTERM)
        await asyncio.sleep(after_s)
        cluster.local.kill(victim)
        for name, pid in pids.items():
            await cluster.local.wait_ready(name, after_pid=pid)
        await cluster.until_workers(len(cluster.local.workers))
        second = [[*prompt, *answer, 7, 8, 9] for prompt, answer in zip(prompts, said, strict=True)]
        told = await asyncio.gather(*(cluster.tokens(prompt, MAX_TOKENS) for prompt in second))
        assert told == [oracle.tokens(prompt, MAX_TOKENS) for prompt in second]
        await cluster.until_idle()
