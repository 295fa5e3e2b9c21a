"""Blocks are offloaded to pinned memory and restored in stream order, without waiting."""

from dataclasses import replace

import pytest
import torch

from engine.assembly import assemble
from engine.kv_storage.paged_cache import PagedKVCache
from engine.runner.block_mover import BlockMover
from tests.unit.engine.runner.test_block_mover import CHEAP_COPY, TIGHT, generate, layout, moves, outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_cuda_block_moves_follow_stream_order(dtype: str) -> None:
    cache = PagedKVCache(layout(dtype), num_blocks=6, device="cuda")
    mover = BlockMover(cache, num_host_slots=3)
    for _ in range(20):
        cache.blocks.random_()
        before = cache.blocks.clone()
        mover.move(moves(offloads=[(0, 2), (5, 0)]))
        cache.blocks[:, [0, 5]] = 0  # queued behind the copies, which nobody has waited for
        mover.move(moves(offloads=[(1, 1)], loads=[(2, 1), (0, 0)], copies=[(1, 4), (0, 3)]))
        mover.move(moves(loads=[(1, 5)]))
        assert torch.equal(cache.blocks, before[:, [5, 0, 2, 5, 0, 1]])


def test_cuda_block_copies_are_queued_without_waiting() -> None:
    """The host continues, and its next orders do not change data that the device has yet to read."""
    cache = PagedKVCache(layout("bfloat16"), num_blocks=64, device="cuda")
    mover = BlockMover(cache)
    cache.blocks.random_()
    before = cache.blocks.clone()
    for target in (10, 20):  # whatever the first call of anything waits for
        mover.move(moves(copies=[(0, target)]))
    torch.cuda.synchronize()
    busy = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # cycles: a second
    busy.record()
    for i in range(2):
        mover.move(moves(copies=[(i, 32 + i), (i + 4, 48 + i)]))
    assert not busy.query()
    assert torch.equal(cache.blocks[:, [32, 33, 48, 49]], before[:, [0, 1, 4, 5]])


def test_preempted_request_with_saved_kv_continues_identically() -> None:
    spec = replace(TIGHT, device="cuda", memory_bytes=2 << 30)
    undisturbed, num_saved, _ = generate(assemble(replace(spec, num_blocks=64)))
    assert num_saved == 0
    parts = assemble(spec)
    assert parts.budget.offload_bytes == 0, "the device's budget does not hold the host's memory"
    assert parts.facts()["offload_bytes"] > 0
    assert parts.scheduler.offloading is not None
    assert parts.scheduler.offloading.rates.offload_bytes_per_s > 0.0
    parts.scheduler.offloading.rates = CHEAP_COPY
    saved, num_saved, num_loaded = generate(parts)
    assert num_saved > 0
    assert num_loaded > 0
    assert outputs(saved) == outputs(undisturbed)
