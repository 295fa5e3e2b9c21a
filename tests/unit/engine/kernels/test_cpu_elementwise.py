"""Compiled elementwise kernels against float64 and against the torch layers, for sizes no vector divides."""

import math
import random

import pytest
import torch

from engine.kernels.cpu.attention import CpuAttentionShape
from engine.kernels.cpu.elementwise import CpuElementwise
from engine.kernels.cpu.library import load_kernels
from engine.model.layers.norm import HeadNorm
from engine.model.layers.rope import RotaryEmbedding, rotate_
from engine.model.rope_config import parse_rope
from tandem.errors import ConfigError, InvariantError

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 15, 16, 17, 33, 96, 1000, 1024]
TOLERANCE = {torch.float32: {"atol": 1e-6, "rtol": 3e-6}, torch.bfloat16: {"atol": 1e-6, "rtol": 2.0**-8}}


@pytest.fixture(scope="module")
def library():
    return load_kernels()


def assert_rounded(actual, expected):
    """Equal to the float64 result but for one rounding."""
    torch.testing.assert_close(actual.double(), expected, **TOLERANCE[actual.dtype])


def normed(x, weight, eps):
    return x.double() / (x.double().pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_cpu_rms_norm_equals_float64(library, dtype, size):
    torch.manual_seed(size)
    for rows, threads in ((1, 2), (5, 1), (70, 2)):
        ops = CpuElementwise(library, dtype, num_threads=threads)
        x, delta, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, size), (rows, size), (size,)))
        out = torch.empty_like(x)
        ops.rms_norm(x, weight, 1e-5, out)
        assert_rounded(out, normed(x, weight, 1e-5))
        residual = x.clone()
        ops.add_rms_norm(residual, delta, weight, 1e-5, out)
        assert torch.equal(residual, x + delta)
        assert_rounded(out, normed(residual, weight, 1e-5))
        ops.add_rms_norm(residual, None, weight, 1e-5, out)
        assert torch.equal(residual, x + delta)
        assert_rounded(out, normed(residual, weight, 1e-5))
        ops.rms_norm(residual, weight, 1e-5, residual)
        assert torch.equal(residual, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_cpu_silu_mul_equals_float64(library, dtype, size):
    torch.manual_seed(size)
    for rows, threads in ((1, 2), (3, 1), (40, 2)):
        x = (torch.randn(rows, 2 * size) * 8).to(dtype)
        x[0, 0] = -300.0
        x[-1, size - 1] = 300.0
        out = torch.empty(rows, size, dtype=dtype)
        CpuElementwise(library, dtype, num_threads=threads).silu_mul(x, out)
        gate, up = x.double().chunk(2, dim=-1)
        assert_rounded(out, gate * torch.sigmoid(gate) * up)


def rotation(library, dtype, head_dim, *, rows, block_size, num_blocks, threads=2):
    """Everything one call needs, and the float32 layers' answer on the same input."""
    shape = CpuAttentionShape(num_heads=6, num_kv_heads=2, head_dim=head_dim, block_size=block_size, dtype=dtype)
    rng = random.Random(head_dim)
    positions = torch.tensor([rng.randrange(4000) for _ in range(rows)])
    slots = torch.tensor(rng.sample(range(num_blocks * block_size), rows))
    cos, sin = RotaryEmbedding(parse_rope({}, 4096), head_dim).angles(positions, torch.float32)
    qkv = torch.randn(rows, 10 * head_dim + 3).to(dtype)[:, : 10 * head_dim].view(rows, 10, head_dim)  # rows apart
    ops = CpuElementwise(library, dtype, num_threads=threads)
    half = head_dim // 2
    plan = ops.plan_rotation(shape, cos[:, 0, :half], sin[:, 0, half:], slots.numpy())
    return ops, plan, qkv, cos, sin, slots


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 16, 34, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("norm", [False, True])
def test_cpu_qk_norm_rope_write_equals_float64(library, dtype, head_dim, norm):
    torch.manual_seed(head_dim)
    for rows, threads in ((1, 1), (29, 2)):
        ops, plan, qkv, cos, sin, slots = rotation(
            library, dtype, head_dim, rows=rows, block_size=8, num_blocks=9, threads=threads
        )
        weight = torch.randn(8, head_dim).to(dtype) if norm else None
        expected = qkv.double()
        rotated = expected[:, :8]
        if weight is not None:
            rotated.copy_(normed(rotated, weight, 1e-6))
        rotate_(rotated, cos.double(), sin.double())
        cache = torch.full((9, 2, 2, 8, head_dim), 7.0, dtype=dtype)
        given = qkv.clone()
        ops.qk_norm_rope_write(plan, qkv, cache, weight, 1e-6)
        torch.testing.assert_close(qkv[:, :6].double(), expected[:, :6], atol=2e-6, rtol=TOLERANCE[dtype]["rtol"])
        assert torch.equal(qkv[:, 6:], given[:, 6:])
        stored = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)  # [slots, 2, num_kv_heads, head_dim]
        torch.testing.assert_close(
            stored[slots].flatten(1, 2).double(), expected[:, 6:], atol=2e-6, rtol=TOLERANCE[dtype]["rtol"]
        )
        untouched = torch.ones(len(stored), dtype=torch.bool)
        untouched[slots] = False
        assert (stored[untouched] == 7.0).all()


