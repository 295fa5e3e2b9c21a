"""Every pair of tensor-parallel sizes, numbers of heads and block sizes, against plain indexing."""

import random
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from engine.model.config import parse_model_config
from engine.model.parameters import parameter_table
from engine.model.shard import Shard
from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.cells import TokenBlocks
from kv_transfer.layout.mapping import CellMapping
from kv_transfer.memory import numpy_copy
from tandem.errors import TransferError
from tests.support.kv_transfer.plain_worker import PlainWorker, Prompt, cells, layout, splits

TP_SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 3, 4, 8, 16)
BLOCK_SIZES = (16, 32, 64)


def cell_ranges(kv, num_units, rng):
    """`num_units` units of all layers and heads, split at random."""
    cuts = [range(kv.num_layers), range(kv.num_kv_heads), range(num_units)]
    cut = [sorted({r.start, r.stop, *rng.choices(r[1:] or [r.stop], k=rng.choice((0, 0, 1)))}) for r in cuts]
    parts = [list(pairwise(edges)) for edges in cut]
    made = [
        CellRange(
            first_layer=l0, num_layers=l1 - l0, first_head=h0, num_heads=h1 - h0, first_unit=u0, num_units=u1 - u0
        )
        for (l0, l1), (h0, h1), (u0, u1) in product(*parts)
    ]
    rng.shuffle(made)
    return made


def copied(region, copies, source=None):
    """`region` after these copies, from `source` or within itself."""
    target = bytearray(region.tobytes())
    origin = memoryview(target if source is None else source.tobytes())
    view = memoryview(target)
    for begin, end, length in copies:
        view[end : end + length] = bytes(origin[begin : begin + length])
    return np.frombuffer(target, np.uint8).reshape(region.shape)


def marked(region, runs):
    """How often each byte is covered."""
    marks = np.zeros(region.size, np.uint8)
    for offset, length in runs:
        marks[offset : offset + length] += 1
    return marks.reshape(region.shape)


def check(source, target, mapping, cut, prompt, first, end):
    """Both ways to move these cells, together the tokens `[first, end)`."""
    source.region = source.filled(prompt, 0, end)
    expected, touched = target.filled(prompt, first, end), target.touched(first, end)
    held, lacking = source.at(first), target.at(first, first)
    copies = [copy for one in cut for copy in mapping.run_pairs(one, held, lacking)]
    fan_out = [copy for one in cut for copy in mapping.fan_out(one, lacking)]

    landed = copied(target.region, copies, source.region)
    assert np.array_equal(copied(landed, fan_out), expected)
    marks = marked(target.region, [(there, length) for _, there, length in copies + fan_out])
    assert np.array_equal(marks, touched)
    assert marked(source.region, [(here, length) for here, _, length in copies]).max() == 1

    # What one side sends and the other receives without knowing each other's blocks.
    landed, direct = target.region.reshape(-1).copy(), target.region.reshape(-1).copy()
    wire = source.region.tobytes()
    for one in cut:
        reads, writes = (
            mapping.reads(one, source.at(first, first + one.first_unit * mapping.unit_tokens)),
            mapping.writes(one, lacking),
        )
        payload = np.empty(mapping.payload(one).num_bytes(source.kv.dtype), np.uint8)
        numpy_copy.gather(reads, source.region.reshape(-1), payload)
        assert payload.tobytes() == b"".join(wire[offset : offset + length] for offset, length in reads)
        assert payload.nbytes == reads.num_bytes == writes.num_bytes
        numpy_copy.scatter(writes, payload, landed)
        numpy_copy.copy(mapping.run_pairs(one, held, lacking), source.region.reshape(-1), direct)
        for region in (landed, direct):
            numpy_copy.copy(mapping.fan_out(one, lacking), region, region)
    assert np.array_equal(landed, expected.reshape(-1))
    assert np.array_equal(direct, expected.reshape(-1))
    cells = prompt.cells[..., first:end, :].size + prompt.scales[..., first:end, :].size
    assert sum(length for _, _, length in copies) == cells


def prompts(source_size, target_size, rng):
    """(held tokens, all tokens): none or whole blocks of the destination are held; last blocks are full or not."""
    unit = min(source_size, target_size)
    for held, tail in product((0, target_size * rng.choice((1, 2))), (0, rng.randrange(1, 4) * unit)):
        yield held, held // source_size * source_size + source_size * 2 + tail


PAIRS = list(product(TP_SIZES, TP_SIZES))


