"""Rounded matrices have the values that the CPU kernels would have made at load."""

import pytest
import torch
from torch import Tensor

from engine.kernels.cpu.gemm import Arithmetic, Epilogue, PackedLinear
from engine.kernels.cpu.library import load_kernels
from engine.quantize.rounding import best_scales, group_matrix, round_groups, round_rows
from tandem.errors import ConfigError
from tests.support.engine.paged_harness import needs


def random_weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    weight[3, :40] = 0.0
    weight[4, 7], weight[5, 9] = 30.0, -30.0
    return weight


def test_round_groups_restores_what_native_packing_multiplies_by() -> None:
    needs(Arithmetic.INT4)
    weight = random_weight(70, 320)
    linear = PackedLinear(
        load_kernels(), weight, None, arithmetic=Arithmetic.INT4, epilogue=Epilogue.STORE_FLOAT32, num_threads=1
    )
    native = torch.empty(320, 70)
    linear(torch.eye(320).bfloat16(), native)
    restored = round_groups(weight, 32).dequantized()
    # A product with one rounds it: 127 units of 1/127.
    torch.testing.assert_close(restored, native.t(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_round_groups_loses_no_more_than_any_candidate_scale(group_size: int) -> None:
    weight = random_weight(48, 256)
    matrix = round_groups(weight, group_size)
    assert matrix.group_size == group_size
    groups = weight.float().unflatten(1, (-1, group_size))
    extreme = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
    lost = (matrix.dequantized().unflatten(1, (-1, group_size)) - groups).square().sum(dim=2)
    for candidate in torch.arange(-9.0, -5.9, 0.25):
        scale = (extreme / candidate).half().float()
        inverse = torch.where(scale != 0, 1 / scale, 0.0)
        values = (groups * inverse).clamp(-8, 7).round() * scale
        assert (lost <= (values - groups).square().sum(dim=2) * (1 + 1e-5)).all()


def test_round_groups_of_many_rows_equals_that_of_its_parts() -> None:
    weight = torch.randn(5000, 256, generator=torch.Generator().manual_seed(1))  # in more blocks than one
    whole = round_groups(weight, 32)
    part = round_groups(weight[4000:], 32)
    assert torch.equal(whole.dequantized()[4000:], part.dequantized())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e9])
def test_round_groups_of_values_without_a_scale_is_refused(bad: float) -> None:
    weight = random_weight(8, 64).float()
    weight[6, 50] = bad
    with pytest.raises(ConfigError, match="not finite, or too large"):
        round_groups(weight, 32)


def test_best_scales_of_zeros_is_zero() -> None:
    assert best_scales(torch.zeros(3, 32)).tolist() == [0.0, 0.0, 0.0]


def test_group_matrix_restores_its_codes_times_scales() -> None:
    codes = torch.randint(-8, 8, (6, 128), dtype=torch.int8)
    scale = torch.rand(6, 2).half()
    expected = codes.float() * scale.float().repeat_interleave(64, dim=1)
    assert torch.equal(group_matrix(codes, scale).dequantized(), expected)


def test_round_rows_restores_units_of_the_largest_value() -> None:
    weight = random_weight(70, 200)
    weight[6] = 0.0
    matrix = round_rows(weight)
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    unit = largest.double() / 127
    assert matrix.rounds_inputs
    assert matrix.codes[6].eq(0).all()
    assert matrix.codes.abs().amax(dim=1)[:6].eq(127).all()
    assert ((matrix.dequantized() - weight.float()).abs() <= unit * 0.501).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_round_rows_of_values_that_are_not_finite_is_refused(bad: float) -> None:
    weight = random_weight(8, 64)
    weight[6, 50] = bad
    with pytest.raises(ConfigError, match="not finite"):
        round_rows(weight)
