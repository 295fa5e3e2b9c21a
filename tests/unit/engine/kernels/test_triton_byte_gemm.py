"""Rows rounded to bytes, and products of bytes, against plain torch: the same codes, and the same integers."""

import random
from dataclasses import replace

import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import interpreted, randn  # isort: skip
from engine.kernels.triton import reference
from engine.kernels.triton.gemm_few import FewRowsWorkspace
from engine.kernels.triton.quantized.byte_gemm import byte_gemm
from engine.kernels.triton.quantized.round_rows import round_rows
from engine.kernels.triton.tuning import QuantizedLaunch

__all__ = ["interpreted"]

FEW = QuantizedLaunch(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
MANY = QuantizedLaunch(block_m=32, block_n=64, block_k=64, num_warps=4, num_stages=2)


def rounded(x):
    codes, scale = torch.full(x.shape, 99, dtype=torch.int8), torch.full((len(x),), float("nan"))
    round_rows(x, codes, scale)
    return codes, scale


def random_bytes(rng, rows, columns):
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    return torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)


def multiplied(x, weight, scale, bias=None, *, launch=FEW, splits=1, **options):
    rows = len(weight) // (2 if options.get("is_gated") else 1)
    workspace = FewRowsWorkspace.allocate(splits * (rows + launch.block_n) * launch.block_m, rows, "cpu")
    out = options.pop("out", torch.full((len(x), rows), float("nan")))
    byte_gemm(*rounded(x), weight, scale, bias, out, launch, num_splits=splits, workspace=workspace, **options)
    assert not workspace.arrivals.any()
    return out


def expected_product(x, weight, scale):
    codes, row_scale = reference.rounded_rows(x)
    return (codes.double() @ weight.double().T).float() * row_scale[:, None] * scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_rounded_as_by_reference(dtype):
    rng = random.Random(str(dtype))
    x = randn(rng, 5, 4100 + 8, dtype=dtype)[:, :4100] * 3
    x[1], x[2, 0], x[3] = 0.0, 1000.0, 1e-33
    codes, scale = rounded(x)
    expected, expected_scale = reference.rounded_rows(x)
    assert torch.equal(codes, expected)
    assert torch.equal(scale, expected_scale)
    assert codes[0].abs().max() == 127
    assert not codes[1].any()


@pytest.mark.parametrize("seed", range(6))
def test_byte_gemm_equals_product_of_integers(seed):
    """Of any tiles and splits: integers are exact, so at most the last bit of scaling may differ."""
    rng = random.Random(seed)
    features, depth = rng.choice([5, 32, 70]), rng.choice([32, 100, 256])
    x = randn(rng, rng.choice([1, 3, 16]), depth + 8, dtype=torch.float16)[:, :depth]
    weight, scale = random_bytes(rng, features, depth), randn(rng, features).abs() / 127
    bias = randn(rng, features, dtype=torch.float16) if seed % 2 else None
    expected = expected_product(x, weight, scale) + (0.0 if bias is None else bias.float())
    for launch, splits in ((FEW, 1), (FEW, 4), (MANY, 1)):
        found = multiplied(x, weight, scale, bias, launch=launch, splits=splits)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_byte_gemm_is_added_to_residual_and_gated():
    rng = random.Random(7)
    x, weight = randn(rng, 3, 96), random_bytes(rng, 80, 96)
    scale, residual = randn(rng, 80).abs() / 127, randn(rng, 3, 80)
    product = expected_product(x, weight, scale)
    added = residual + product
    found = multiplied(x, weight, scale, splits=2, residual=residual, out=residual)
    torch.testing.assert_close(found, added, atol=1e-6, rtol=1e-6)
    gated = multiplied(x, weight, scale, is_gated=True)
    torch.testing.assert_close(gated, reference.silu_mul(product), atol=1e-5, rtol=1e-5)


def test_byte_gemm_of_longest_depth_does_not_overflow():
    weight = torch.full((32, 28_672), 127, dtype=torch.int8)
    found = multiplied(torch.ones(1, 28_672), weight, torch.ones(32), launch=replace(FEW, block_k=1024))
    torch.testing.assert_close(found, torch.full((1, 32), 127.0 * 28_672), rtol=1e-6, atol=0.0)
