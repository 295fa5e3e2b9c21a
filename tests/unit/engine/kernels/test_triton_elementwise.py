"""Norm, rotation with KV write, gate and batch-invariant product against plain torch, in float32 and float16."""

import random

import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import interpreted, make_pages, randn  # isort: skip
from engine.kernels.triton import reference
from engine.kernels.triton.activation import silu_mul
from engine.kernels.triton.gemm_fixed import gemm_fixed
from engine.kernels.triton.norm import add_rms_norm
from engine.kernels.triton.pages import LayerPages
from engine.kernels.triton.rope_kv import rope_kv
from engine.kernels.triton.tuning import GemmLaunch
from engine.model.layers.norm import HeadNorm, RMSNorm
from engine.model.layers.rope import rotate_

__all__ = ["interpreted"]

DTYPES = (torch.float32, torch.float16)
TOLERANCE = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.float16: {"atol": 2e-3, "rtol": 2e-3}}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 48), (3, 1024), (5, 1100), (0, 64)])
def test_triton_norm_adds_residual(dtype, rows, size):
    rng = random.Random(size)
    residual, weight = randn(rng, rows, size, dtype=dtype), randn(rng, size, dtype=dtype)
    delta = randn(rng, rows, size + 8, dtype=dtype)[:, :size]
    for addend in (delta, None):
        ours, theirs, out = residual.clone(), residual.clone(), torch.empty_like(residual)
        add_rms_norm(ours, addend, weight, 1e-5, out)
        expected = RMSNorm(weight, 1e-5)(theirs, addend)
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
        torch.testing.assert_close(
            out, reference.add_rms_norm(residual.clone(), addend, weight, 1e-5), **TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 40), (4, 1024), (3, 1500), (0, 8)])
def test_triton_silu_mul_equals_reference(dtype, rows, size):
    stacked = randn(random.Random(size), rows, 2 * size, dtype=dtype) * 4
    out = torch.empty(rows, size, dtype=dtype)
    silu_mul(stacked, out)
    torch.testing.assert_close(out, reference.silu_mul(stacked), **TOLERANCE[dtype])


