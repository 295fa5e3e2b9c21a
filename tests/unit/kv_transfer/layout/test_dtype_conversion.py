"""Converted payloads equal the engine's own codes, bit for bit."""

from itertools import product

import numpy as np
import pytest
import torch

from engine.kv_storage.kv_codes import group_codes, head_codes, restored, token_codes
from engine.kv_storage.paged_cache import CACHE_DTYPES, TORCH_DTYPES, PagedKVCache
from engine.model.layers.kv_pages import CodePages, PlainPages
from kv_transfer.layout import dtype_conversion
from kv_transfer.layout.cells import TokenBlocks
from kv_transfer.layout.dtype_conversion import Converter
from kv_transfer.layout.mapping import CellMapping, vector_bytes
from kv_transfer.memory import numpy_copy
from tandem.errors import TransferError
from tandem.values.kv_agreement import CONVERSIONS
from tandem.values.kv_layout import QUANTISED_DTYPES
from tests.support.kv_transfer.plain_worker import cells, layout

PLAIN = tuple(TORCH_DTYPES)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().reshape(-1).copy()


def converted(data, source, target, *, num_vectors, head_dim, head_scales=None):
    """A payload of one layer and one head: `num_vectors` of K, then as many of V."""
    num_tokens = num_vectors // 2
    kv = [layout(dtype, heads=1, layers=1, head_dim=head_dim, block_size=num_tokens) for dtype in (source, target)]
    mapping = CellMapping(*kv)
    payload = mapping.payload(cells(kv[0], 0, 1))
    out = np.zeros(payload.num_bytes(target), np.uint8)
    Converter(source, target, head_scales=head_scales).convert(payload, data, out)
    return out


