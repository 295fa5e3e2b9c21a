"""Compiled norms, GELU's gate and soft caps against float64, for sizes that no vector divides, and as tiles."""

import pytest
import torch
from torch.nn import functional as F

from engine.kernels.cpu.gemm import whole_tiles
from engine.kernels.cpu.library import load_kernels
from engine.kernels.cpu.norms import CompiledNorm, CpuActivations, NormMode
from tandem.errors import ConfigError, InvariantError
from tests.unit.engine.kernels.test_cpu_elementwise import DTYPES, SIZES, assert_rounded, normed

EPS = 1e-5
L2_STEPS, TILE = 32, 16  # csrc/tile_rows.h


@pytest.fixture(scope="module")
def library():
    return load_kernels()


def norm_of(library, mode, weight, bias=None, *, size, dtype, threads=1):
    return CompiledNorm(library, mode, weight, bias, EPS, size=size, dtype=dtype, num_threads=threads)


def untiled(tiles, rows, columns):
    """Rows of bfloat16 that lie in tiles, as csrc/tile_rows.h describes them."""
    steps, groups = columns // 32, -(-rows // TILE)
    flat, out = tiles.as_strided((whole_tiles(rows) * columns,), (1,)), torch.empty(rows, columns, dtype=tiles.dtype)
    for row in range(rows):
        for step in range(steps):
            outer = step // L2_STEPS * L2_STEPS
            width = min(L2_STEPS, steps - outer)
            tile = outer * groups + row // TILE * width + step - outer
            begin = (tile * TILE + row % TILE) * 32
            out[row, step * 32 : step * 32 + 32] = flat[begin : begin + 32]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_cpu_layer_norm_equals_float64(library, dtype, size):
    torch.manual_seed(size)
    for rows, threads, has_bias in ((1, 2, False), (5, 1, True), (70, 2, True)):
        x, delta, weight, bias = (torch.randn(*s).to(dtype) for s in ((rows, size), (rows, size), (1, size), (size,)))
        bias = bias if has_bias else None
        norm = norm_of(library, NormMode.LAYER, weight, bias, size=size, dtype=dtype, threads=threads)
        room = torch.zeros(rows, size + 3).to(dtype)
        residual = room[:, :size].copy_(x)
        out = torch.empty(rows, size, dtype=dtype)
        norm.add(residual, delta, out)
        assert torch.equal(residual, x + delta)
        assert not room[:, size:].any()
        wide = None if bias is None else bias.double()
        expected = F.layer_norm(residual.double(), (size,), weight[0].double(), wide, EPS)
        error = (out.double() - expected).abs()
        assert (error <= 2e-5 + expected.abs() * (2.0**-8 if dtype is torch.bfloat16 else 1e-5)).all()
        again = torch.empty_like(out)
        norm.add(residual, None, again)
        assert torch.equal(again, out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpu_no_norm_adds_and_copies(library, dtype):
    x, delta = (torch.randn(7, 33).to(dtype) for _ in range(2))
    residual, out = x.clone(), torch.empty_like(x)
    norm_of(library, NormMode.NONE, None, size=33, dtype=dtype).add(residual, delta, out)
    assert torch.equal(out, x + delta)
    assert torch.equal(residual, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "size"), [(1, 48), (1, 100), (4, 16), (3, 20), (6, 80)])
def test_cpu_norm_of_groups_equals_float64(library, dtype, groups, size):
    torch.manual_seed(size)
    weight = torch.randn(groups, size).to(dtype)
    wide = torch.randn(9, groups * size + 11).to(dtype)
    given = wide.clone()
    norm = norm_of(library, NormMode.RMS, weight, size=size, dtype=dtype, threads=2)
    assert norm.apply_(wide[:, 5 : 5 + groups * size]) is not None
    found = wide[:, 5 : 5 + groups * size].unflatten(-1, (groups, size))
    assert_rounded(found, normed(given[:, 5 : 5 + groups * size].unflatten(-1, (groups, size)), weight, EPS))
    assert torch.equal(wide[:, :5], given[:, :5])
    assert torch.equal(wide[:, 5 + groups * size :], given[:, 5 + groups * size :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 16, 33, 200])