def check_pair(tp_source, tp_target, seed):
    """All numbers of heads and block sizes; everything else at random. Returns how many prompts it moved."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    moved = 0
    for heads in (h for h in HEADS if splits(tp_source, h) and splits(tp_target, h)):
        for sizes in product(BLOCK_SIZES, BLOCK_SIZES):
            dtype, head_dim = rng.choice(("float32", "bfloat16", "int8", "fp8_e4m3", "int4")), rng.choice((1, 2, 3, 66))
            layers = 9 if heads == 1 and sizes[0] == sizes[1] else rng.choice((1, 2, 3))
            kv = [
                layout(dtype, tp=tp, block_size=size, heads=heads, head_dim=head_dim, layers=layers)
                for tp, size in zip((tp_source, tp_target), sizes, strict=True)
            ]
            mapping = CellMapping(*kv)
            assert mapping.unit_tokens == min(sizes)
            for held, end in prompts(*sizes, rng):
                prompt = Prompt(kv[0], end, noise)
                source, target = (
                    PlainWorker(one, pool_blocks=-(-end // one.block_size) + 2, num_tokens=end, rng=noise) for one in kv
                )
                cut = cell_ranges(kv[0], (end - held) // mapping.unit_tokens, rng)
                check(source, target, mapping, cut, prompt, held, end)
                moved += 1
    return moved


@pytest.mark.parametrize(("tp_source", "tp_target"), PAIRS)
def test_mapping_between_every_pair_of_sizes_moves_each_cell_once(tp_source, tp_target):
    num_heads = 6 if tp_source == tp_target == 1 else 5
    assert check_pair(tp_source, tp_target, tp_source * 10 + tp_target) == num_heads * 9 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("tp_source", "tp_target"), PAIRS)
def test_mapping_between_every_pair_of_sizes_moves_each_cell_once_long(tp_source, tp_target):
    for seed in range(1000, 1020):
        assert check_pair(tp_source, tp_target, seed)


@pytest.mark.parametrize(("tp", "heads"), [p for p in product((1, 2, 3, 4, 6, 8), HEADS) if splits(*p)])
def test_mapping_of_head_names_engine_ranks(tp, heads):
    config = parse_model_config(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 48,
            "num_attention_heads": 48,
            "num_key_value_heads": heads,
            "num_hidden_layers": 1,
            "vocab_size": 48,
            "intermediate_size": 48,
            "head_dim": 2,
        },
        {},
    )
    kv = layout(tp=tp, heads=heads, layers=8)
    mapping = CellMapping(kv, kv)
    at = TokenBlocks(blocks=(0,), pool_blocks=1)
    for head in range(heads):
        one = cells(kv, 0, 1, first_head=head, num_heads=1)
        planes = {offset // kv.layer_block_bytes for offset, _ in mapping.writes(one, at)}
        planes |= {there // kv.layer_block_bytes for _, there, _ in mapping.fan_out(one, at)}
        _, keys, _ = parameter_table(config)["layers.0.qkv.weight"]
        assert keys.name == "model.layers.0.self_attn.k_proj.weight"
        parts = [Shard(config, rank=rank, size=tp).slice(keys) for rank in range(tp)]
        holders = [rank for rank, part in enumerate(parts) if part.begin <= head * 2 < part.end]
        assert planes == {rank * 8 + layer for rank in holders for layer in range(8)}


def test_mapping_joins_runs_of_adjacent_blocks():
    kv = layout(heads=8, tp=4, layers=3)
    mapping = CellMapping(kv, kv)
    here = TokenBlocks(blocks=(4, 5, 6, 9, 8), pool_blocks=10)
    there = TokenBlocks(blocks=(0, 1, 5, 6, 7), pool_blocks=8)
    size, five = kv.layer_block_bytes, cells(kv, 0, 5)
    assert [length // size for _, length in mapping.reads(five, here)] == [3, 1, 1] * 12
    assert [length // size for _, length in mapping.writes(five, there)] == [2, 3] * 12
    assert [length // size for _, _, length in mapping.run_pairs(five, here, there)] == [2, 1, 1, 1] * 12
    assert list(mapping.run_pairs(five, here, here)) == [(o, o, n) for o, n in mapping.reads(five, here)]
    assert len(mapping.run_pairs(five, here, there)) == 48
    quantised = layout("int8", heads=8, head_dim=16, layers=1)
    runs = CellMapping(quantised, quantised).reads(cells(quantised, 0, 5), here)
    assert [length // quantised.layer_block_bytes for _, length in runs] == [3, 1, 1]


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
def test_mapping_runs_of_smaller_blocks_are_whole_blocks(sizes):
    kv = [layout(block_size=size, layers=1) for size in sizes]
    mapping, tables = CellMapping(*kv), [TokenBlocks(blocks=tuple(range(8)), pool_blocks=8)] * 2
    eight = cells(kv[0], 0, 8)
    runs = [list(mapping.reads(eight, tables[0])), list(mapping.writes(eight, tables[1]))]
    small = runs[sizes.index(16)]
    assert small == [(0, 8 * kv[sizes.index(16)].layer_block_bytes)]
    # 4 units of 2 x 2 heads in each of 2 blocks; the last head of V goes on in K's first of the next block.
    assert len(runs[sizes.index(64)]) == 2 * 4 * 4 - 1


def test_mapping_replicas_share_reads_and_writes_by_layer():
    kv = [layout(tp=tp, heads=2, layers=8) for tp in (8, 4)]
    mapping, at = CellMapping(*kv), TokenBlocks(blocks=(0, 1), pool_blocks=2)
    two = cells(kv[0], 0, 2)
    copies, fan_out = mapping.run_pairs(two, at, at), mapping.fan_out(two, at)
    read = [here // copies.source_plane_bytes // 8 for here, _, _ in copies]
    landed = [there // copies.destination_plane_bytes // 8 for _, there, _ in copies]
    assert {read.count(rank) for rank in range(8)} == {2}
    assert {landed.count(rank) for rank in range(4)} == {4}
    assert len(copies) == len(fan_out) == 16
    assert copies.num_bytes == fan_out.num_bytes == 16 * 2 * kv[0].layer_block_bytes
    assert all(here != there and here % 8 == there % 8 for here, there, _ in fan_out.planes)
    single = CellMapping(layout(tp=8, heads=16), layout(heads=16))
    assert len(single.fan_out(cells(layout(heads=16), 0, 2), at)) == 0


def test_mapping_of_cells_outside_is_refused():
    kv = layout(heads=4)
    mapping = CellMapping(kv, kv)
    at = TokenBlocks(blocks=(2, 0, 1), first_block=1, pool_blocks=3)
    assert len(list(mapping.reads(cells(kv, 1, 3), at))) == 4
    for bad in (cells(kv, 0, 1), cells(kv, 0, 4), cells(kv, 1, 4), cells(kv, 4, 1)):
        with pytest.raises(TransferError, match="outside the blocks"):
            mapping.reads(bad, at)
    for blocks in ((0, 3), (0, -1)):
        with pytest.raises(TransferError, match="outside the KV region"):
            mapping.writes(cells(kv, 0, 2), TokenBlocks(blocks=blocks, pool_blocks=3))
    with pytest.raises(TransferError, match="held_tokens 8 is not a multiple of 16"):
        mapping.reads(cells(kv, 1, 1), replace(at, held_tokens=8))
    good = {"first_layer": 0, "num_layers": 2, "first_unit": 1, "num_units": 1, "first_head": 0, "num_heads": 4}
    for wrong in (
        {"first_layer": 1},
        {"first_layer": -1},
        {"num_layers": 0},
        {"first_unit": -1},
        {"num_units": 0},
        {"first_head": 1},
        {"first_head": -1},
        {"num_heads": 0},
        {"num_heads": 5},
    ):
        bad = CellRange(**good | wrong)
        for ask in (mapping.payload, lambda b: mapping.writes(b, at), lambda b: mapping.fan_out(b, at)):
            with pytest.raises(TransferError, match="outside the model"):
                ask(bad)


def test_mapping_of_incompatible_layouts_is_refused():
    with pytest.raises(TransferError, match=r"^head_dim: 4 at the source, 8 at the destination$"):
        CellMapping(layout(), layout(head_dim=8))
    mapping = CellMapping(layout(), layout("int8"))
    assert not mapping.same_dtype
    at = TokenBlocks(blocks=(0,), pool_blocks=1)
    with pytest.raises(TransferError, match="converted, not copied"):
        mapping.run_pairs(cells(layout(), 0, 1), at, at)
    one = cells(layout(), 0, 1)
    vectors = 2 * 2 * 2 * 16
    assert mapping.payload(one).num_vectors == vectors
    assert mapping.reads(one, at).num_bytes == mapping.payload(one).num_bytes("bfloat16") == vectors * 4 * 2
    assert mapping.writes(one, at).num_bytes == mapping.payload(one).num_bytes("int8") == vectors * (4 + 4)


def test_mapping_gather_of_wrong_size_is_refused():
    mapping = CellMapping(layout(), layout())
    at = TokenBlocks(blocks=(1,), pool_blocks=2)
    runs, region = mapping.reads(cells(layout(), 0, 1), at), np.zeros(2 * layout().worker_block_bytes, np.uint8)
    with pytest.raises(TransferError, match="payload of 1023 bytes for cells of 1024"):
        numpy_copy.gather(runs, region, np.zeros(1023, np.uint8))
    with pytest.raises(TransferError, match="payload of 1025 bytes for cells of 1024"):
        numpy_copy.scatter(runs, np.zeros(1025, np.uint8), region)
    with pytest.raises(TransferError, match="region of 2047 bytes is not whole planes of 1024"):
        numpy_copy.gather(runs, region[1:], np.zeros(1024, np.uint8))
