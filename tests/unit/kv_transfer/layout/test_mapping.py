"""Every pair of tensor-parallel sizes, numbers of heads and block sizes, against plain indexing."""

import random
from itertools import pairwise, product

import numpy as np
import pytest

from engine.model.config import parse_model_config
from engine.model.shard import Shard
from kv_transfer.layout.cells import KVSlice, TokenBlocks
from kv_transfer.layout.mapping import CellMapping
from kv_transfer.memory import numpy_copy
from tandem.errors import TransferError
from tests.support.kv_transfer.plain_worker import PlainWorker, Prompt, layout, splits

TP_SIZES = (1, 2, 4, 8)
HEADS = (1, 2, 3, 4, 8, 16)
BLOCK_SIZES = (16, 32, 64)


def boxes(mapping, first, end, kv, rng):
    """The tokens `[first, end)` of all layers and heads as boxes, cut at random."""
    cuts = [range(kv.num_layers), range(kv.num_kv_heads), range(first, end)]
    cut = [sorted({r.start, r.stop, *rng.choices(r[1:] or [r.stop], k=rng.choice((0, 0, 1)))}) for r in cuts]
    parts = [list(pairwise(edges)) for edges in cut]
    made = [
        KVSlice(
            first_layer=l0, num_layers=l1 - l0, first_head=h0, num_heads=h1 - h0, first_token=t0, num_tokens=t1 - t0
        )
        for (l0, l1), (h0, h1), (t0, t1) in product(*parts)
    ]
    if len(made) == 1:
        assert made[0] == mapping.box(first, end - first)
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
    """How often each byte is named."""
    marks = np.zeros(region.size, np.uint8)
    for offset, length in runs:
        marks[offset : offset + length] += 1
    return marks.reshape(region.shape)


def check(source, target, mapping, cut, prompt, first, end):
    """Both ways to move these boxes, together the tokens `[first, end)`."""
    source.region = source.filled(prompt, 0, end)
    expected, touched = target.filled(prompt, first, end), target.touched(first, end)
    held, lacking = source.at(), target.at(first)
    copies = [copy for box in cut for copy in mapping.copies(box, held, lacking)]
    fan_out = [copy for box in cut for copy in mapping.fan_out(box, lacking)]

    landed = copied(target.region, copies, source.region)
    assert np.array_equal(copied(landed, fan_out), expected)
    marks = marked(target.region, [(there, length) for _, there, length in copies + fan_out])
    assert np.array_equal(marks, touched)
    assert marked(source.region, [(here, length) for here, _, length in copies]).max() == 1

    # What one side sends and the other receives without knowing each other's blocks.
    landed, direct = target.region.reshape(-1).copy(), target.region.reshape(-1).copy()
    wire = source.region.tobytes()
    for box in cut:
        reads, writes = mapping.reads(box, source.at(box.first_token)), mapping.writes(box, lacking)
        payload = np.empty(mapping.payload(box).num_bytes(source.kv.dtype), np.uint8)
        numpy_copy.gather(reads, source.region.reshape(-1), payload)
        assert payload.tobytes() == b"".join(wire[offset : offset + length] for offset, length in reads)
        assert payload.nbytes == reads.num_bytes == writes.num_bytes
        numpy_copy.scatter(writes, payload, landed)
        numpy_copy.copy(mapping.copies(box, held, lacking), source.region.reshape(-1), direct)
        for region in (landed, direct):
            numpy_copy.copy(mapping.fan_out(box, lacking), region, region)
    assert np.array_equal(landed, expected.reshape(-1))
    assert np.array_equal(direct, expected.reshape(-1))
    cells = prompt.cells[..., first:end, :].size + (source.kv.dtype == "int8") * prompt.scales[..., first:end, :].size
    assert sum(length for _, _, length in copies) == cells