def every_16_bits(dtype):
    """All finite values of a dtype of 16 bits."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(TORCH_DTYPES[dtype])
    return torch.where(values.isfinite(), values, 0)


def edge_case_floats(seed):
    """float32 of all magnitudes; around the middles between codes of e4m3 and beyond their bounds."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 17,), generator=generator).to(torch.int32).view(torch.float32)
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    near = torch.cat([codes, middles, torch.tensor([447.9, 448, 463.9, 464, 464.1, 480, 1e30])]).view(torch.int32)
    near = torch.cat([near + shift for shift in (-65537, -65536, -1, 0, 1, 255, 65536)]).view(torch.float32)
    values = torch.cat([bits, near, -near])
    values = torch.where(values.isfinite(), values, 1.0)
    return values[: values.numel() // 256 * 256]


def values_of(dtype, seed=0):
    return edge_case_floats(seed) if dtype == "float32" else every_16_bits(dtype)


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("scale", [None, 1.0, 0.037, 3e-39, 1e20])
def test_conversion_to_fp8_equals_engine(dtype, scale):
    values = values_of(dtype).view(-1, 64)
    made = converted(
        as_bytes(values),
        dtype,
        "fp8_e4m3",
        num_vectors=len(values),
        head_dim=64,
        head_scales=None if scale is None else np.full((1, 2, 1), scale, np.float32),
    )
    expected = head_codes(values, torch.tensor(1.0 if scale is None else scale, dtype=torch.float32))
    assert np.array_equal(made, as_bytes(expected))


def vectors_of_all_kinds(dtype, head_dim):
    """Finite vectors of mixed and of like magnitudes, and of peaks about the least that counts."""
    generator = torch.Generator().manual_seed(head_dim)
    flat = values_of(dtype, head_dim)
    mixed = flat[torch.randperm(flat.numel(), generator=generator)]
    spread = torch.randn(1 << 14, generator=generator) * torch.logspace(-37, 37, 1 << 14)
    peaks = torch.tensor([0.0, -0.0, 1e-45, 9.99e-31, 1e-30, 1.0000001e-30, 1.01e-30, 1e-38, 127.5, 63.5]).repeat(128)
    values = torch.cat([mixed, spread, -peaks]).clamp(-3e38, 3e38).to(TORCH_DTYPES[dtype])
    return torch.where(values.isfinite(), values, 1)[: values.numel() // 768 * 768].view(-1, head_dim)


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("head_dim", [1, 4, 64, 128])
def test_conversion_to_int8_equals_engine(dtype, head_dim):
    values = vectors_of_all_kinds(dtype, head_dim)
    codes, scales = token_codes(values)
    made = converted(as_bytes(values), dtype, "int8", num_vectors=len(values), head_dim=head_dim)
    assert np.array_equal(made[: values.numel()], as_bytes(codes))
    assert np.array_equal(made[values.numel() :], as_bytes(scales))


@pytest.mark.parametrize("dtype", PLAIN)
@pytest.mark.parametrize("head_dim", [2, 64, 96, 128])
def test_conversion_int4_equals_engine_both_ways(dtype, head_dim):
    values = vectors_of_all_kinds(dtype, head_dim)
    values[1::2] = values[1::2] / 64 + values[1::2, :1]  # far from zero, near each other
    values = torch.where(values.isfinite(), values, 1)
    codes, scales = group_codes(values)
    expected = np.concatenate([as_bytes(codes), as_bytes(scales)])
    made = converted(as_bytes(values), dtype, "int4", num_vectors=len(values), head_dim=head_dim)
    # The wire has codes before scales for each of K and V together: one unit, so all codes come first.
    assert np.array_equal(made, expected)
    back = converted(expected, "int4", dtype, num_vectors=len(values), head_dim=head_dim)
    assert np.array_equal(back, as_bytes(restored(codes, scales, TORCH_DTYPES[dtype])))


@pytest.mark.parametrize("dtype", PLAIN)
def test_conversion_restored_values_equal_engine(dtype):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).repeat(64).view(-1, 32)
    scales = torch.logspace(-8, 3, len(codes))
    scales[::4] = torch.tensor([3.0, 5.0, 33.0, 513.0]).repeat(len(codes) // 16)  # ties of bfloat16 and float16
    for held, given in (("int8", codes.view(torch.int8)), ("fp8_e4m3", codes.view(torch.float8_e4m3fn))):
        finite = given.float().isfinite().all()
        if not finite:
            given = torch.where(codes & 127 == 127, 0, codes).view(torch.float8_e4m3fn)
        one = np.array([[[0.25], [0.3]]], np.float32)
        factors = scales if held == "int8" else torch.tensor([0.25, 0.3]).repeat_interleave(len(codes) // 2)
        data = as_bytes(given) if held == "fp8_e4m3" else np.concatenate([as_bytes(given), as_bytes(scales)])
        made = converted(data, held, dtype, num_vectors=len(codes), head_dim=32, head_scales=one)
        assert np.array_equal(made, as_bytes(restored(given, factors, TORCH_DTYPES[dtype])))


def written(kv, blocks, pool_blocks, values, head_scales):
    """A worker's pool after the engine wrote `[layer, token, k/v, head, head_dim]` into every rank."""
    pool = np.zeros(pool_blocks * kv.worker_block_bytes, np.uint8)
    local, replicas = kv.num_local_kv_heads, max(1, kv.tp_size // kv.num_kv_heads)
    for rank, part in enumerate(np.split(pool, kv.tp_size)):
        heads = slice(rank // replicas * local, (rank // replicas + 1) * local)
        cache = PagedKVCache(kv, num_blocks=pool_blocks, buffer=part.data)
        if kv.is_quantised:
            pages = CodePages(cache, torch.float32, head_scales[:, :, heads].contiguous())
        else:
            pages = PlainPages(cache)
        tokens = torch.arange(values.shape[1])
        block = torch.tensor(blocks)[tokens // kv.block_size]
        plane = block[:, None] * 2 * local + torch.arange(2 * local)
        slots = (plane * kv.block_size + (tokens % kv.block_size)[:, None]).flatten()
        for layer in range(kv.num_layers):
            pages.write(
                layer,
                slots,
                values[layer][:, :, heads].to(CACHE_DTYPES[kv.dtype] if not kv.is_quantised else values.dtype),
            )
    return pool


def moved(kv, tables, pools, ranges, head_scales, wire):
    """The destination's pool after these cells went there from the source's, converted before and after the wire."""
    mapping, scales = CellMapping(*kv), head_scales.numpy()
    before, after = (Converter(a, b, head_scales=scales) for a, b in ((kv[0].dtype, wire), (wire, kv[1].dtype)))
    for one in ranges:
        payload = mapping.payload(one)
        data = np.empty(payload.num_bytes(kv[0].dtype), np.uint8)
        numpy_copy.gather(mapping.reads(one, tables[0]), pools[0], data)
        sent, here = np.empty(payload.num_bytes(wire), np.uint8), np.empty(payload.num_bytes(kv[1].dtype), np.uint8)
        before.convert(payload, data, sent)
        after.convert(payload, sent, here)
        numpy_copy.scatter(mapping.writes(one, tables[1]), here, pools[1])
        numpy_copy.copy(mapping.fan_out(one, tables[1]), pools[1], pools[1])
    return pools[1]


@pytest.mark.parametrize(("target", "early"), list(product(QUANTISED_DTYPES, (True, False))))
@pytest.mark.parametrize("source", PLAIN)
@pytest.mark.parametrize("batch", [1, 700, 1 << 16])
def test_conversion_prompt_equals_engine_output(source, target, early, batch, monkeypatch):
    monkeypatch.setattr(dtype_conversion, "BATCH_VALUES", batch)
    rng = torch.Generator().manual_seed(3)
    for (tp_source, tp_target), sizes, heads in (
        ((1, 1), (16, 16), 2),
        ((1, 4), (32, 16), 2),
        ((8, 2), (16, 32), 4),
        ((2, 8), (16, 64), 8),
        ((4, 1), (64, 16), 1),
    ):
        kv = [
            layout(dtype, tp=tp, block_size=size, heads=heads, head_dim=6, layers=3)
            for dtype, tp, size in zip((source, target), (tp_source, tp_target), sizes, strict=True)
        ]
        num_tokens = 144
        values = (
            torch.randn(3, num_tokens, 2, heads, 6, generator=rng) * torch.rand(3, 1, 2, heads, 1, generator=rng) * 40
        )
        values = values.to(TORCH_DTYPES[source])
        head_scales = torch.rand(3, 2, heads, generator=rng) + 0.05
        order = torch.randperm(12, generator=rng).tolist()
        tables = [TokenBlocks(blocks=tuple(order[: -(-num_tokens // size)]), pool_blocks=12) for size in sizes]
        pools = [written(one, table.blocks, 12, values, head_scales) for one, table in zip(kv, tables, strict=True)]
        expected, pools[1] = pools[1], np.zeros_like(pools[1])
        num_units = num_tokens // min(sizes)
        ranges = [
            cells(kv[0], 0, 1),
            cells(kv[0], 1, 1, first_layer=0, num_layers=2),
            cells(kv[0], 1, 1, first_layer=2, num_layers=1),
            cells(kv[0], 2, num_units - 2),
        ]
        wire = target if early else source
        assert np.array_equal(moved(kv, tables, pools, ranges, head_scales, wire), expected)


def test_conversion_wire_codes_equal_engine_codes():
    rng = torch.Generator().manual_seed(4)
    kv = [layout("bfloat16", tp=tp, heads=4, head_dim=8) for tp in (2, 1)]
    values = torch.randn(2, 32, 2, 4, 8, generator=rng).bfloat16()
    tables = [TokenBlocks(blocks=blocks, pool_blocks=3) for blocks in ((1, 0), (0, 2))]
    head_scales = torch.rand(2, 2, 4, generator=rng) + 0.05
    for wire in QUANTISED_DTYPES:
        codes, scales = (group_codes if wire == "int4" else token_codes)(values)
        if wire == "fp8_e4m3":
            scales = head_scales[:, None].expand(values.shape[:-1])
            codes = head_codes(values, scales)
        seen = restored(codes, scales, torch.bfloat16)
        source = written(kv[0], tables[0].blocks, 3, values, head_scales)
        expected = written(kv[1], tables[1].blocks, 3, seen, head_scales)
        pools = [source, np.zeros_like(expected)]
        assert np.array_equal(moved(kv, tables, pools, [cells(kv[0], 0, 2)], head_scales, wire), expected)


def test_conversion_between_equal_dtypes_copies_bytes():
    for dtype in (*PLAIN, *QUANTISED_DTYPES):
        size = 32 * vector_bytes(dtype, 4)
        data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        assert np.array_equal(converted(data, dtype, dtype, num_vectors=32, head_dim=4), data)


def test_conversion_every_declared_pair_exists():
    for source, target in CONVERSIONS:
        size = 32 * vector_bytes(source, 4)
        assert not converted(np.zeros(size, np.uint8), source, target, num_vectors=32, head_dim=4).any()
    with pytest.raises(TransferError, match="dtype: no conversion from int8 to fp8_e4m3"):
        Converter("int8", "fp8_e4m3")


def test_conversion_payload_of_wrong_size_is_refused():
    mapping = CellMapping(layout(), layout("int8"))
    payload, converter = mapping.payload(cells(layout(), 0, 1)), Converter("bfloat16", "int8")
    data, room = np.zeros(1024, np.uint8), np.zeros(1024, np.uint8)
    converter.convert(payload, data, room)
    with pytest.raises(TransferError, match="payload of 1023 bytes, bfloat16 has 1024"):
        converter.convert(payload, data[1:], room)
    with pytest.raises(TransferError, match="room of 1022 bytes, int8 has 1024"):
        converter.convert(payload, data, room[2:])