def rope_case(seed, cache_dtype, dtype):
    rng = random.Random(seed)
    head_dim, num_kv_heads = rng.choice([32, 64, 80, 96, 128, 256]), rng.choice([1, 2, 3, 8])
    num_heads = num_kv_heads * rng.choice([1, 2, 3, 7])
    rows, block_size = rng.choice([1, 5]), rng.choice([4, 16])
    layer = make_pages(
        rng, num_blocks=4, num_kv_heads=num_kv_heads, block_size=block_size, head_dim=head_dim, dtype=cache_dtype
    )
    qkv = randn(rng, rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    angles = randn(rng, rows, head_dim // 2) * 30
    slots = torch.tensor(rng.sample(range(4 * block_size), rows))
    norm = None
    if rng.random() < 0.6:
        norm = HeadNorm(randn(rng, head_dim, dtype=dtype), randn(rng, head_dim, dtype=dtype), 1e-6)
    return layer, qkv, {"cos": angles.cos(), "sin": angles.sin(), "slots": slots, "norm": norm}


@pytest.mark.parametrize("cache", ["same", torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("seed", range(8))
def test_triton_rope_kv_write_equals_reference(seed, cache):
    dtype = DTYPES[seed % 2]
    layer, qkv, step = rope_case(seed, dtype if cache == "same" else cache, dtype)
    if seed == 3:
        step["slots"][-1] = -1  # padding
    expected_layer, expected_qkv = reference.copied(layer), qkv.clone()
    reference.rope_kv(expected_qkv, expected_layer, **step)
    rope_kv(qkv, layer, **step)
    kept = 2 * layer.num_kv_heads * layer.head_dim
    torch.testing.assert_close(qkv[:, :-kept], expected_qkv[:, :-kept], **TOLERANCE[dtype])
    if not layer.is_quantised:
        torch.testing.assert_close(layer.pages, expected_layer.pages, **TOLERANCE[dtype])
        return
    if cache == torch.int8:
        torch.testing.assert_close(layer.token_scales, expected_layer.token_scales)
    # A value within rounding of the middle between two codes may get either.
    apart = layer.pages.float() != expected_layer.pages.float()
    assert apart.float().mean() < 1e-3
    codes = layer.pages.float(), expected_layer.pages.float()
    torch.testing.assert_close(*codes, atol=1.0, rtol=0.0 if cache == torch.int8 else 0.13)


@pytest.mark.parametrize("cache", ["same", "int8"])
def test_triton_kv_write_large_offsets_do_not_wrap(cache):
    """The cache is reserved memory, of which only the written pages are touched."""
    block, head_dim, block_size = 2**21, 64, 16
    qkv = randn(random.Random(3), 2, 4 * head_dim, dtype=torch.float16)
    if cache == "int8":
        size = 2 * block_size * head_dim  # of codes; two blocks' worth apart, as scales stand behind them
        codes = torch.empty((block + 1) * 2 * size, dtype=torch.int8).view(-1, 2 * size)
        pages = codes[:, :size].view(-1, 2, 1, block_size, head_dim)
        scales = codes.view(torch.float32)[:, size // 4 : size // 4 + 2 * block_size].view(-1, 2, 1, block_size)
        layer = LayerPages(pages=pages, token_scales=scales)
    else:
        layer = LayerPages(pages=torch.empty(block + 1, 2, 1, block_size, head_dim, dtype=torch.float16))
    assert block * layer.block_stride >= 2**32
    angles = torch.zeros(2, head_dim // 2)
    slots = torch.tensor([block * block_size + 3, -1])
    rope_kv(qkv, layer, cos=angles.cos(), sin=angles.sin(), slots=slots, norm=None)
    found = layer.pages[block, :, 0, 3].float()
    if layer.token_scales is not None:
        found *= layer.token_scales[block, :, 0, 3, None]
    expected = qkv[0].view(4, head_dim)[2:].float()
    torch.testing.assert_close(found, expected, atol=3e-2 if cache == "int8" else 0.0, rtol=0.0)


def test_triton_rope_equals_engine_rotation():
    layer, qkv, step = rope_case(11, torch.float32, torch.float32)
    step["norm"] = None
    heads = qkv.view(len(qkv), -1, layer.head_dim).clone()
    cos, sin = (torch.cat((step["cos"],) * 2, -1)[:, None], torch.cat((-step["sin"], step["sin"]), -1)[:, None])
    rotate_(heads, cos, sin)
    rope_kv(qkv, layer, **step)
    queries = heads.shape[1] - 2 * layer.num_kv_heads
    ours = qkv.view(heads.shape)[:, :queries]
    torch.testing.assert_close(ours, heads[:, :queries], **TOLERANCE[torch.float32])


@pytest.mark.parametrize("cache", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_triton_kv_write_stores_no_non_finite_value(cache):
    """Others may read a slot with weight zero, so nothing in the cache may be NaN or infinite; zeros stay zeros."""
    layer, qkv, step = rope_case(5, cache, torch.float32)
    step["norm"] = None
    heads = qkv.view(len(qkv), -1, layer.head_dim)
    heads[:, -1, 3], heads[:, -1, 5], heads[:, -layer.num_kv_heads - 1] = float("nan"), float("-inf"), 0.0
    expected = reference.copied(layer)
    reference.rope_kv(qkv.clone(), expected, **step)
    rope_kv(qkv, layer, **step)
    assert layer.pages.float().isfinite().all()
    slot = int(step["slots"][0])
    block, offset = slot // layer.block_size, slot % layer.block_size
    assert (layer.pages.float()[block, 0, -1, offset] == 0.0).all()
    torch.testing.assert_close(layer.pages.float(), expected.pages.float(), atol=1e-5, rtol=1e-5)


def written(layer, values):
    """The cache's version of values `[8, 32]` stored in its only head, without rotation."""
    zeros = torch.zeros(8, 32)
    qkv = torch.cat((zeros, zeros, values), dim=1)
    step = {"cos": torch.ones(8, 16), "sin": torch.zeros(8, 16), "slots": torch.arange(8), "norm": None}
    rope_kv(qkv, layer, **step)
    return reference.gathered(layer, torch.arange(2), 8)[1][0]


def test_triton_int8_codes_cover_every_magnitude():
    """From vectors too small for a scale to vectors near the end of float32."""
    exponents = torch.tensor([-44.0, -31.0, -20.0, -5.0, 0.0, 10.0, 30.0, 38.0])
    values = randn(random.Random(0), 8, 32).clamp(-2, 2) * 10.0 ** exponents[:, None]
    layer = make_pages(random.Random(0), num_blocks=2, num_kv_heads=1, block_size=4, head_dim=32, dtype=torch.int8)
    restored = written(layer, values)
    assert (restored[:2] == 0.0).all()
    error = (restored - values)[2:].abs() / values.abs().amax(1, keepdim=True)[2:]
    assert error.max() < 0.5 / 127 * 1.01


@pytest.mark.parametrize("scale", [1.0, 2.0**-7, 3.7])
def test_triton_fp8_codes_saturate(scale):
    exponents = torch.tensor([-12.0, -6.0, -3.0, -1.0, 0.0, 1.0, 2.0, 9.0])
    values = randn(random.Random(1), 8, 32).clamp(-4, 4) * 10.0 ** exponents[:, None] * scale
    pages = torch.zeros(2, 2, 1, 4, 32).to(torch.float8_e4m3fn)
    restored = written(LayerPages(pages=pages, head_scales=torch.full((2, 1), scale)), values)
    expected = values.clamp(-448 * scale, 448 * scale)
    bound = torch.maximum(expected.abs() / 16, torch.tensor(2.0**-10 * scale))
    assert ((restored - expected).abs() <= bound * 1.0001).all()
    assert (restored.abs() == 448 * scale).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "features", "depth"), [(1, 40, 48), (33, 100, 70), (70, 64, 128)])
def test_triton_fixed_gemm_equals_reference(dtype, rows, features, depth):
    rng = random.Random(rows)
    x, weight = randn(rng, rows, depth + 8, dtype=dtype)[:, :depth], randn(rng, features, depth, dtype=dtype)
    launch = GemmLaunch(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
    for bias in (None, randn(rng, features, dtype=dtype)):
        for out_dtype in {dtype, torch.float32}:
            out = torch.empty(rows, features, dtype=out_dtype)
            gemm_fixed(x, weight, bias, out, launch)
            expected = reference.linear(x, weight, bias)
            torch.testing.assert_close(
                out.float(), expected, atol=2e-5 if out_dtype == torch.float32 else 0.05, rtol=2e-3
            )


def test_triton_gemm_row_is_independent_of_batch():
    rng = random.Random(2)
    x, weight = randn(rng, 75, 96), randn(rng, 50, 96)
    launch = GemmLaunch(block_m=32, block_n=32, block_k=32, num_warps=4, num_stages=2)
    whole = torch.empty(75, 50)
    gemm_fixed(x, weight, None, whole, launch)
    for begin, end in ((0, 1), (5, 38), (74, 75), (10, 75)):
        part = torch.empty(end - begin, 50)
        gemm_fixed(x[begin:end], weight, None, part, launch)
        assert torch.equal(part, whole[begin:end])
