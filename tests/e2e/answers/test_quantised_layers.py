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


def expected(path, prompts, quantization):
    """Greedy tokens of quantized layers, each prompt in one chunk."""
    options = BackendOptions(
        device=torch.device("cpu"), dtype="bfloat16", quantization=quantization, deterministic=True, num_threads=1
    )
    model = load_model(path, backend=select_backend(options))
    answers = []
    for prompt in prompts:
        session = Session(model, num_blocks=32, block_size=16)
        request = session.request(prompt, capacity=512)
        session.run([request], MAX_TOKENS, chunk=1024)
        answers.append(list(request.token_ids)[len(prompt) : len(prompt) + MAX_TOKENS])
    return answers


@pytest.mark.parametrize("quantization", ["int8", "int4", "stored"])
async def test_quantised_layers_answer_alike_through_both_pools(fork_servers, oracle, quantization, tmp_path):
    needs(Arithmetic.INT8_VECTORS)
    path = BUILTIN
    if quantization == "stored":
        quantize(tmp_path)
        path = tmp_path / "w4a16"
    lengths = random.Random("int8 layers")
    prompts = [make(i, lengths.randint(80, 400)) for i, make in enumerate([oracle.story, noise] * 4)]
    with torch.inference_mode():
        cases = list(zip(prompts, expected(path, prompts, quantization), strict=True))
    settings = {
        "model__dtype": "bfloat16",
        "model__path": str(path),
        "engine__quantization": "auto" if quantization == "stored" else quantization,
        "engine__deterministic": True,
        "engine__prefill_chunk_tokens": 64,
    }
    async with running(command=fork_servers.command, **settings) as cluster:
        cold = [await cluster.complete(prompt, MAX_TOKENS, cache_salt="a") for prompt in prompts]
        assert differing(cases, cold) == []
        assert await cluster.disaggregated() == len(prompts)
        warm = [await cluster.complete(prompt, MAX_TOKENS, cache_salt="a") for prompt in prompts]
        assert differing(cases, warm) == []
        assert [cached(answer) for answer in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
        together = await asyncio.gather(*(cluster.complete(prompt, MAX_TOKENS, cache_salt="b") for prompt in prompts))
        assert differing(cases, together) == []
        await cluster.until_idle()
        lines = [line for line in cluster.logs.lines if "are multiplied as they are stored" in line]
        assert bool(lines) == (quantization == "stored")
