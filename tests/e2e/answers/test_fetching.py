"""Prefixes held by another worker are fetched, not recomputed: turn two of a conversation reuses turn one."""

import asyncio
import re

import pytest

from tests.support.running_cluster import running

MAX_TOKENS = 24
ANSWER = 640
SLOW = {"engine__prefill_chunk_tokens": 80, "engine__max_batched_tokens": 96}
"""Computing is dear: whatever is held somewhere is worth fetching."""
CAME = re.compile(r"^(\S+): .*fetch/\S+: fetched (\d+) of (\d+) tokens from (\S+) in")


def fetched(cluster) -> list[tuple[str, int, int, str]]:
    """(fetching worker, tokens fetched, prompt tokens, holder)."""
    found = [CAME.search(line) for line in cluster.logs.lines]
    return [(m[1], int(m[2]), int(m[3]), m[4]) for m in found if m]


@pytest.mark.parametrize(
    "transport", [pytest.param("shm", marks=pytest.mark.turn(2)), pytest.param("tcp", marks=pytest.mark.slow)]
)
async def test_prefill_worker_fetches_prefix_from_decode_worker(fork_servers, oracle, transport):
    async with running(command=fork_servers.command, transfer__transport=transport, **SLOW) as cluster:
        await cluster.tokens(oracle.story(1, 300), MAX_TOKENS)  # its rates are measured
        for seed in range(2, 5):
            first = oracle.story(seed, 200)
            first_answer = await cluster.tokens(first, ANSWER)
            second = [*first, *first_answer, *oracle.story(100 + seed, 150)]
            before = len(fetched(cluster))
            answer = await cluster.complete(second, MAX_TOKENS)
            assert answer["choices"][0]["token_ids"] == oracle.tokens(second, MAX_TOKENS)
            [(who, gained, wanted, whom)] = fetched(cluster)[before:]
            assert (who, whom, gained) == ("prefill-0", "decode-0", wanted)
            held = (len(first) + ANSWER - 1) // 16 * 16
            assert gained == held - (len(first) - 1) // 16 * 16
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == held
        await cluster.until_idle()


@pytest.mark.turn(2)
async def test_fetch_from_lost_or_evicted_holder_recomputes(fork_servers, oracle):
    two = {"decode__replicas": 2, "prefill__replicas": 2}
    async with running(command=fork_servers.command, **two, **SLOW) as cluster:
        prompts = [oracle.story(seed, 200) for seed in range(20, 28)]
        first_answers = await asyncio.gather(*(cluster.tokens(prompt, ANSWER) for prompt in prompts))
        second = [
            [*prompt, *tokens, *oracle.story(200, 150)] for prompt, tokens in zip(prompts, first_answers, strict=True)
        ]
        tasks = [asyncio.ensure_future(cluster.tokens(prompt, MAX_TOKENS)) for prompt in second]
        await asyncio.sleep(0.05)
        cluster.local.kill("decode-0")
        answers = await asyncio.gather(*tasks)
        assert answers == [oracle.tokens(prompt, MAX_TOKENS) for prompt in second]
        await cluster.until_workers(len(cluster.local.workers))
        await cluster.until_idle()
