"""Lanes between workers whose pools are in one region or in several, against plain indexing."""

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.cells import TokenBlocks
from kv_transfer.layout.lanes import lanes_between, regions_of_head, whole_lane
from kv_transfer.layout.mapping import CellMapping
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory import numpy_copy
from kv_transfer.memory.cell_addresses import CellAddresses
from kv_transfer.memory.mover import load_mover
from kv_transfer.memory.region import KVRegion
from tandem.errors import TransferError
from tandem.values.ids import NO_BLOCK
from tandem.values.kv_layout import KVLayout
from tests.support.kv_transfer.plain_worker import PlainWorker, Prompt, layout, splits

TP_SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 3, 4, 8, 16)


def pools(tp):
    """How many regions a worker of so many ranks may have."""
    return [count for count in range(1, tp + 1) if tp % count == 0]


def pairs():
    return [
        (here, there, heads, here_regions, there_regions)
        for here, there, heads in product(TP_SIZES, TP_SIZES, HEADS)
        if splits(here, heads) and splits(there, heads)
        for here_regions, there_regions in product(pools(here), pools(there))
    ]


def regions_of(worker: PlainWorker, region: np.ndarray) -> list[np.ndarray]:
    """Views of a worker's whole region, cut into its regions."""
    size = worker.kv.ranks_per_region
    return [region[begin : begin + size].reshape(-1) for begin in range(0, worker.kv.tp_size, size)]


def cut(kv: KVLayout, mapping: CellMapping, num_units: int, rng: random.Random) -> list[CellRange]:
    """The lane's cells in two boxes or more."""
    lane, unit = mapping.lane, rng.randrange(num_units + 1)
    layer, head = rng.randrange(lane.num_layers + 1), rng.randrange(lane.num_heads + 1)
    return [
        CellRange(
            first_layer=lane.first_layer + first_layer,
            num_layers=end_layer - first_layer,
            first_unit=first,
            num_units=end - first,
            first_head=lane.first_head + first_head,
            num_heads=end_head - first_head,
        )
        for (first_layer, end_layer), (first, end), (first_head, end_head) in product(
            ((0, layer), (layer, lane.num_layers)), ((0, unit), (unit, num_units)), ((0, head), (head, lane.num_heads))
        )
        if end_layer > first_layer and end > first and end_head > first_head
    ]


def test_lanes_between_workers_of_one_region_are_one() -> None:
    for tp_source, tp_target in product(TP_SIZES, TP_SIZES):
        kv = layout(tp=tp_source, heads=4, layers=3)
        assert lanes_between(kv, layout(tp=tp_target, heads=4, layers=3)) == (whole_lane(kv),)


