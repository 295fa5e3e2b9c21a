"""Transformers' continuous batching with the same weights and prompts, in the same minute."""

import gc
import importlib.util
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import torch

from tandem_bench.errors import CannotMeasure
from tandem_bench.gpu.serving import Limits, Serving, Tokens, pool_blocks, random_prompts
from tandem_bench.gpu.sources import random_model
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.report import figure
from tandem_bench.shapes import SHAPES, random_tensors

GAIN_GOAL = 3.0
"""Goal for the ratio of output tokens per second (issue 3)."""


def continuous_batching(stage: Stage) -> Findings:
    """Measure output tokens per second from submitting all prompts to the last token, prompts included."""
    if importlib.util.find_spec("transformers") is None:
        raise CannotMeasure("transformers is not installed")
    num_prompts, length, num_tokens = (2, 12, 3) if stage.is_small else (64, 512, 128)
    rng = Random(f"peer:{stage.seed}")
    vocab_size = SHAPES[stage.shape].vocab_size
    warm, timed = (random_prompts(rng, num_prompts, length, vocab_size) for _ in range(2))
    ours, own_tokens = _ours(stage, warm, timed, num_tokens)
    yield figure("ours.rate", num_prompts * num_tokens / ours, "tokens/s")
    if stage.place.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    model = _their_model(stage)
    theirs, their_tokens = _theirs(stage, model, warm, timed, num_tokens)
    yield Note(name="transformers.attention", text=str(model.config._attn_implementation))
    yield figure("transformers.rate", num_prompts * num_tokens / theirs, "tokens/s")
    yield figure("transformers.gain", theirs / ours, "x", at_least=stage.goal(GAIN_GOAL))
    agreeing = sum(a == b for a, b in zip(own_tokens, their_tokens, strict=True))
    yield figure("transformers.same_answers", agreeing, f"of {num_prompts}")


def _ours(
    stage: Stage, warm: Sequence[Tokens], timed: Sequence[Tokens], num_tokens: int
) -> tuple[float, tuple[Tokens, ...]]:
    length = len(timed[0])
    model = random_model(stage.shape, seed=stage.seed, options=stage.backend_options)
    limits = Limits(
        num_blocks=pool_blocks(len(timed), length + num_tokens),
        max_rows=len(timed),
        max_tokens=max(length, 8192),
        chunk_tokens=max(length, 8192),
        max_model_len=length + num_tokens + 16,
    )
    with Serving(model, limits) as serving:
        serving.run(warm, num_tokens)
        served = serving.run(timed, num_tokens)
    return served.end_s, served.tokens


def _their_model(stage: Stage) -> Any:
    """Build the model on the device with the same weights as ours."""
    import transformers

    shape, dtype = SHAPES[stage.shape], getattr(torch, stage.dtype)
    transformers.logging.set_verbosity_error()
    raw = shape.hf_config(stage.dtype)
    config = getattr(transformers, shape.architecture.replace("ForCausalLM", "Config"))(**raw)
    with torch.device(stage.place), torch.no_grad():
        model = getattr(transformers, shape.architecture)._from_config(config, dtype=dtype).eval()
        own = dict(model.named_parameters())
        for name, tensor in random_tensors(shape, seed=stage.seed, dtype=dtype, device=stage.place):
            own[name].copy_(tensor)
    return model


def _theirs(
    stage: Stage, model: Any, warm: Sequence[Tokens], timed: Sequence[Tokens], num_tokens: int
) -> tuple[float, list[Tokens]]:
    """Run transformers; its manager is kept between the two calls, so that the second finds its graphs ready."""
    import transformers

    generation = transformers.GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    bounds: dict[str, Any] = {"num_blocks": 16, "max_batch_tokens": 64} if stage.is_small else {}
    cached = transformers.generation.ContinuousBatchingConfig(allow_block_sharing=False, **bounds)

    def run(prompts: Sequence[Tokens]) -> tuple[float, list[Tokens]]:
        started_s = time.perf_counter()
        out = model.generate_batch(
            inputs=[list(prompt) for prompt in prompts],
            generation_config=generation,
            continuous_batching_config=cached,
            persistent_manager=True,
        )
        seconds = time.perf_counter() - started_s
        answers = [tuple(answer.generated_tokens) for answer in out.values()]
        if [len(answer) for answer in answers] != [num_tokens] * len(prompts):
            raise CannotMeasure(f"transformers answered {sum(map(len, answers))} tokens in {len(answers)} answers")
        return seconds, answers

    run(warm)
    return run(timed)