def test_cpu_gelu_gate_equals_float64(library, dtype, inner):
    torch.manual_seed(inner)
    stacked = (4 * torch.randn(6, 2 * inner + 5)).to(dtype)[:, : 2 * inner]
    stacked[0, 0] = -1e4  # the exponential must stay finite
    out = torch.empty(6, inner + 7, dtype=dtype)[:, :inner]
    CpuActivations(library, dtype, num_threads=1).gelu_mul(stacked, out)
    gate, up = stacked.double().chunk(2, dim=-1)
    expected = F.gelu(gate, approximate="tanh") * up
    error = (out.double() - expected).abs()
    assert (error <= 1e-5 + expected.abs() * (2.0**-8 if dtype is torch.bfloat16 else 1e-5)).all()


@pytest.mark.parametrize("columns", [32, 96, 1088])
def test_cpu_norms_and_gates_write_tiles(library, columns):
    """What is written in tiles is what is written in rows, bit for bit."""
    torch.manual_seed(columns)
    rows, dtype = 37, torch.bfloat16
    x, delta = (torch.randn(rows, columns).to(dtype) for _ in range(2))
    weight, bias = torch.randn(1, columns).to(dtype), torch.randn(columns).to(dtype)
    for mode, given in ((NormMode.LAYER, weight), (NormMode.NONE, None)):
        norm = norm_of(library, mode, given, bias if given is not None else None, size=columns, dtype=dtype, threads=2)
        plain, tiles = torch.empty_like(x), torch.empty(whole_tiles(rows), columns, dtype=dtype)[:rows]
        residual = x.clone()
        norm.add(residual, delta, plain)
        norm.add_to_tiles(x.clone(), delta, tiles)
        assert torch.equal(untiled(tiles, rows, columns), plain)
    stacked, activations = torch.randn(rows, 2 * columns).to(dtype), CpuActivations(library, dtype, num_threads=2)
    activations.gelu_mul(stacked, plain)
    activations.gelu_mul_to_tiles(stacked, tiles)
    assert torch.equal(untiled(tiles, rows, columns), plain)


@pytest.mark.parametrize("cap", [0.5, 30.0])
def test_cpu_soft_cap_equals_float64(library, cap):
    torch.manual_seed(0)
    values = torch.cat((100 * torch.randn(3000), torch.tensor([0.0, 1e30, -1e30, 1e-6])))
    expected = cap * torch.tanh(values.double() / cap)
    CpuActivations(library, torch.float32, num_threads=2).soft_cap_(values, cap)
    torch.testing.assert_close(values.double(), expected, atol=cap * 3e-7, rtol=1e-6)


def test_cpu_norms_refuse_other_shapes(library):
    weight = torch.ones(2, 8)
    with pytest.raises(ConfigError, match="float16"):
        norm_of(library, NormMode.RMS, weight.half(), size=8, dtype=torch.float16)
    with pytest.raises(InvariantError, match="a norm of 9 values"):
        norm_of(library, NormMode.RMS, weight, size=9, dtype=torch.float32)
    norm = norm_of(library, NormMode.RMS, weight, size=8, dtype=torch.float32)
    with pytest.raises(InvariantError, match="2 norms of 8"):
        norm.apply_(torch.zeros(3, 17))
    with pytest.raises(InvariantError, match="contiguous"):
        norm.apply_(torch.zeros(16, 3).T)
    whole = norm_of(library, NormMode.LAYER, weight[:1], size=8, dtype=torch.float32)
    rows = torch.zeros(3, 8)
    for residual, delta, out in ((rows[:, :7], None, rows), (rows, rows[:2], rows), (rows, None, rows.bfloat16())):
        with pytest.raises(InvariantError):
            whole.add(residual, delta, out)
    with pytest.raises(InvariantError, match="tiles"):
        whole.add_to_tiles(rows, None, torch.zeros(16, 8))
    activations = CpuActivations(library, torch.float32, num_threads=1)
    with pytest.raises(InvariantError, match="gate"):
        activations.gelu_mul(torch.zeros(3, 8), torch.zeros(3, 5))
    with pytest.raises(InvariantError, match="soft caps"):
        activations.soft_cap_(torch.zeros(3).bfloat16(), 1.0)