@pytest.mark.parametrize("case", random.Random(36).sample(pairs(), 60), ids=str)
def test_lanes_bring_every_byte_to_every_rank_once(case) -> None:
    tp_source, tp_target, heads, source_regions, target_regions = case
    rng, noise = random.Random(repr(case)), np.random.default_rng(abs(hash(case)))
    dtype, sizes = rng.choice(("bfloat16", "int8")), rng.choice(((16, 16), (16, 32), (32, 16)))
    shape = {"dtype": dtype, "heads": heads, "head_dim": rng.choice((1, 3)), "layers": rng.choice((1, 2, 5))}
    here, there = (
        replace(layout(tp=tp, block_size=size, **shape), num_regions=regions)
        for tp, size, regions in ((tp_source, sizes[0], source_regions), (tp_target, sizes[1], target_regions))
    )
    num_units = 64 // min(sizes)
    prompt = Prompt(here, 64, noise)
    source, target = (
        PlainWorker(kv, pool_blocks=64 // kv.block_size + 2, num_tokens=64, rng=noise) for kv in (here, there)
    )
    from_regions = regions_of(source, source.filled(prompt, 0, 64))
    landed, written = target.region.copy(), np.zeros_like(target.region)
    for number, lane in enumerate(lanes_between(here, there)):
        mapping = CellMapping(here, there, lane=number)
        assert mapping.lane == lane
        into, marks = regions_of(target, landed)[lane.destination], regions_of(target, written)[lane.destination]
        for box in cut(here, mapping, num_units, rng):
            reads, writes = mapping.reads(box, source.at()), mapping.writes(box, target.at())
            payload = np.empty(mapping.payload(box).num_bytes(dtype), np.uint8)
            numpy_copy.gather(reads, from_regions[lane.source], payload)
            numpy_copy.scatter(writes, payload, into)
            fan_out = mapping.fan_out(box, target.at())
            numpy_copy.copy(fan_out, into, into)
            for offset, length in writes:
                marks[offset : offset + length] += 1
            for _, offset, length in fan_out:
                marks[offset : offset + length] += 1
    assert np.array_equal(landed, target.filled(prompt, 0, 64))
    assert np.array_equal(written, target.touched(0, 64))


@given(case=st.sampled_from(pairs()), num_layers=st.integers(1, 9))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_lanes_cover_each_region_once_and_share_the_sending(case, num_layers: int) -> None:
    tp_source, tp_target, heads, source_regions, target_regions = case
    here, there = (
        replace(layout(tp=tp, heads=heads, layers=num_layers), num_regions=regions)
        for tp, regions in ((tp_source, source_regions), (tp_target, target_regions))
    )
    lanes = lanes_between(here, there)
    sent = [
        (lane.destination, layer, head)
        for lane in lanes
        for layer in range(lane.first_layer, lane.first_layer + lane.num_layers)
        for head in range(lane.first_head, lane.first_head + lane.num_heads)
    ]
    wanted = {
        (region, layer, head)
        for head in range(heads)
        for region in regions_of_head(there, head)
        for layer in range(num_layers)
    }
    assert sorted(sent) == sorted(wanted)
    for lane in lanes:
        for head in range(lane.first_head, lane.first_head + lane.num_heads):
            assert lane.source in regions_of_head(here, head)
    if num_layers >= tp_source:
        assert {lane.source for lane in lanes} == set(range(source_regions)), "a region that sends nothing"
    if heads % max(tp_source, tp_target) == 0:
        assert len(lanes) == max(source_regions, target_regions) or source_regions == 1 or target_regions == 1


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 2), (2, 4), (4, 2)])
def test_lanes_between_private_ranks_without_replicas_join_those_that_share_heads(here: int, there: int) -> None:
    source, target = (replace(layout(tp=tp, heads=8), num_regions=tp) for tp in (here, there))
    share = 8 // max(here, there)
    assert [(x.source, x.destination, x.first_head, x.num_heads) for x in lanes_between(source, target)] == [
        (head * here // 8, head * there // 8, head, share) for head in range(0, 8, share)
    ]


class GroupedWorker:
    """A worker whose windowed layers are kept apart: one PlainWorker for each group, all over one region of noise."""

    def __init__(self, kv: KVLayout, *, pool_blocks: int, num_tokens: int, rng: np.random.Generator) -> None:
        planes = replace(kv, num_layers=kv.planes_per_rank, windowed_layers=(), window=0)
        self.kv = kv
        self.groups = [PlainWorker(planes, pool_blocks=pool_blocks, num_tokens=num_tokens, rng=rng) for _ in kv.groups]
        self.region = self.groups[0].region
        order = [int(block) for block in rng.permutation(pool_blocks)]
        for group in self.groups:
            group.blocks, order = order[: len(group.blocks)], order[len(group.blocks) :]

    def first_block(self, group: int, num_tokens: int) -> int:
        """First token block whose layers of the group are sent."""
        return self.kv.first_window_block(num_tokens) if group else 0

    def at(self, group: int, num_tokens: int) -> TokenBlocks:
        """The blocks of a group, without those before the window."""
        first, worker = self.first_block(group, num_tokens), self.groups[group]
        blocks = (*[NO_BLOCK] * first, *worker.blocks[first:])
        return TokenBlocks(blocks=blocks, pool_blocks=self.region.shape[2])

    def fill(self, region: np.ndarray, prompt: Prompt, num_tokens: int) -> None:
        """Put all layers' tokens, from where they are sent on, into a copy of the region."""
        for number, (layers, worker) in enumerate(zip(self.kv.groups, self.groups, strict=True)):
            first = self.first_block(number, num_tokens) * self.kv.block_size
            parts = prompt.cells[list(layers)], prompt.scales[list(layers)]
            worker.put(region[:, : len(layers)], *parts, first, num_tokens)


@pytest.mark.parametrize("windowed", [(0, 2, 3), (0, 1, 2, 4), (3,)], ids=str)
@pytest.mark.parametrize("case", [(1, 1, 1, 1), (2, 4, 1, 1), (4, 2, 4, 2), (4, 1, 1, 1), (2, 4, 2, 4)], ids=str)
def test_lanes_of_groups_bring_every_layer_into_its_own_blocks(case, windowed) -> None:
    tp_source, tp_target, source_regions, target_regions = case
    rng = np.random.default_rng(len(windowed))
    here, there = (
        replace(layout("int8", tp=tp, heads=2, layers=5), num_regions=regions, windowed_layers=windowed, window=20)
        for tp, regions in ((tp_source, source_regions), (tp_target, target_regions))
    )
    prompt, num_tokens = Prompt(here, 70, rng), 70
    source, target = (GroupedWorker(kv, pool_blocks=30, num_tokens=num_tokens, rng=rng) for kv in (here, there))
    filled, landed, expected = source.region.copy(), target.region.copy(), target.region.copy()
    source.fill(filled, prompt, num_tokens)
    target.fill(expected, prompt, num_tokens)
    for number, lane in enumerate(lanes_between(here, there)):
        mapping, first = CellMapping(here, there, lane=number), source.first_block(lane.group, num_tokens)
        assert first == (2 if lane.group else 0)
        assert {here.layer_order[lane.first_layer + i] in windowed for i in range(lane.num_layers)} == {lane.group > 0}
        box = CellRange(
            first_layer=lane.first_layer,
            num_layers=lane.num_layers,
            first_unit=first,
            num_units=5 - first,
            first_head=lane.first_head,
            num_heads=lane.num_heads,
        )
        reads = mapping.reads(box, source.at(lane.group, num_tokens))
        writes = mapping.writes(box, target.at(lane.group, num_tokens))
        payload = np.empty(mapping.payload(box).num_bytes("int8"), np.uint8)
        into = regions_of(target.groups[0], landed)[lane.destination]
        numpy_copy.gather(reads, regions_of(source.groups[0], filled)[lane.source], payload)
        numpy_copy.scatter(writes, payload, into)
        numpy_copy.copy(mapping.fan_out(box, target.at(lane.group, num_tokens)), into, into)
        if lane.group:
            with pytest.raises(TransferError, match="outside the KV region"):
                mapping.writes(replace(box, first_unit=first - 1), target.at(lane.group, num_tokens))
    # Whole blocks: the last one's empty slots are whatever the sender has there.
    tail = [group.blocks[-1] for group in target.groups]
    kept = np.delete(np.arange(landed.shape[2]), tail)
    assert np.array_equal(landed[:, :, kept], expected[:, :, kept])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"windowed_layers": (0,), "window": 20}, r"^windowed_layers: \(\) at the source"),
        ({"windowed_layers": (1,), "window": 20}, "^windowed_layers: "),
    ],
)
def test_groups_that_differ_are_refused(changes, match) -> None:
    with pytest.raises(TransferError, match=match):
        Pairing.from_layouts(layout(), replace(layout(), **changes), wire_dtype="bfloat16")
    apart = replace(layout(), windowed_layers=(0,), window=20)
    for other, named in ((replace(apart, window=21), "window"), (replace(apart, block_size=32), "block_size")):
        with pytest.raises(TransferError, match=f"^{named}: "):
            Pairing.from_layouts(apart, other, wire_dtype="bfloat16")


