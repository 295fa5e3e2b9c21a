"""An 8B-shaped random model on the whole engine: decode against the bandwidth, prefill against the matrix products."""

from random import Random

import torch

from bench.engine_bench.roofline import ModelCost, mean_context
from bench.gpu.machine import gemm_flops_per_s, read_bytes_per_s
from bench.gpu.serving import Limits, Serving, pool_blocks, random_prompts
from bench.gpu.sources import random_model
from bench.gpu.stage import Findings, Note, Stage
from bench.report import figure

DECODE_GOALS = {1: 0.85, 16: 0.80, 64: 0.70}
"""Batch to the least share of the bandwidth roofline (issue 3)."""
PREFILL_GOAL = 0.60
"""Of the GEMM rate measured in the same minute (issue 3)."""
_REPEATS = 2


def decode(stage: Stage) -> Findings:
    """Tokens per second and share of the roofline by batch; the prompts are computed on the way."""
    batches, length, num_tokens = ((1, 2), 20, 4) if stage.is_small else (tuple(DECODE_GOALS), 1024, 96)
    bytes_per_s = read_bytes_per_s(stage)
    yield figure("decode.ceiling", bytes_per_s / 1e9, "GB/s")
    model = random_model(stage.shape, seed=stage.seed, options=stage.backend_options)
    yield Note(name="backend", text=model.backend.name)
    cost = ModelCost.of(model.config, stage.dtype)
    rng = Random(f"decode:{stage.seed}")
    limits = Limits(
        num_blocks=pool_blocks(max(batches), length + num_tokens),
        max_rows=max(batches),
        max_tokens=max(64, length) * 4,
        chunk_tokens=max(64, length) * 4,
        max_model_len=length + num_tokens + 16,
    )
    with Serving(model, limits) as serving:
        for batch in batches:
            # The first round compiles and captures what this batch needs.
            rounds = [
                serving.run(random_prompts(rng, batch, length, model.config.vocab_size), num_tokens)
                for _ in range(1 + _REPEATS)
            ]
            step_s = min(served.decode_step_s(batch) for served in rounds[1:])
            limit = cost.decode_limit(batch, mean_context(length, num_tokens), bytes_per_s)
            goal = DECODE_GOALS.get(batch)
            yield figure(f"decode.{batch}.step", step_s * 1e3, "ms")
            yield figure(f"decode.{batch}.rate", batch / step_s, "tokens/s")
            yield figure(
                f"decode.{batch}.of_roofline", batch / step_s / limit, "", at_least=stage.goal(goal) if goal else None
            )


def prefill(stage: Stage) -> Findings:
    """One prompt in one step, as a prefill worker of an idle pool has it; best of several."""
    length = 48 if stage.is_small else 8192
    rate = gemm_flops_per_s(stage, getattr(torch, stage.dtype))
    yield figure("prefill.ceiling", rate / 1e12, "TFLOP/s")
    model = random_model(stage.shape, seed=stage.seed, options=stage.backend_options)
    cost = ModelCost.of(model.config, stage.dtype)
    rng = Random(f"prefill:{stage.seed}")
    limits = Limits(
        num_blocks=pool_blocks(2, length + 1),
        max_rows=2,
        max_tokens=length,
        chunk_tokens=length,
        max_model_len=length + 16,
    )
    with Serving(model, limits) as serving:
        rounds = [
            serving.run(random_prompts(rng, 1, length, model.config.vocab_size), 1).end_s for _ in range(1 + _REPEATS)
        ]
    seconds = min(rounds[1:])
    flops_per_s = cost.prompt_flops_per_token(length) * length / seconds
    yield figure(f"prefill.{length}.rate", length / seconds, "tokens/s")
    yield figure(f"prefill.{length}.arithmetic", flops_per_s / 1e12, "TFLOP/s")
    yield figure(f"prefill.{length}.of_gemm", flops_per_s / rate, "", at_least=stage.goal(PREFILL_GOAL))
    yield figure(f"prefill.{length}.first", rounds[0], "s")
