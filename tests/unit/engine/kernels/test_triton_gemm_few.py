"""The products for few rows and for one against plain torch: ragged tiles, parts of the depth, gate and residual."""

import random

import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import interpreted, randn  # isort: skip
from engine.kernels.triton import reference
from engine.kernels.triton.gemm_few import MAX_ROWS, FewRowsWorkspace, gemm_few
from engine.kernels.triton.gemv import gemv
from engine.kernels.triton.tuning import DEFAULT_TABLE, FewRowsLaunch, LaunchTable, OneRowLaunch, load_table
from tandem.errors import ConfigError

__all__ = ["interpreted"]

TOLERANCE = {torch.float32: {"atol": 2e-4, "rtol": 2e-5}, torch.float16: {"atol": 2e-2, "rtol": 2e-3}}


def launch(splits: int = 1, block_n: int = 32) -> FewRowsLaunch:
    return FewRowsLaunch(block_n=block_n, block_k=32, num_warps=4, num_stages=2, num_splits=splits, prefetch_lines=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(8))
def test_triton_few_rows_product_equals_reference(seed, dtype):
    rng = random.Random(seed)
    rows, features, depth = rng.choice([1, 2, 7, MAX_ROWS]), rng.choice([32, 64, 70, 5]), 32 * rng.choice([1, 3, 8])
    splits = rng.choice([1, 2, 4])
    x = randn(rng, rows, depth + 8, dtype=dtype)[:, :depth]
    weight = randn(rng, features, depth, dtype=dtype)
    bias = randn(rng, features, dtype=dtype) if rng.random() < 0.5 else None
    workspace = FewRowsWorkspace.allocate(4 * 128 * MAX_ROWS, 8, "cpu")
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    for _ in range(2):  # the second finds the counters as the first has left them
        out = torch.full((rows, features), float("nan"), dtype=dtype)
        gemm_few(x, weight, bias, out, launch(splits), workspace=workspace)
        torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("splits", [1, 2])
def test_triton_few_rows_product_is_added_to_residual(splits):
    rng = random.Random(splits)
    x, weight, residual = randn(rng, 3, 64), randn(rng, 40, 64), randn(rng, 3, 40)
    expected = residual + x @ weight.T
    workspace = FewRowsWorkspace.allocate(splits * 2 * 32 * MAX_ROWS, 2, "cpu")
    gemm_few(x, weight, None, residual, launch(splits), residual=residual, workspace=workspace)
    torch.testing.assert_close(residual, expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_triton_few_rows_product_is_gated(dtype):
    rng = random.Random(9)
    x, weight = randn(rng, 5, 96, dtype=dtype), randn(rng, 2 * 40, 96, dtype=dtype)
    out = torch.empty(5, 40, dtype=dtype)
    gemm_few(x, weight, None, out, launch(), is_gated=True)
    stacked = torch.nn.functional.linear(x.float(), weight.float()).to(dtype)
    torch.testing.assert_close(out.float(), reference.silu_mul(stacked).float(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(6))
def test_triton_one_row_product_equals_reference(seed, dtype):
    rng = random.Random(seed)
    features, depth = rng.choice([32, 64, 70, 5]), 64 * rng.choice([1, 2, 5])
    x, weight = randn(rng, 1, depth, dtype=dtype), randn(rng, features, depth, dtype=dtype)
    bias = randn(rng, features, dtype=dtype) if seed % 2 else None
    residual = randn(rng, 1, features, dtype=dtype)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    one = OneRowLaunch(block_n=rng.choice([2, 8]), block_k=64, num_warps=4)
    out = torch.full((1, features), float("nan"), dtype=dtype)
    gemv(x, weight, bias, out, one)
    torch.testing.assert_close(out.float(), expected, **TOLERANCE[dtype])
    added = residual.float() + out.float()
    gemv(x, weight, bias, residual, one, residual=residual)
    torch.testing.assert_close(residual.float(), added, **TOLERANCE[dtype])
    if features % 2 == 0:
        gated = torch.empty(1, features // 2, dtype=dtype)
        gemv(x, weight, None, gated, one, is_gated=True)
        stacked = torch.nn.functional.linear(x.float(), weight.float()).to(dtype)
        torch.testing.assert_close(gated.float(), reference.silu_mul(stacked).float(), **TOLERANCE[dtype])


def test_gated_product_with_splits_is_refused() -> None:
    launch = {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 3, "num_splits": 2}
    entry = {"least_features": 1, "features": 9000, "gated": True, **launch}
    table = LaunchTable({"gpu": "greedy", "few_rows": [entry]})
    with pytest.raises(ConfigError, match="num_splits must be 1"):
        table.few_rows(4096, 4096, gated=True)
    assert table.few_rows(4096, 4096) is None


def test_launch_of_few_rows_is_chosen_by_size() -> None:
    table = load_table("NVIDIA H200")
    output, wide, head = table.few_rows(4096, 14_336), table.few_rows(6144, 4096), table.few_rows(128_256, 4096)
    assert output is not None
    assert wide is not None
    assert head is not None
    assert output.block_k == 512
    assert (wide.num_splits, head.num_splits) == (4, 1)
    gated = table.few_rows(14_336, 4096, gated=True)
    assert gated is not None
    assert gated.num_splits == 1, "a gate has no parts"
    assert table.few_rows(4096, 14_300) is None, "tiles do not divide the depth"
    assert table.few_rows(1024, 4096) is None, "too few features to occupy the GPU"
    assert load_table(DEFAULT_TABLE).few_rows(4096, 4096) is None
    assert table.one_row(4096, 4096) != table.one_row(6144, 4096)
    assert table.one_row(4096, 14_336) is None, "so deep that tensor cores keep up"
    assert table.one_row(14_336, 4096, gated=True) is None
