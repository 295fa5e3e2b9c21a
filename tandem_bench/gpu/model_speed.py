"""An 8B-shaped random model on the whole engine: decode against the bandwidth, prefill against matrix products."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.decoder import Decoder
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.runner.step_input_builder import build_step_inputs
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from engine.types.step_inputs import StepInputs
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench.engine.roofline import ModelCost, mean_context
from tandem_bench.errors import CannotMeasure
from tandem_bench.gpu.machine import gemm_flops_per_s, read_bytes_per_s
from tandem_bench.gpu.serving import BLOCK_SIZE, Limits, Serving, Tokens, pool_blocks, random_prompts
from tandem_bench.gpu.sources import random_model
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.gpu.timing import wall_seconds_per_call
from tandem_bench.report import figure

DECODE_GOALS = {1: 0.85, 16: 0.80, 64: 0.70}
"""Minimum share of the bandwidth roofline by batch (issue 3)."""
PREFILL_GOAL = 0.60
"""Minimum share of the GEMM rate measured in the same minute (issue 3)."""
SAME_WITHIN = 0.05
"""Tolerance relative to the largest logit: a replayed step may split its attention differently from a launched one."""
NO_LESS_EXACT = 1.25
"""How much farther from a deterministic step a recorded step with a chunk may be than a launched one. Each adds up in
an order of its own, so that in bfloat16 any two of the three differ by about as much; a wrong one is far from both."""
_REPEATS = 2


def decode(stage: Stage) -> Findings:
    """Measure tokens per second and share of the roofline by batch; the prompts are computed on the way.

    The goals apply to the engine as it serves, with its steps recorded; the rates without are shown for comparison.
    """
    batches, length, num_tokens = ((1, 2), 20, 4) if stage.is_small else (tuple(DECODE_GOALS), 1024, 96)
    bytes_per_s = read_bytes_per_s(stage)
    yield figure("decode.ceiling", bytes_per_s / 1e9, "GB/s")
    model = random_model(stage.shape, seed=stage.seed, options=stage.backend_options)
    yield Note(name="backend", text=model.backend.name)
    cost = ModelCost.from_config(model.config, stage.dtype)
    rng = Random(f"decode:{stage.seed}")
    limits = Limits(
        num_blocks=pool_blocks(max(batches), length + num_tokens),
        max_rows=max(batches),
        max_tokens=max(64, length) * 4,
        chunk_tokens=max(64, length) * 4,
        max_model_len=length + num_tokens + 16,
    )
    prompts = {batch: random_prompts(rng, batch, length, model.config.vocab_size) for batch in batches}
    for graphs in (True, False):
        with Serving(model, replace(limits, graphs=graphs)) as serving:
            if graphs and model.device.type == "cuda" and not serving.has_graphs:
                raise CannotMeasure("the engine recorded no graphs")
            for batch in batches:
                step_s = _decode_step_s(serving, prompts[batch], num_tokens)
                limit = cost.decode_limit(batch, mean_context(length, num_tokens), bytes_per_s)
                name = f"decode.{batch}" if graphs else f"decode.{batch}.eager"
                goal = stage.goal(DECODE_GOALS[batch]) if graphs and batch in DECODE_GOALS else None
                yield figure(f"{name}.step", step_s * 1e3, "ms")
                yield figure(f"{name}.rate", batch / step_s, "tokens/s")
                yield figure(f"{name}.of_roofline", batch / step_s / limit, "", at_least=goal)
    del serving
    yield from _launched_and_replayed(model, batches, length)


def _decode_step_s(serving: Serving, prompts: Sequence[Tokens], num_tokens: int) -> float:
    """Return the best mean of several rounds. The first also computes the prompts, which others find cached."""
    rounds = [serving.run(prompts, num_tokens) for _ in range(1 + _REPEATS)]
    return min(served.decode_step_s(len(prompts)) for served in rounds)


@torch.inference_mode()
def _launched_and_replayed(model: Decoder, batches: tuple[int, ...], length: int) -> Findings:
    """Measure the model's part of a decode step, without scheduler and sampling: kernel by kernel, and as a graph."""
    layout = kv_layout(
        model.config,
        fingerprint=model.fingerprint,
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=BLOCK_SIZE,
    )
    blocks_each = -(-length // BLOCK_SIZE)
    cache = PagedKVCache(layout, num_blocks=blocks_each * max(batches), device=model.device)
    cache.tensor.normal_()
    launching = ModelRunner(model, cache)
    replaying = launching
    if model.device.type == "cuda":
        replaying = ModelRunner(model, cache)
        replaying.record_graphs(max_rows=max(batches), max_tokens=max(batches), max_length=length)
    for batch in batches:
        # One after the other: each writes the keys and values of its last tokens, which batches after it read.
        inputs = decode_inputs(batch, length, blocks_each)
        launched_s, logits = _step(launching, inputs)
        yield figure(f"decode.{batch}.model.launched", launched_s * 1e3, "ms")
        if replaying is launching:
            continue
        replayed_s, replayed = _step(replaying, inputs)
        yield figure(f"decode.{batch}.model.replayed", replayed_s * 1e3, "ms")
        yield figure(f"decode.{batch}.model.graph_gain", launched_s / replayed_s, "x")
        apart = ((replayed - logits).abs().max() / logits.abs().max()).item()
        yield figure(f"decode.{batch}.model.graph_apart", apart, "of the largest logit", at_most=SAME_WITHIN)
    if replaying is launching:
        yield Note(name="decode.graphs", text="none on this device")


def _step(runner: ModelRunner, inputs: StepInputs) -> tuple[float, Tensor]:
    """Return the seconds per step, with steps launched one after the other, and the logits."""
    seconds = wall_seconds_per_call(lambda _: runner.compute(inputs), runner.model.device, calls=8)
    logits = runner.compute(inputs)
    if logits is None:
        raise ValueError(f"no logits, though {len(inputs.sample_rows)} rows sample")
    return seconds, logits.clone()


@torch.inference_mode()
def chunks(stage: Stage) -> Findings:
    """Measure the model's part of steps that decode and compute a chunk of a prompt: launched and recorded."""
    num_decodes, length, sizes = (2, 40, (8,)) if stage.is_small else (16, 1024, (32, 128, 256, 512, 1024))
    model = random_model(stage.shape, seed=stage.seed, options=stage.backend_options)
    layout = kv_layout(
        model.config,
        fingerprint=model.fingerprint,
        dtype=str(model.dtype).removeprefix("torch."),
        block_size=BLOCK_SIZE,
    )
    blocks_each = -(-(length + max(sizes)) // BLOCK_SIZE)
    cache = PagedKVCache(layout, num_blocks=blocks_each * (num_decodes + 1), device=model.device)
    cache.tensor.normal_()
    launching, recording = ModelRunner(model, cache), ModelRunner(model, cache)
    recording.record_graphs(max_rows=4 * num_decodes, max_tokens=max(sizes), max_length=length + max(sizes))
    exact = launching
    if recording.graphs is not None:
        options = replace(stage.backend_options, deterministic=True)
        exact = ModelRunner(random_model(stage.shape, seed=stage.seed, options=options), cache)
    for size in sizes:
        inputs = decode_inputs(num_decodes, length, blocks_each, chunk=size - num_decodes)
        launched_s, logits = _step(launching, inputs)
        yield figure(f"chunks.{size}.launched", launched_s * 1e3, "ms")
        if recording.graphs is None:
            continue
        recorded_s, recorded = _step(recording, inputs)
        yield figure(f"chunks.{size}.recorded", recorded_s * 1e3, "ms")
        yield figure(f"chunks.{size}.gain", launched_s / recorded_s, "x")
        wanted = exact.compute(inputs)
        if wanted is None:
            raise ValueError("no logits, though rows sample")
        apart = _distance(recorded, wanted) / _distance(logits, wanted)
        yield figure(f"chunks.{size}.apart", apart, "of a launched step's distance", at_most=NO_LESS_EXACT)


def _distance(logits: Tensor, wanted: Tensor) -> float:
    """Root of the mean square difference, of that of `wanted`. Both: `[num_rows, vocab_size]`."""
    return float((logits - wanted).double().norm() / wanted.double().norm())


def decode_inputs(batch: int, length: int, blocks_each: int, *, chunk: int = 0) -> StepInputs:
    """Build a step in which each of `batch` sequences computes its last token, with blocks in random order, and one
    more sequence, if any, `chunk` tokens behind as many as the others have.
    """
    sequences = batch + (1 if chunk else 0)
    order = Random(f"decode-inputs:{batch}").sample(range(sequences * blocks_each), sequences * blocks_each)
    items = []
    for i in range(sequences):
        own = length + chunk if i == batch else length
        request = Request(
            request_id=RequestId(f"suite-{i}"),
            token_ids=array("i", range(own)),
            num_prompt_tokens=own,
            params=SamplingParams(temperature=0.0),
            hash_root=BlockHash(b""),
            block_table=BlockTable(BlockId(block) for block in order[i * blocks_each : (i + 1) * blocks_each]),
        )
        num_tokens = chunk if i == batch else 1
        items.append(BatchItem(request=request, start=own - num_tokens, num_tokens=num_tokens, samples=True))
    return build_step_inputs(Batch(items=tuple(items)), BLOCK_SIZE)


def prefill(stage: Stage) -> Findings:
    """Measure one prompt in one step, as on a prefill worker of an idle pool; best of several."""
    length = 48 if stage.is_small else 8192
    rate = gemm_flops_per_s(stage, getattr(torch, stage.dtype))
    yield figure("prefill.ceiling", rate / 1e12, "TFLOP/s")
    model = random_model(stage.shape, seed=stage.seed, options=stage.backend_options)
    cost = ModelCost.from_config(model.config, stage.dtype)
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
