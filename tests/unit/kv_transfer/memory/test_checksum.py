"""Checksums of payload that comes in pieces."""

import random
import zlib

import numpy as np
import pytest
import torch

from kv_transfer.memory import checksum
from kv_transfer.memory.checksum import RunningChecksum, RunningCrc32, RunningSum32
from kv_transfer.memory.torch_pool import TorchPool
from tandem.values.kv_layout import KVLayout

LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=2, block_size=4)
POOL = TorchPool(torch.zeros(LAYOUT.region_block_bytes, dtype=torch.uint8), LAYOUT)


def in_pieces(running: RunningChecksum, data: bytes, cuts: list[int]) -> int:
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        running.add(memoryview(data)[begin:end])
    return running.value


@pytest.mark.parametrize("size", [1, 3, 4, 5, 4096, 70_001])
def test_running_checksum_of_any_pieces_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(checksum, "_SUM32_PART_WORDS", 1000)
    checksum._sum32_weights.cache_clear()
    rng = random.Random(size)
    data = rng.randbytes(size)
    on_device = TorchPool._number(POOL.sum_of(torch.from_numpy(np.frombuffer(data, np.uint8).copy())))
    for num_cuts in (0, 1, 7, 40):
        cuts = sorted(rng.choices(range(size + 1), k=num_cuts))
        assert in_pieces(RunningSum32(), data, cuts) == on_device
        assert in_pieces(RunningCrc32(), data, cuts) == zlib.crc32(data)
    checksum._sum32_weights.cache_clear()


def test_running_sum32_notices_words_that_changed_places() -> None:
    data = bytes(range(64))
    assert in_pieces(RunningSum32(), data, []) != in_pieces(RunningSum32(), data[4:8] + data[:4] + data[8:], [])
