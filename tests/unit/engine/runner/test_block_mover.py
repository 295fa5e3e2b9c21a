"""Blocks are offloaded to host memory and restored: bytes first, then a model's tokens."""

import queue
from array import array
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.assembly import EngineParts, assemble
from engine.engine import Engine
from engine.kv_cache.tiers.costs import MeasuredRates
from engine.kv_storage.paged_cache import PagedKVCache
from engine.runner.block_mover import BlockMover
from engine.types.request import Request
from engine.types.step_inputs import StepInputs
from engine.types.step_output import StepOutput
from tandem.errors import ConfigError
from tandem.values.block_hash import root_hash
from tandem.values.ids import RequestId
from tandem.values.kv_layout import KVLayout
from tandem.values.sampling import SamplingParams
from tests.unit.engine.test_assembly import SPEC

ROOT = root_hash(secret=SPEC.secret, model_fingerprint="offloading")
TIGHT = replace(SPEC, num_blocks=14, offload_bytes=4 << 20)
CHEAP_COPY = MeasuredRates(prefill_tokens_per_s=1.0, offload_bytes_per_s=1e12, load_bytes_per_s=1e12)
WAIT_S = 60.0


def layout(dtype: str) -> KVLayout:
    return KVLayout(model_fingerprint="m", dtype=dtype, num_layers=3, num_kv_heads=2, head_dim=4, block_size=16)


