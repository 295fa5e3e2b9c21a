"""A cluster whose layers are in eight or four bits answers, however it computes, like one process that computes each
prompt alone."""

import asyncio
import random

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kernels.cpu.gemm import Arithmetic
from engine.model.loader import load_model
from tests.e2e.answers.test_parity import cached, differing
from tests.e2e.models.test_quantized_checkpoint import quantize
from tests.support.engine.paged_harness import Session, needs
from tests.support.oracle import BUILTIN, noise
from tests.support.running_cluster import running

MAX_TOKENS = 24
CPU = torch.device("cpu")


def expected(path, prompts, *, prefill, decode):
    """Greedy tokens, each prompt in one chunk; the first of them, and the prompt's KV, by the one model."""
    first, rest = (
        load_model(
            path,
            backend=select_backend(
                BackendOptions(device=CPU, dtype="bfloat16", quantization=one, deterministic=True, num_threads=1)
            ),
        )
        for one in (prefill, decode)
    )
    answers = []
    for prompt in prompts:
        begun, continued = (Session(model, num_blocks=32, block_size=16) for model in (first, rest))
        request = begun.request(prompt, capacity=512)
        begun.run([request], 1, chunk=1024)
        continued.cache.tensor.copy_(begun.cache.tensor)
        continued.run([request], MAX_TOKENS, chunk=1)
        answers.append(list(request.token_ids)[len(prompt) : len(prompt) + MAX_TOKENS])
    return answers


@pytest.mark.parametrize(
    ("prefill", "decode"), [("int8", "int8"), ("int4", "int4"), ("stored", "stored"), ("none", "int4")]
)
async def test_quantised_layers_answer_alike_through_both_pools(fork_servers, oracle, tmp_path, prefill, decode):
    needs(Arithmetic.INT8_VECTORS)
    path = BUILTIN
    if decode == "stored":
        quantize(tmp_path)
        path = tmp_path / "w4a16"
    lengths = random.Random("int8 layers")
    prompts = [make(i, lengths.randint(80, 400)) for i, make in enumerate([oracle.story, noise] * 4)]
    with torch.inference_mode():
        cases = list(zip(prompts, expected(path, prompts, prefill=prefill, decode=decode), strict=True))
    settings = {
        "model__dtype": "bfloat16",
        "model__path": str(path),
        "prefill__quantization": prefill,
        "engine__quantization": decode,
        "engine__deterministic": True,
        "engine__prefill_chunk_tokens": 64,
    }
    async with running(command=fork_servers.command, **settings) as cluster:
        cold = [await cluster.complete(prompt, MAX_TOKENS, cache_salt="a") for prompt in prompts]
        assert differing(cases, cold) == []
        assert await cluster.disaggregated() == len(prompts)
        warm = [await cluster.complete(prompt, MAX_TOKENS, cache_salt="a") for prompt in prompts]
        if prefill == decode:  # else what no block has is computed by the decode worker
            assert differing(cases, warm) == []
        assert [cached(answer) for answer in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        together = await asyncio.gather(*(cluster.complete(prompt, MAX_TOKENS, cache_salt="b") for prompt in prompts))
        assert differing(cases, together) == []
        await cluster.until_idle()
        lines = [line for line in cluster.logs.lines if "are multiplied as they are stored" in line]
        assert bool(lines) == (decode == "stored")
