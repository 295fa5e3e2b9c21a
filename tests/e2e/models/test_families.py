"""Model families through both pools say what `transformers` says: random models of every kind, some at each run."""

import asyncio
import shutil

import pytest

from tests.support.engine.families import FAMILY_CASES
from tests.support.oracle import BUILTIN, Oracle, prompts
from tests.support.running_cluster import running

MAX_TOKENS = 16
# Of the others, transformers does not have the name, or rotates long prompts by their length.
CASES = [case for case in FAMILY_CASES if case.served_as == case.architecture and "rope_parameters" not in case.changes]


@pytest.mark.in_turns
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_families_through_both_pools_equal_transformers(case, fork_servers, tmp_path):
    path = tmp_path / case.name
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, path)
    case.save(case.model(vocab_size=2048, max_position_embeddings=1024), path)
    oracle = Oracle(path)
    asked = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 4, seed=3)]
    ways = {"model__path": str(path), "model__dtype": "float32", "decode__tensor_parallel_size": 2}
    async with running(command=fork_servers.command, **ways) as cluster:
        for _ in range(2):  # the second time behind prefixes that are cached
            answers = await asyncio.gather(*(cluster.tokens(prompt, MAX_TOKENS) for prompt, _ in asked))
            assert answers == [expected for _, expected in asked]
        assert await cluster.disaggregated() > 0
        await cluster.until_idle()


WINDOWED = [case for case in CASES if case.name in {"olmo3", "cohere2", "gemma2", "gemma3"}]


@pytest.mark.in_turns
@pytest.mark.parametrize("case", WINDOWED, ids=lambda case: case.name)
async def test_windowed_layers_apart_through_both_pools_equal_transformers(case, fork_servers, tmp_path):
    """Prompts longer than the window, in pools too small to keep what has left it."""
    path = tmp_path / case.name
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, path)
    case.save(case.model(vocab_size=2048, max_position_embeddings=1024, sliding_window=40), path)
    oracle = Oracle(path)
    asked = [(prompt, oracle.tokens(prompt, MAX_TOKENS)) for prompt in prompts(oracle, 6, seed=5)]
    ways = {"model__path": str(path), "model__dtype": "float32", "decode__tensor_parallel_size": 2}
    ways |= {"engine__windowed_layers": "apart", "engine__prefill_chunk_tokens": 64}
    async with running(command=fork_servers.command, **ways) as cluster:
        for _ in range(2):  # the second time behind prefixes that are cached
            answers = await asyncio.gather(*(cluster.tokens(prompt, MAX_TOKENS) for prompt, _ in asked))
            assert answers == [expected for _, expected in asked]
        assert await cluster.disaggregated() > 0
        moved = await cluster.figures("tandem_worker_transfers_total", outcome="committed")
        assert sum(moved.values()) > 0
        await cluster.until_idle()
