"""GPTQ against plain rounding: the error of products with inputs like those of calibration."""

import pytest
import torch
from torch import Tensor

from engine.quantize.gptq import correction_factor, round_with_corrections
from engine.quantize.rounding import round_groups
from tandem.errors import ConfigError


def correlated_inputs(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Rows that mix a few directions, as hidden states do."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(columns // 4, columns, generator=generator)
    mixed = torch.randn(rows, columns // 4, generator=generator) @ directions
    return mixed + 0.3 * torch.randn(rows, columns, generator=generator)


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("columns", [128, 256, 384])
def test_gptq_loses_less_of_products_than_rounding(columns: int, group_size: int) -> None:
    x = correlated_inputs(600, columns)
    weight = torch.randn(48, columns, generator=torch.Generator().manual_seed(5)).bfloat16()
    factor = correction_factor(x.t() @ x)
    ours, rounded = round_with_corrections(weight, factor, group_size), round_groups(weight, group_size)
    unseen = correlated_inputs(200, columns)  # of the same directions
    for inputs in (x, unseen):
        exact = inputs @ weight.float().t()
        lost = [(inputs @ m.dequantized().t() - exact).square().mean() for m in (ours, rounded)]
        assert lost[0] < 0.6 * lost[1]


def test_gptq_of_equal_uncorrelated_inputs_is_rounding() -> None:
    weight = torch.randn(40, 192, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours = round_with_corrections(weight, correction_factor(7.0 * torch.eye(192)), 32)
    rounded = round_groups(weight, 32)
    assert torch.equal(ours.codes, rounded.codes)
    assert torch.equal(ours.scale, rounded.scale)


def test_gptq_leaves_the_weight_as_it_was() -> None:
    x = correlated_inputs(100, 64)
    weight = torch.randn(1, 64)
    before = weight.clone()
    round_with_corrections(weight, correction_factor(x.t() @ x), 32)
    assert torch.equal(weight, before)


def test_gptq_rounds_columns_without_inputs_on_their_own() -> None:
    x = correlated_inputs(300, 64)
    x[:, 32:] = 0.0
    weight = torch.randn(24, 64)
    ours = round_with_corrections(weight, correction_factor(x.t() @ x), 32)
    assert torch.equal(ours.dequantized()[:, 32:], round_groups(weight, 32).dequantized()[:, 32:])


def test_correction_factor_inverts_the_damped_gram_matrix() -> None:
    x = correlated_inputs(300, 96)
    gram = x.t() @ x
    factor = correction_factor(gram).double()
    damped = gram.double() + 0.01 * gram.diagonal().double().mean() * torch.eye(96)
    assert torch.equal(factor, factor.triu())
    torch.testing.assert_close(factor.t() @ factor @ damped, torch.eye(96).double(), atol=1e-3, rtol=0.0)


def test_correction_factor_of_fewer_inputs_than_columns_is_finite() -> None:
    x = correlated_inputs(5, 96)
    assert torch.isfinite(correction_factor(x.t() @ x)).all()
    assert torch.isfinite(correction_factor(torch.zeros(96, 96))).all()


def test_correction_factor_of_what_no_inputs_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="not finite"):
        correction_factor(torch.full((8, 8), float("nan")))
    with pytest.raises(ConfigError, match="no positive definite"):
        correction_factor(torch.ones(8, 8) - 5.0 * torch.ones(8, 8).triu(1) - 5.0 * torch.ones(8, 8).tril(-1))
