"""Cells are cut into chunks: each once, within the bound, as soon as they are ready."""

import random

import pytest

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.chunk_plan import ChunkPlanner, HandoffSize
from kv_transfer.layout.lanes import whole_lane
from kv_transfer.protocol.coverage import Coverage
from tests.support.kv_transfer.plain_worker import layout

SHAPE = HandoffSize(num_layers=6, num_heads=2, unit_layer_bytes=10)


def planner(chunk_bytes: int, shape: HandoffSize = SHAPE) -> ChunkPlanner:
    return ChunkPlanner(shape, chunk_bytes=chunk_bytes)


def cell_range(layers: tuple[int, int], units: tuple[int, int]) -> CellRange:
    """Layers and units from (first) to (end)."""
    return CellRange(
        first_layer=layers[0],
        num_layers=layers[1] - layers[0],
        first_unit=units[0],
        num_units=units[1] - units[0],
        first_head=0,
        num_heads=SHAPE.num_heads,
    )


def test_chunk_plan_units_complete_in_all_layers_are_sent_by_units() -> None:
    plan = planner(120)
    assert plan.plan(5) == [cell_range((0, 6), (0, 2)), cell_range((0, 6), (2, 4)), cell_range((0, 6), (4, 5))]
    assert plan.plan(5) == []
    assert plan.plan(6) == [cell_range((0, 6), (5, 6))]


def test_chunk_plan_step_in_flight_is_sent_by_layer_groups() -> None:
    plan = planner(100)
    assert plan.plan(0, coming=5, num_layers=1) == []
    assert plan.plan(0, coming=5, num_layers=2) == [cell_range((0, 2), (0, 5))]
    assert plan.plan(0, coming=5, num_layers=3) == []
    assert plan.plan(0, coming=5, num_layers=5) == [cell_range((2, 4), (0, 5))]
    assert plan.plan(5) == [cell_range((4, 6), (0, 5))]
    assert plan.plan(5, coming=7, num_layers=5) == [cell_range((0, 5), (5, 7))]
    assert plan.plan(7) == [cell_range((5, 6), (5, 7))]


def test_chunk_plan_oversized_layer_is_split_by_units() -> None:
    plan = planner(25)
    assert plan.plan(0, coming=5, num_layers=1) == [
        cell_range((0, 1), (0, 2)),
        cell_range((0, 1), (2, 4)),
        cell_range((0, 1), (4, 5)),
    ]


def test_chunk_plan_oversized_unit_is_split_by_layers() -> None:
    assert planner(25).plan(1) == [cell_range((0, 2), (0, 1)), cell_range((2, 4), (0, 1)), cell_range((4, 6), (0, 1))]
    assert len(planner(1).plan(2)) == 12


def test_chunk_plan_step_with_reported_layers_is_awaited() -> None:
    plan = planner(100)
    assert plan.plan(0, coming=5, num_layers=2)
    assert plan.plan(3) == [], "it computes five units or nothing"
    assert plan.plan(0, coming=6, num_layers=5) == [], "another step than the one under way"
    assert plan.plan(9) == [
        cell_range((2, 4), (0, 5)),
        cell_range((4, 6), (0, 5)),
        cell_range((0, 6), (5, 6)),
        cell_range((0, 6), (6, 7)),
        cell_range((0, 6), (7, 8)),
        cell_range((0, 6), (8, 9)),
    ]


@pytest.mark.parametrize("seed", range(40))
def test_chunk_plan_any_order_covers_every_cell_once_within_bound(seed: int) -> None:
    """Also of some of the model's layers, and of the last units alone."""
    rng = random.Random(seed)
    chunk_bytes, total = rng.randint(1, 600), rng.randint(1, 30)
    num_layers, model_layers = rng.randint(1, 8), ()
    if seed % 2:
        model_layers = tuple(sorted(rng.sample(range(12), num_layers)))
    shape = HandoffSize(
        num_layers=num_layers,
        num_heads=rng.randint(1, 3),
        unit_layer_bytes=rng.randint(1, 50),
        first_unit=rng.randrange(total) if seed % 3 == 1 else 0,
        model_layers=model_layers,
    )
    lane = whole_lane(layout(heads=shape.num_heads, layers=shape.num_layers))
    plan = planner(chunk_bytes, shape)
    coverage = Coverage(num_units=total, lane=lane, first_unit=shape.first_unit)
    assert coverage.num_cells == (total - shape.first_unit) * shape.num_layers * shape.num_heads
    done = 0

    def land(chunks: list[CellRange]) -> None:
        for cells in chunks:
            num_bytes = cells.num_layers * cells.num_units * shape.unit_layer_bytes
            assert num_bytes <= chunk_bytes or (cells.num_layers, cells.num_units) == (1, 1)
            assert coverage.contains(cells)
            assert not coverage.claimed(cells)
            coverage.claim(cells)
            coverage.land(cells)

    while done < total:
        coming = rng.randint(done + 1, total)
        for computed in range(1, 1 + max(model_layers, default=shape.num_layers - 1)):
            if rng.random() < 0.7:
                land(plan.plan(done, coming=coming, num_layers=computed))
        done = coming
        if rng.random() < 0.8 or done == total:
            land(plan.plan(done))
            assert coverage.num_landed_leading_units() == max(done, shape.first_unit)
    assert coverage.complete
