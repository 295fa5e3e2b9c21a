"""A pool on a device, from the engine to the transports."""

from types import SimpleNamespace

import pytest
import torch

from engine.runner.device_queue import HostQueue
from tandem.values.kv_layout import KVLayout
from worker.kv_exchange import pool_region
from worker.kv_exchange.pool_region import region_of

LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=8, block_size=16)
NUM_BLOCKS = 3


def parts() -> SimpleNamespace:
    blocks = torch.zeros(LAYOUT.num_layers, NUM_BLOCKS, LAYOUT.worker_block_bytes // 2, dtype=torch.uint8)
    runner = SimpleNamespace(kv_cache=SimpleNamespace(blocks=blocks, layout=LAYOUT))
    return SimpleNamespace(own_region=lambda: None, layout=LAYOUT, runner=runner)


def test_region_of_device_pool_waits_for_clearing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the clearing queued on the engine's stream would erase what a peer wrote."""
    waited: list[torch.device] = []

    class Late(HostQueue):
        def mark(self) -> SimpleNamespace:
            return SimpleNamespace(wait=lambda: waited.append(torch.device("cpu")))

    monkeypatch.setattr(pool_region, "device_queue", lambda _device: Late())
    found = region_of(parts())
    assert found.num_blocks == NUM_BLOCKS
    assert waited == [torch.device("cpu")]