def test_lane_has_no_cells_of_another() -> None:
    kv = replace(layout(tp=2, heads=4, layers=3), num_regions=2)
    mapping, at = CellMapping(kv, kv, lane=1), TokenBlocks(blocks=(0,), pool_blocks=1)
    good = CellRange(first_layer=0, num_layers=3, first_unit=0, num_units=1, first_head=2, num_heads=2)
    assert mapping.writes(good, at).num_bytes == kv.block_bytes
    for bad in (replace(good, first_head=1), replace(good, num_heads=3), replace(good, first_head=0, num_heads=4)):
        for ask in (mapping.payload, lambda box: mapping.writes(box, at), lambda box: mapping.reads(box, at)):
            with pytest.raises(TransferError, match="outside the model"):
                ask(bad)
        with pytest.raises(TransferError, match="outside the model"):
            mapping.destination_table(bad.first_head, bad.num_heads)
    with pytest.raises(TransferError, match="lane 2 of 2"):
        CellMapping(kv, kv, lane=2)


def test_lane_of_a_band_of_layers_has_no_other_layers() -> None:
    source = replace(layout(tp=4, heads=2, layers=5), num_regions=4)
    mapping = CellMapping(source, layout(heads=2, layers=5), lane=1)
    assert (mapping.lane.first_layer, mapping.lane.num_layers, mapping.lane.source) == (2, 3, 1)
    box = CellRange(first_layer=2, num_layers=3, first_unit=0, num_units=1, first_head=0, num_heads=1)
    at = TokenBlocks(blocks=(0,), pool_blocks=1)
    assert mapping.reads(box, at).num_layers == 3
    with pytest.raises(TransferError, match="outside the model"):
        mapping.reads(replace(box, first_layer=1), at)