def test_cpu_qk_norm_rope_equals_torch_layers_in_float32(library):
    torch.manual_seed(0)
    ops, plan, qkv, cos, sin, _ = rotation(library, torch.float32, 64, rows=40, block_size=16, num_blocks=4)
    query, key = torch.randn(64), torch.randn(64)
    weight = torch.cat((query.expand(6, -1), key.expand(2, -1)))
    expected = qkv[:, :8].clone()
    HeadNorm(query, key, 1e-6).apply_(expected[:, :6], expected[:, 6:])
    rotate_(expected, cos, sin)
    ops.qk_norm_rope_write(plan, qkv, torch.empty(4, 2, 2, 16, 64), weight, 1e-6)
    torch.testing.assert_close(qkv[:, :6], expected[:, :6], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_kv_write_stores_non_finite_as_zero(library, dtype):
    ops, plan, qkv, _, _, slots = rotation(library, dtype, 64, rows=3, block_size=4, num_blocks=2)
    qkv[0, 6, 5] = math.nan
    qkv[1, 8, 7] = math.inf
    qkv[2, 9, 63] = -math.inf
    cache = torch.full((2, 2, 2, 4, 64), math.nan, dtype=dtype)
    ops.qk_norm_rope_write(plan, qkv, cache, None, 1e-6)
    stored = cache.permute(0, 3, 1, 2, 4).flatten(0, 1)[slots]
    assert stored.isfinite().all()
    assert stored[0, 0, 0, 5] == stored[0, 0, 0, 37] == stored[1, 1, 0, 7] == stored[2, 1, 1, 63] == 0.0
    assert torch.equal(stored[0, 1], qkv[0, 8:10])


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_norm_row_is_independent_of_batch_and_threads(library, dtype):
    torch.manual_seed(1)
    x, weight = torch.randn(90, 1000).to(dtype), torch.randn(1000).to(dtype)
    together, alone = torch.empty_like(x), torch.empty_like(x)
    CpuElementwise(library, dtype, num_threads=2).rms_norm(x, weight, 1e-5, together)
    single = CpuElementwise(library, dtype, num_threads=1)
    for i in range(len(x)):
        single.rms_norm(x[i : i + 1], weight, 1e-5, alone[i : i + 1])
    assert torch.equal(together, alone)


def test_cpu_gather_rows_copies_rows_or_refuses_index(library):
    ops = CpuElementwise(library, torch.bfloat16, num_threads=2)
    table = torch.randn(50, 33).to(torch.bfloat16)
    index = torch.randint(50, (200,))
    out = torch.empty(200, 33, dtype=torch.bfloat16)
    ops.gather_rows(table, index, out)
    assert torch.equal(out, table[index])
    for bad in (-1, 50, 2**40):
        index[3] = bad
        with pytest.raises(InvariantError, match="1 of 200"):
            ops.gather_rows(table, index, out)


def test_cpu_elementwise_mismatched_tensors_are_refused(library):
    ops = CpuElementwise(library, torch.bfloat16, num_threads=1)
    x, weight = torch.zeros(4, 32, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.bfloat16)
    for wrong in (
        (x.float(), weight, 1e-6, x),
        (x, weight[:16], 1e-6, x),
        (x, weight, 1e-6, x[:3]),
        (x.t(), weight, 1e-6, x),
    ):
        with pytest.raises(InvariantError):
            ops.rms_norm(*wrong)
    with pytest.raises(InvariantError):
        ops.add_rms_norm(x, x[:2], weight, 1e-6, x.clone())
    with pytest.raises(InvariantError):
        ops.silu_mul(x, x)
    shape = CpuAttentionShape(num_heads=2, num_kv_heads=1, head_dim=8, block_size=4, dtype=torch.bfloat16)
    with pytest.raises(InvariantError):
        ops.plan_rotation(shape, torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(3).long().numpy())
    with pytest.raises(ConfigError):
        CpuElementwise(library, torch.float16, num_threads=1)
