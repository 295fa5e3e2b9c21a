"""Messages between ranks survive JSON; a shared pool has the planes that a hand-off expects."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.distributed.ranks.messages import PoolPlan, RankFacts, RankSetup, combine_facts
from engine.kv_storage.paged_cache import PagedKVCache
from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.region import KVRegion
from tandem.process.host_memory import HostRoom
from tandem.values.ids import BlockId
from tandem.values.kv_layout import KVLayout

SETUP = RankSetup(
    rank=0,
    size=4,
    model_path=Path("/models/some"),
    backend=BackendOptions(device=torch.device("cpu"), dtype="bfloat16", deterministic=True, num_threads=3),
    log_level="INFO",
    timeout_s=1.5,
)
LAYOUT = KVLayout(
    model_fingerprint="m", dtype="float32", num_layers=3, num_kv_heads=4, head_dim=8, block_size=4, tp_size=2
)


def test_rank_messages_round_trip_json() -> None:
    facts = RankFacts(weights_bytes=2**40, fingerprint="f", room=HostRoom(7, "10.0.0.2"))
    plan = PoolPlan(layout=replace(LAYOUT, tp_rank=1), num_blocks=9, num_host_slots=3)
    for value in (SETUP, replace(SETUP, gpus=(3, 1), gpu_sharers=2, configured_bytes=5), facts, plan):
        assert type(value).from_json(memoryview(value.to_json())) == value


def test_rank_setup_gives_each_rank_its_gpu() -> None:
    assert SETUP.of_rank(3) == replace(SETUP, rank=3)
    on_gpu = replace(SETUP, backend=replace(SETUP.backend, device=torch.device("cuda")))
    there = RankSetup.from_json(memoryview(on_gpu.of_rank(3).to_json()))
    assert (there.rank, there.backend.device) == (3, torch.device("cuda", 3))


def test_rank_on_another_machine_uses_its_threads() -> None:
    def split_eight(wanted: int | None, num_sharers: int) -> int:
        return wanted or 8 // num_sharers

    over_nodes = replace(SETUP, num_nodes=2, num_sharers=2)
    assert over_nodes.of_rank(1).on_own_machine(split_eight) == SETUP.backend, "rank 0 has counted for both"
    there = over_nodes.of_rank(2).on_own_machine(split_eight)
    assert there == replace(SETUP.backend, num_threads=4, binds_threads=False)
    alone = replace(over_nodes, num_sharers=1).of_rank(3).on_own_machine(split_eight)
    assert (alone.num_threads, alone.binds_threads) == (8, True)
    assert replace(over_nodes, num_threads=5).of_rank(2).on_own_machine(split_eight).num_threads == 5


def test_memory_shortage_names_smallest_machine() -> None:
    own = RankFacts(weights_bytes=5, fingerprint="f")
    beside = RankFacts(weights_bytes=7, fingerprint="f")
    there = [
        RankFacts(weights_bytes=6, fingerprint="f", limit_bytes=limit, room=HostRoom(room, host))
        for limit, room, host in ((90, 40, "10.0.0.2"), (80, 30, "10.0.0.2"), (70, 50, "10.0.0.3"))
    ]
    assert combine_facts([own, beside]) == replace(own, weights_bytes=7)
    limits = combine_facts([own, beside, *there])
    assert limits == replace(own, weights_bytes=7, limit_bytes=70, room=HostRoom(30, "rank 3 (10.0.0.2)"))


@pytest.mark.parametrize(
    ("num_kv_heads", "found"),
    [(4, [1, 1, 2, 2, 1, 10, 2, 20, 1, 1, 2, 2]), (1, [1, 1, 2, 20, 1, 1])],
    ids=["split", "replicated: a layer from one rank, the next from the other"],
)
def test_shared_pool_has_layers_of_every_rank(num_kv_heads: int, found: list[float]) -> None:
    layout, num_blocks = replace(LAYOUT, num_kv_heads=num_kv_heads), 5
    plan = PoolPlan(layout=layout, num_blocks=num_blocks)
    memory = memoryview(bytearray(plan.rank_bytes * layout.tp_size))
    region = KVRegion.from_buffer(memory, layout)
    assert region.num_blocks == num_blocks
    for rank in range(layout.tp_size):
        part = memory[rank * plan.rank_bytes :][: plan.rank_bytes]
        PagedKVCache(replace(layout, tp_rank=rank), num_blocks=num_blocks, buffer=part).tensor.fill_(rank + 1)
        cache = torch.frombuffer(part, dtype=torch.float32).view(3, num_blocks, 2, layout.num_local_kv_heads, 4, 8)
        cache[1, 4] = 10.0 * (rank + 1)
    cells = CellRange(first_layer=0, num_layers=3, first_unit=0, num_units=2, first_head=0, num_heads=num_kv_heads)
    pairing = Pairing.from_layouts(layout, layout, wire_dtype=layout.dtype)
    source = pairing.at_source(0, 0, (BlockId(0), BlockId(4)), num_blocks)
    views = [torch.frombuffer(view, dtype=torch.float32) for view in region.views(source.reads(cells))]
    assert [float(view[0]) for view in views] == found
    assert all(bool((view == view[0]).all()) for view in views)
