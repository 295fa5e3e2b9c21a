"""A pool on a device against the same blocks in host memory: packing, landing and checksums."""

import random

import numpy as np
import pytest
import torch

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory import numpy_copy
from kv_transfer.memory.torch_pool import TorchPool
from tandem.errors import TransferError
from tests.support.kv_transfer.plain_worker import PlainWorker, Prompt, layout

TOKENS = 64
PAIRS = [
    (layout(), layout()),
    (layout("int8", block_size=16), layout("int8", block_size=32)),
    (layout(heads=4, block_size=32), layout(heads=4, tp=8)),
    (layout(heads=1, tp=2), layout(heads=1, tp=2, block_size=32)),
]


@pytest.mark.parametrize(("source_layout", "target_layout"), PAIRS)
def test_device_pool_moves_same_bytes_as_host_pool(source_layout, target_layout) -> None:
    rng = np.random.default_rng(3)
    source = PlainWorker(source_layout, pool_blocks=9, num_tokens=TOKENS, rng=rng)
    target = PlainWorker(target_layout, pool_blocks=8, num_tokens=TOKENS, rng=rng)
    prompt = Prompt(source_layout, TOKENS, rng)
    region = source.filled(prompt, 0, TOKENS)
    pairing = Pairing.from_layouts(source_layout, target_layout, wire_dtype=source_layout.dtype)
    cells = CellRange(
        first_layer=0,
        num_layers=source_layout.num_layers,
        first_unit=0,
        num_units=TOKENS // pairing.mapping.unit_tokens,
        first_head=0,
        num_heads=source_layout.num_kv_heads,
    )
    here = pairing.at_source(0, 0, source.at().blocks, 9)
    there = pairing.at_destination(0, target.at().blocks, 8)
    reads, writes = here.reads(cells), there.writes(cells)
    expected = np.empty(reads.num_bytes, np.uint8)
    numpy_copy.gather(reads, region.reshape(-1), expected)
    pool = TorchPool(torch.from_numpy(region.copy().reshape(-1)), source_layout)
    payload = pool.allocate(reads.num_bytes)
    pool.gather(reads, payload)
    assert np.array_equal(payload, expected)
    moved = target.region.copy()
    other = TorchPool(torch.from_numpy(moved.reshape(-1)), target_layout)
    other.scatter(writes, payload)
    other.copy(there.fan_out(cells))
    assert np.array_equal(moved, target.filled(prompt, 0, TOKENS))
    direct = target.region.copy()
    borrowed = TorchPool(torch.from_numpy(direct.reshape(-1)), target_layout)
    total = pool.send(reads, borrowed, writes)
    borrowed.copy(there.fan_out(cells))
    assert np.array_equal(direct, moved)
    assert total == pool.checksum(reads) == borrowed.checksum(writes)


def plain_sum(data: bytes) -> int:
    """sum32 by its definition."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data), 4)]
    return sum(word * (1 + 0x9E3779B2 * i) for i, word in enumerate(words)) % 2**32


def test_torch_pool_checksum_detects_changed_word() -> None:
    rng = random.Random(4)
    kv = layout()
    pool = TorchPool(torch.zeros(kv.worker_block_bytes, dtype=torch.uint8), kv)
    for size in (4, 5, 64, 4096, 70_001):
        data = rng.randbytes(size)
        assert int(pool.sum_of(torch.frombuffer(bytearray(data), dtype=torch.uint8)).item()) % 2**32 == plain_sum(data)
        for _ in range(20):
            bad = bytearray(data)
            at = rng.randrange(size)
            bad[at] ^= 1 << rng.randrange(8)
            assert plain_sum(bytes(bad)) != plain_sum(data)
    swapped = bytes(range(8))
    assert plain_sum(swapped[4:] + swapped[:4]) != plain_sum(swapped), "places count"


def test_torch_pool_invalid_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="not a pool"):
        TorchPool(torch.zeros(100, dtype=torch.uint8), layout())
    kv = layout()
    pool = TorchPool(torch.zeros(kv.worker_block_bytes, dtype=torch.uint8), kv)
    pairing = Pairing.from_layouts(kv, kv, wire_dtype=kv.dtype)
    whole = CellRange(first_layer=0, num_layers=2, first_unit=0, num_units=1, first_head=0, num_heads=2)
    runs = pairing.at_source(0, 0, (0,), 1).reads(whole)
    for move in (pool.gather, pool.scatter):
        with pytest.raises(TransferError, match="payload"):
            move(runs, np.empty(3, np.uint8))
