"""Slots in host memory: equally many on every rank, within the configured sizes and every machine's memory."""

import re

import pytest

from engine.tier_assembly import HostSlots, TierSizes, host_slots
from tandem.errors import ConfigError
from tandem.process.host_memory import HostRoom
from tandem.values.kv_layout import KVLayout

LAYOUT = KVLayout(
    model_fingerprint="m", dtype="float32", num_layers=2, num_kv_heads=4, head_dim=8, block_size=4, tp_size=4
)
BLOCK = LAYOUT.worker_block_bytes
SIZES = TierSizes(offload_bytes=8 * BLOCK, host_cache_bytes=4 * BLOCK + 1)


def test_tier_assembly_counts_blocks_over_all_ranks() -> None:
    slots = host_slots(SIZES, LAYOUT, [HostRoom(12 * BLOCK + 1)])
    assert slots == HostSlots(num_offload=8, num_cache=4)


def test_tier_assembly_machine_holds_only_its_ranks_parts() -> None:
    half = HostRoom(6 * BLOCK + 1)
    assert host_slots(SIZES, LAYOUT, [half, half], num_nodes=2).num_slots == 12
    with pytest.raises(ConfigError, match=rf"host_cache_bytes is {4 * BLOCK + 1}; {4 * BLOCK} bytes of memory are"):
        host_slots(SIZES, LAYOUT, [HostRoom(12 * BLOCK)])


def test_tier_assembly_shortage_names_tier() -> None:
    there = HostRoom(2 * BLOCK, "rank 2 (10.0.0.2)")
    message = (
        f"engine.offload_bytes is {8 * BLOCK}, {4 * BLOCK} of it on each of 2 nodes; "
        f"{2 * BLOCK} bytes of memory are free at rank 2 (10.0.0.2)"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        host_slots(SIZES, LAYOUT, [HostRoom(100 * BLOCK), there], num_nodes=2)
