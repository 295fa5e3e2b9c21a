"""Products of weights with scales by groups against their restored values: random shapes, forms, tiles and splits."""

import random

import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import interpreted, randn  # isort: skip
from engine.kernels.triton import reference
from engine.kernels.triton.gemm_few import FewRowsWorkspace
from engine.kernels.triton.quantized.group_gemm import group_gemm
from engine.kernels.triton.quantized.group_weights import can_pack, pack_groups
from engine.kernels.triton.tuning import QuantizedLaunch
from engine.model.checkpoints.packing import pack_nibbles
from engine.model.checkpoints.stored_matrix import DenseMatrix, Fp8Matrix, GroupIntMatrix, Int8Matrix

__all__ = ["interpreted"]

FEW = QuantizedLaunch(block_m=16, block_n=32, num_warps=4, num_stages=2, programs_per_sm=1)
MANY = QuantizedLaunch(block_m=32, block_n=64, num_warps=4, num_stages=2)
TOLERANCE = {"atol": 2e-4, "rtol": 2e-5}  # of sums in float32: what is multiplied is exact


def group_int(rng, bits, rows, columns, group, *, zeros=True, offset=False, ordered=False):
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    num_groups, middle = -(-columns // group), 1 << (bits - 1)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
    zero = torch.randint(0, 2 * middle, (rows, num_groups), generator=generator, dtype=torch.int16)
    groups = torch.arange(columns) // group
    return GroupIntMatrix(
        bits=bits,
        num_columns=columns,
        codes=pack_nibbles(codes) if bits == 4 else codes,
        scale=(torch.rand(rows, num_groups, generator=generator) / middle - 0.02).half(),
        zero=zero if zeros else torch.full_like(zero, middle),
        offset=torch.rand(rows, num_groups, generator=generator) if offset else None,
        group_size=group,
        group_of_column=groups[torch.randperm(columns, generator=generator)] if ordered else None,
    )


def int8_rows(rng, rows, columns):
    codes = torch.randint(-127, 128, (rows, columns), generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    return Int8Matrix(codes=codes.to(torch.int8), scale=randn(rng, rows).abs() / 127)


def fp8_blocks(rng, rows, columns, height, width):
    scale = randn(rng, -(-rows // height), -(-columns // width)).abs() + 0.1
    codes = (randn(rng, rows, columns) * 3).to(torch.float8_e4m3fn)
    return Fp8Matrix(codes=codes, scale=scale, block_rows=height, block_columns=width)


def random_matrix(rng, rows):
    """Any form that is multiplied as it is stored, of a depth with a ragged last span or group."""
    kind, columns = rng.choice(["int4", "int4", "int8", "row", "fp8"]), 32 * rng.choice([1, 3, 4, 9, 12])
    if kind == "row":
        return int8_rows(rng, rows, columns + rng.choice([0, 7]))
    if kind == "fp8":
        return fp8_blocks(rng, rows, columns, rng.choice([1, 16, rows]), rng.choice([32, 128, columns]))
    bits = 4 if kind == "int4" else 8
    group = rng.choice([32, 64, 96, 128, columns] if bits == 4 else [16, 32, 128, columns])
    choices = {name: rng.random() < 0.5 for name in ("zeros", "offset", "ordered")}
    return group_int(rng, bits, rows, columns, min(group, columns), **choices)


def multiplied(matrix, x, bias=None, *, launch=FEW, splits=1, **options):
    assert can_pack(matrix)
    weights = pack_groups(matrix, "cpu")
    rows = matrix.shape[0] // (2 if options.get("is_gated") else 1)
    workspace = FewRowsWorkspace.allocate(splits * (rows + launch.block_n) * launch.block_m, rows, "cpu")
    out = options.pop("out", torch.full((len(x), rows), float("nan"), dtype=torch.float32))
    if weights.order is not None:
        x = x[:, weights.order]
    group_gemm(x, weights, bias, out, launch, num_splits=splits, workspace=workspace, **options)
    assert not workspace.arrivals.any()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_group_gemm_equals_product_of_restored_weights(seed, dtype):
    rng = random.Random(f"{seed} {dtype}")
    matrix = random_matrix(rng, rng.choice([5, 32, 70]))
    x = randn(rng, rng.choice([1, 3, 16]), matrix.shape[1] + 8, dtype=dtype)[:, : matrix.shape[1]]
    bias = randn(rng, matrix.shape[0], dtype=dtype) if rng.random() < 0.5 else None
    found = multiplied(matrix, x, bias, splits=rng.choice([1, 2, 4]))
    torch.testing.assert_close(found, reference.linear(x, matrix.dequantized(), bias), **TOLERANCE)


def test_group_gemm_of_many_rows_equals_product_of_restored_weights():
    rng = random.Random(3)
    matrix = group_int(rng, 4, 100, 288, 96)
    x = randn(rng, 70, 288, dtype=torch.float16)
    expected = reference.linear(x, matrix.dequantized(), None)
    torch.testing.assert_close(multiplied(matrix, x, launch=MANY), expected, **TOLERANCE)


def test_group_gemm_sums_each_row_in_one_order():
    """Whatever stands beside it, one launch computes the same bits."""
    rng = random.Random(4)
    matrix, x = group_int(rng, 4, 40, 160, 32), randn(rng, 33, 160, dtype=torch.bfloat16)
    whole = multiplied(matrix, x, launch=MANY)
    for begin, end in ((0, 1), (7, 20), (32, 33)):
        assert torch.equal(multiplied(matrix, x[begin:end], launch=MANY), whole[begin:end])


@pytest.mark.parametrize("splits", [1, 2])
def test_group_gemm_is_added_to_residual(splits):
    rng = random.Random(splits)
    matrix, x, residual = group_int(rng, 4, 40, 256, 128), randn(rng, 3, 256), randn(rng, 3, 40)
    expected = residual + x @ matrix.dequantized().T
    found = multiplied(matrix, x, splits=splits, residual=residual, out=residual)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_group_gemm_is_gated():
    rng = random.Random(9)
    matrix, x = group_int(rng, 4, 2 * 40, 128, 64, offset=True), randn(rng, 5, 128, dtype=torch.float16)
    found = multiplied(matrix, x, is_gated=True, out=torch.empty(5, 40, dtype=torch.float16))
    stacked = reference.linear(x, matrix.dequantized(), None).half()
    torch.testing.assert_close(found, reference.silu_mul(stacked), atol=2e-2, rtol=2e-3)


def test_group_gemm_multiplies_all_finite_e4m3_numbers_exactly():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(4, 1)[:, :224].contiguous().view(torch.float8_e4m3fn)
    matrix = Fp8Matrix(codes=codes, scale=torch.ones(1, 1), block_rows=4, block_columns=224)
    for dtype in (torch.float16, torch.bfloat16):
        found = multiplied(matrix, torch.eye(224, dtype=dtype)[:48], launch=MANY)
        assert torch.equal(found, matrix.dequantized().T[:48])


def test_forms_that_group_gemm_cannot_hold_are_left_to_be_restored():
    rng = random.Random(0)
    good = group_int(rng, 4, 8, 128, 32)
    far, infinite = good.zero.clone(), good.scale.clone()
    far[0, 0], infinite[0, 0] = 200, float("inf")
    uneven = torch.zeros(128, dtype=torch.int64)
    e5m2 = Fp8Matrix(
        codes=torch.ones(8, 32).to(torch.float8_e5m2), scale=torch.ones(1, 1), block_rows=8, block_columns=32
    )
    not_a_number = fp8_blocks(rng, 8, 32, 8, 32).codes.view(torch.uint8).clone()
    not_a_number[3, 3] = 0xFF
    damaged = Fp8Matrix(
        codes=not_a_number.view(torch.float8_e4m3fn), scale=torch.ones(1, 1), block_rows=8, block_columns=32
    )
    assert can_pack(good)
    assert not can_pack(DenseMatrix(values=torch.ones(8, 32)))
    assert not can_pack(group_int(rng, 4, 8, 128, 16)), "a group within a part of a word"
    assert not can_pack(good._with(codes=good.codes, zero=far))
    assert not can_pack(good._with(codes=good.codes, scale=infinite))
    assert not can_pack(good._with(codes=good.codes, group_of_column=uneven))
    assert not can_pack(e5m2)
    assert not can_pack(damaged)
    assert not can_pack(fp8_blocks(rng, 8, 80, 8, 40))


def test_splits_of_a_depth_occupy_the_gpu_and_leave_each_some_steps():
    launch = QuantizedLaunch(block_m=16, block_n=64, num_warps=4, num_stages=4, rows=16, programs_per_sm=1)
    assert launch.num_splits(4096, 32, 132) == 4
    assert launch.num_splits(4096, 12, 132) == 2, "quarters would have three steps"
    assert launch.num_splits(14_336, 32, 132) == 1, "enough tiles"
    assert launch.num_splits(64, 1000, 132) == 8
    assert MANY.num_splits(64, 1000, 132) == 1