def prompts(source_size, target_size, rng):
    """(held tokens, all tokens): none or whole blocks of the destination are held; last blocks are full or not."""
    for held, tail in product(
        (0, target_size * rng.choice((1, 2))), (0, rng.randrange(1, min(source_size, target_size)))
    ):
        end = held // source_size * source_size + source_size * 2 + tail
        yield held, end if rng.random() < 0.7 else -(-end // 16) * 16


PAIRS = list(product(TP_SIZES, TP_SIZES))


def check_pair(tp_source, tp_target, seed):
    """All numbers of heads and block sizes; everything else at random. Returns how many prompts it moved."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    moved = 0
    for heads in (h for h in HEADS if splits(tp_source, h) and splits(tp_target, h)):
        for sizes in product(BLOCK_SIZES, BLOCK_SIZES):
            dtype, head_dim = rng.choice(("float32", "bfloat16", "int8", "fp8_e4m3")), rng.choice((1, 2, 3))
            layers = 9 if heads == 1 and sizes[0] == sizes[1] else rng.choice((1, 2, 3))
            kv = [
                layout(dtype, tp=tp, block_size=size, heads=heads, head_dim=head_dim, layers=layers)
                for tp, size in zip((tp_source, tp_target), sizes, strict=True)
            ]
            mapping = CellMapping(*kv)
            assert mapping.unit == min(sizes)
            for held, end in prompts(*sizes, rng):
                prompt = Prompt(kv[0], end, noise)
                source, target = (
                    PlainWorker(one, pool_blocks=-(-end // one.block_size) + 2, num_tokens=end, rng=noise) for one in kv
                )
                check(source, target, mapping, boxes(mapping, held, end, kv[0], rng), prompt, held, end)
                moved += 1
    return moved


@pytest.mark.parametrize(("tp_source", "tp_target"), PAIRS)
def test_every_pair_of_workers(tp_source, tp_target):
    num_heads = 6 if tp_source == tp_target == 1 else 5
    assert check_pair(tp_source, tp_target, tp_source * 10 + tp_target) == num_heads * 9 * 4


@pytest.mark.slow
@pytest.mark.parametrize(("tp_source", "tp_target"), PAIRS)
def test_every_pair_of_workers_again_and_again(tp_source, tp_target):
    for seed in range(1000, 1020):
        assert check_pair(tp_source, tp_target, seed)


@pytest.mark.parametrize(("tp", "heads"), [p for p in product((1, 2, 3, 4, 6, 8), HEADS) if splits(*p)])
def test_heads_lie_where_the_engine_shards_them(tp, heads):
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
        box = KVSlice(first_layer=0, num_layers=8, first_token=0, num_tokens=16, first_head=head, num_heads=1)
        planes = {offset // kv.layer_block_bytes for offset, _ in mapping.writes(box, at)}
        planes |= {there // kv.layer_block_bytes for _, there, _ in mapping.fan_out(box, at)}
        parts = [Shard(config, rank=rank, size=tp).part("model.layers.0.self_attn.k_proj.weight") for rank in range(tp)]
        holders = [rank for rank, part in enumerate(parts) if part.begin <= head * 2 < part.end]
        assert planes == {rank * 8 + layer for rank in holders for layer in range(8)}


def test_adjacent_blocks_are_one_run():
    kv = layout(heads=8, tp=4, layers=3)
    mapping = CellMapping(kv, kv)
    here = TokenBlocks(blocks=(4, 5, 6, 9, 8), pool_blocks=10)
    there = TokenBlocks(blocks=(0, 1, 5, 6, 7), pool_blocks=8)
    size, box = kv.layer_block_bytes, mapping.box(0, 80)
    assert [length // size for _, length in mapping.reads(box, here)] == [3, 1, 1] * 12
    assert [length // size for _, length in mapping.writes(box, there)] == [2, 3] * 12
    assert [length // size for _, _, length in mapping.copies(box, here, there)] == [2, 1, 1, 1] * 12
    assert list(mapping.copies(box, here, here)) == [(o, o, n) for o, n in mapping.reads(box, here)]
    assert len(mapping.copies(box, here, there)) == 48
    quantised = layout("int8", heads=8, head_dim=16, layers=1)
    runs = CellMapping(quantised, quantised).reads(mapping.box(0, 80, 0, 1), here)
    assert [length // quantised.layer_block_bytes for _, length in runs] == [3, 1, 1]


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16)])
def test_the_side_of_smaller_blocks_has_whole_ones(sizes):
    kv = [layout(block_size=size, layers=1) for size in sizes]
    mapping, tables = CellMapping(*kv), [TokenBlocks(blocks=tuple(range(8)), pool_blocks=8)] * 2
    runs = [list(mapping.reads(mapping.box(0, 128), tables[0])), list(mapping.writes(mapping.box(0, 128), tables[1]))]
    small = runs[sizes.index(16)]
    assert small == [(0, 8 * kv[sizes.index(16)].layer_block_bytes)]
    # 4 units of 2 x 2 heads in each of 2 blocks; the last head of V goes on in K's first of the next block.
    assert len(runs[sizes.index(64)]) == 2 * 4 * 4 - 1


def test_replicas_share_the_reading_and_the_landing():
    kv = [layout(tp=tp, heads=2, layers=8) for tp in (8, 4)]
    mapping, at = CellMapping(*kv), TokenBlocks(blocks=(0, 1), pool_blocks=2)
    copies, fan_out = mapping.copies(mapping.box(0, 32), at, at), mapping.fan_out(mapping.box(0, 32), at)
    read = [here // copies.source_plane_bytes // 8 for here, _, _ in copies]
    landed = [there // copies.destination_plane_bytes // 8 for _, there, _ in copies]
    assert {read.count(rank) for rank in range(8)} == {2}
    assert {landed.count(rank) for rank in range(4)} == {4}
    assert len(copies) == len(fan_out) == 16
    assert copies.num_bytes == fan_out.num_bytes == 16 * 2 * kv[0].layer_block_bytes
    assert all(here != there and here % 8 == there % 8 for here, there, _ in fan_out.lanes)
    single = CellMapping(layout(tp=8, heads=16), layout(heads=16))
    assert len(single.fan_out(single.box(0, 32), at)) == 0


def test_what_is_outside_is_refused():
    kv = layout(heads=4)
    mapping = CellMapping(kv, kv)
    at = TokenBlocks(blocks=(2, 0, 1), first_block=1, pool_blocks=3)
    assert len(list(mapping.reads(mapping.box(16, 48), at))) == 4
    for bad in (mapping.box(15, 2), mapping.box(16, 49), mapping.box(0, 64), mapping.box(64, 1)):
        with pytest.raises(TransferError, match="outside the blocks"):
            mapping.reads(bad, at)
    for blocks in ((0, 3), (0, -1)):
        with pytest.raises(TransferError, match="outside the KV region"):
            mapping.writes(mapping.box(0, 32), TokenBlocks(blocks=blocks, pool_blocks=3))
    good = {"first_layer": 0, "num_layers": 2, "first_token": 16, "num_tokens": 4, "first_head": 0, "num_heads": 4}
    for wrong in (
        {"first_layer": 1},
        {"first_layer": -1},
        {"num_layers": 0},
        {"first_token": -16},
        {"num_tokens": 0},
        {"first_head": 1},
        {"first_head": -1},
        {"num_heads": 0},
        {"num_heads": 5},
    ):
        box = KVSlice(**good | wrong)
        for ask in (mapping.payload, lambda b: mapping.writes(b, at), lambda b: mapping.fan_out(b, at)):
            with pytest.raises(TransferError, match="outside the model"):
                ask(box)


def test_layouts_that_cannot_be_mapped_are_refused():
    with pytest.raises(TransferError, match=r"^head_dim: 4 at the source, 8 at the destination$"):
        CellMapping(layout(), layout(head_dim=8))
    mapping = CellMapping(layout(), layout("int8"))
    assert not mapping.same_dtype
    at = TokenBlocks(blocks=(0,), pool_blocks=1)
    with pytest.raises(TransferError, match="converted, not copied"):
        mapping.copies(mapping.box(0, 16), at, at)
    box = mapping.box(3, 9)
    vectors = 2 * 2 * 2 * 9
    assert mapping.payload(box).num_vectors == vectors
    assert mapping.reads(box, at).num_bytes == mapping.payload(box).num_bytes("bfloat16") == vectors * 4 * 2
    assert mapping.writes(box, at).num_bytes == mapping.payload(box).num_bytes("int8") == vectors * (4 + 4)


def test_arrays_of_another_size_are_refused():
    mapping = CellMapping(layout(), layout())
    at = TokenBlocks(blocks=(1,), pool_blocks=2)
    runs, region = mapping.reads(mapping.box(0, 16), at), np.zeros(2 * layout().worker_block_bytes, np.uint8)
    with pytest.raises(TransferError, match="payload of 1023 bytes for cells of 1024"):
        numpy_copy.gather(runs, region, np.zeros(1023, np.uint8))
    with pytest.raises(TransferError, match="payload of 1025 bytes for cells of 1024"):
        numpy_copy.scatter(runs, np.zeros(1025, np.uint8), region)
    with pytest.raises(TransferError, match="region of 2047 bytes is not whole planes of 1024"):
        numpy_copy.gather(runs, region[1:], np.zeros(1024, np.uint8))