def moves(*, offloads: object = (), loads: object = (), copies: object = ()) -> StepInputs:
    """A step that only moves blocks."""
    empty = np.zeros(0, dtype=np.int64)
    pairs = {
        name: np.array(given, dtype=np.int64).reshape(-1, 2)
        for name, given in (("offloads", offloads), ("loads", loads), ("copies", copies))
    }
    return StepInputs(
        token_ids=empty,
        positions=empty,
        slots=empty,
        tables=np.zeros((0, 0), dtype=np.int64),
        starts=empty,
        counts=empty,
        num_single=0,
        sample_rows=empty,
        block_size=16,
        **pairs,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_block_mover_moves_all_layers_in_order(dtype: str) -> None:
    cache = PagedKVCache(layout(dtype), num_blocks=6)
    mover = BlockMover(cache, num_host_slots=3)
    assert mover.host_bytes == 3 * cache.layout.block_bytes
    cache.blocks.random_()
    before = cache.blocks.clone()
    mover.move(moves(offloads=[(0, 2), (5, 0)]))
    cache.blocks[:, [0, 5]] = 0
    # Saved before the same step overwrites it, and brought back before it is copied.
    mover.move(moves(offloads=[(1, 1)], loads=[(2, 1), (0, 0)], copies=[(1, 4), (0, 3)]))
    mover.move(moves(loads=[(1, 5)]))
    assert torch.equal(cache.blocks, before[:, [5, 0, 2, 5, 0, 1]])


def test_block_mover_measurement_leaves_pool_unchanged() -> None:
    cache = PagedKVCache(layout("float32"), num_blocks=6)
    cache.blocks.random_()
    before = cache.blocks.clone()
    rates = BlockMover(cache, num_host_slots=100).measure()
    assert rates.offload_bytes_per_s > 0.0
    assert rates.load_bytes_per_s > 0.0
    assert torch.equal(cache.blocks, before)
    assert BlockMover(cache).measure().offload_bytes_per_s == 0.0


def requests() -> list[Request]:
    """Requests that need twice the available blocks together."""
    made = []
    for k in range(4):
        prompt = [(31 * k + 7 * i) % 500 + 3 for i in range(20 + 9 * k)]
        params = SamplingParams(max_tokens=60, temperature=0.8 if k % 2 else 0.0, seed=k, ignore_eos=True)
        made.append(
            Request(
                request_id=RequestId(f"{k}"),
                token_ids=array("i", prompt),
                num_prompt_tokens=len(prompt),
                params=params,
                hash_root=ROOT,
                arrival_s=float(k),
            )
        )
    return made


def outputs(made: list[Request]) -> list[list[int]]:
    return [list(request.token_ids[request.num_prompt_tokens :]) for request in made]


def generate(parts: EngineParts) -> tuple[list[Request], int, int]:
    """Every request's output; also the blocks offloaded and restored."""
    made = requests()
    for request in made:
        parts.scheduler.add(request)
    num_saved = num_loaded = 0
    while (batch := parts.scheduler.schedule(0.0)) is not None:
        num_saved += len(batch.offloads)
        num_loaded += len(batch.loads)
        parts.scheduler.commit(batch, parts.runner.execute(batch))
        parts.scheduler.check_invariants()
    return made, num_saved, num_loaded


def test_block_mover_saved_kv_gives_same_output() -> None:
    undisturbed, num_saved, _ = generate(assemble(replace(SPEC, num_blocks=64)))
    assert num_saved == 0
    assert not any(request.num_preemptions for request in undisturbed)
    parts = assemble(TIGHT)
    assert parts.scheduler.offloading is not None
    parts.scheduler.offloading.rates = CHEAP_COPY
    saved, num_saved, num_loaded = generate(parts)
    assert sum(request.num_preemptions for request in saved) > 0
    assert num_saved > 0
    assert num_loaded > 0
    recomputed, num_saved, _ = generate(assemble(replace(TIGHT, offload_bytes=0)))
    assert sum(request.num_preemptions for request in recomputed) > 0
    assert num_saved == 0
    assert outputs(saved) == outputs(recomputed) == outputs(undisturbed)


def test_block_mover_rates_are_measured_by_engine() -> None:
    """Copy rates at start, compute rate from steps: no test states which is cheaper here."""
    parts = assemble(replace(TIGHT, num_blocks=32, max_batched_tokens=128, prefill_chunk_tokens=128))
    ended: queue.Queue[str] = queue.Queue()

    def on_step(output: StepOutput) -> None:
        for event in output.events:
            if event.finish_reason is not None:
                ended.put(event.request_id)

    engine = Engine(
        scheduler=parts.scheduler, runner=parts.runner, on_step=on_step, on_fatal=lambda error: ended.put(repr(error))
    )
    engine.start()
    try:
        prompt = Request(
            request_id=RequestId("long"),
            token_ids=array("i", range(3, 203)),
            num_prompt_tokens=200,
            params=SamplingParams(max_tokens=3, ignore_eos=True),
            hash_root=ROOT,
        )
        engine.call(lambda scheduler: scheduler.add(prompt)).result(WAIT_S)
        assert ended.get(timeout=WAIT_S) == "long"
    finally:
        engine.stop()
    assert parts.scheduler.offloading is not None
    rates = parts.scheduler.offloading.rates
    assert min(rates.prefill_tokens_per_s, rates.offload_bytes_per_s, rates.load_bytes_per_s) > 0.0


def test_block_mover_host_memory_is_in_the_budget() -> None:
    parts = assemble(TIGHT)
    num_slots = TIGHT.offload_bytes // parts.layout.block_bytes
    assert parts.budget.offload_bytes == parts.facts()["offload_bytes"] == num_slots * parts.layout.block_bytes
    assert any(line.startswith("offload") for line in parts.budget.lines())
    used = [parts.budget.weights_bytes, parts.budget.workspace_bytes, parts.budget.headroom_bytes]
    assert sum(used) + parts.budget.offload_bytes + parts.budget.kv_bytes <= parts.budget.limit_bytes
    with pytest.raises(ConfigError, match="not enough memory"):
        assemble(replace(TIGHT, num_blocks=None, max_model_len=2048, offload_bytes=240 << 20))
    with pytest.raises(ConfigError, match=r"engine\.offload_bytes is 5; one KV block takes"):
        assemble(replace(TIGHT, offload_bytes=5))
    with pytest.raises(ConfigError, match=r"engine\.offload_bytes is 1\d+; \d+ bytes of memory are free"):
        assemble(replace(TIGHT, offload_bytes=10**15))


def test_block_mover_disabled_offloads_nothing() -> None:
    parts = assemble(SPEC)
    assert parts.scheduler.offloading is None
    assert parts.facts()["offload_bytes"] == 0