def test_regions_that_do_not_divide_the_ranks_are_refused() -> None:
    bad = replace(layout(tp=4, heads=4), num_regions=3)
    with pytest.raises(TransferError, match=r"^num_regions: 3 at the source does not divide 4 ranks$"):
        Pairing.from_layouts(bad, layout(heads=4), wire_dtype="bfloat16")


def test_compiled_mover_moves_a_lane_between_private_regions() -> None:
    """As numpy does, from the table of one lane to that of the other side."""
    mover = load_mover()
    if mover is None:
        pytest.skip("no compiler")
    noise = np.random.default_rng(3)
    here, there = (replace(layout(tp=tp, heads=4, layers=3), num_regions=tp) for tp in (2, 4))
    prompt = Prompt(here, 48, noise)
    source, target = (PlainWorker(kv, pool_blocks=5, num_tokens=48, rng=noise) for kv in (here, there))
    filled, landed = source.filled(prompt, 0, 48), target.region.copy()
    for number, lane in enumerate(lanes_between(here, there)):
        pairing = Pairing.from_layouts(here, there, wire_dtype="bfloat16", lane=number)
        box = CellRange(
            first_layer=0,
            num_layers=3,
            first_unit=0,
            num_units=3,
            first_head=lane.first_head,
            num_heads=lane.num_heads,
        )
        mine, theirs = (
            np.ascontiguousarray(regions_of(worker, whole)[number_of])
            for worker, whole, number_of in ((source, filled, lane.source), (target, landed, lane.destination))
        )
        regions = [KVRegion.from_buffer(memoryview(part), kv) for part, kv in ((mine, here), (theirs, there))]
        placed = (
            pairing.at_source(0, 0, tuple(source.blocks), regions[0].num_blocks),
            pairing.at_destination(0, tuple(target.blocks), regions[1].num_blocks),
        )
        payload = pairing.mapping.payload(box)
        assert payload.num_bytes("bfloat16") == 3 * 3 * pairing.unit_layer_bytes
        addresses = [
            CellAddresses(region, one, is_source=index == 0)
            for index, (region, one) in enumerate(zip(regions, placed, strict=True))
        ]
        checksums = {mover.checksum(addresses[0], box)}
        numpy_copy.copy(placed[0].run_pairs_to(placed[1], box), mine, theirs)
        checksums.add(mover.checksum(addresses[1], box))
        assert len(checksums) == 1
        regions_of(target, landed)[lane.destination][:] = theirs
    assert np.array_equal(landed, target.filled(prompt, 0, 48))
