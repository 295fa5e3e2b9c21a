"""Smoothing moves range into weights, and changes no function: of any family, in any dtype of its norms."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.config import load_model_config
from engine.model.parameters import StoredPart, parameter_table
from engine.quantize.rounding import round_rows
from engine.quantize.smoothing import fold, norm_readers, smoothing_factors
from tests.support.engine.families import DENSE_CASES, FamilyCase
from tests.support.engine.paged_harness import Session, load_plain, random_tokens

PROJECTIONS = ("qkv", "gate_up", "output", "down")


def smooth(folder: Path, seed: int) -> int:
    """Fold random factors into all norms of a saved model that projections read; returns how many there are."""
    spec = load_model_config(folder)
    table, file = parameter_table(spec), folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    generator, count = torch.Generator().manual_seed(seed), 0
    for index, layer in enumerate(spec.layers):
        for readers in norm_readers(layer):
            key = f"layers.{index}.{readers.norm}"
            parts = [part for end in ("weight", "bias") for part in table.get(f"{key}.{end}", ())]
            factors = torch.rand(spec.hidden_size, generator=generator) * 3 + 0.2
            changed, applied = fold({part: tensors[part.name] for part in parts}, factors)
            tensors |= changed
            for projection in readers.projections:
                for name in {part.name for part in table[f"layers.{index}.{projection}.weight"]}:
                    tensors[name] = tensors[name].float() * applied
            count += 1
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return count


@pytest.mark.parametrize("case", DENSE_CASES, ids=lambda case: case.name)
def test_smoothed_model_computes_the_same(case: FamilyCase, tmp_path: Path) -> None:
    case.save(case.model(num_hidden_layers=case.layers or 2), tmp_path)
    tokens = random_tokens(random.Random(case.name), 30)

    def logits() -> torch.Tensor:
        session = Session(load_plain(tmp_path))
        return session.logits(session.request(tokens), len(tokens))

    before = logits()
    count = smooth(tmp_path, seed=3)
    spec = load_model_config(tmp_path)
    per_layer = 0 if not spec.layers[0].has_input_norms else 1 if spec.layers[0].is_parallel else 2
    assert count == per_layer * spec.num_layers
    torch.testing.assert_close(logits(), before, atol=2e-4, rtol=0.0)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fold_makes_up_for_the_rounding_of_the_norm(dtype: torch.dtype, offset: float) -> None:
    weight = (torch.randn(64) * 0.1 + 1.0 - offset).to(dtype)
    bias = torch.randn(64).to(dtype)
    parts = {
        StoredPart(name="n.weight", shape=(64,), offset=offset): weight,
        StoredPart(name="n.bias", shape=(64,)): bias,
    }
    changed, applied = fold(parts, torch.rand(64) * 3 + 0.2)
    assert {tensor.dtype for tensor in changed.values()} == {dtype}
    scale, new = weight.float() + offset, changed["n.weight"].float() + offset
    torch.testing.assert_close(new * applied, scale, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(changed["n.bias"].float() * applied, bias.float(), rtol=5e-3, atol=1e-6)


def test_fold_channels_that_would_leave_the_dtype_keep_their_range() -> None:
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0]).half()
    changed, applied = fold({StoredPart(name="n.weight", shape=(4,)): weight}, torch.tensor([1e-6, 1e9, 2.0, 2.0]))
    assert changed["n.weight"].tolist() == [1.0, 1.0, 0.0, 0.5]
    assert applied.tolist() == [1.0, 1.0, 1.0, 2.0]


def test_smoothing_factors_balance_inputs_and_weights() -> None:
    weights = [torch.tensor([[1.0, 4.0, 0.0]]), torch.tensor([[-2.0, 1.0, 0.0]])]
    factors = smoothing_factors(torch.tensor([8.0, 1.0, 3.0]), weights)
    assert factors.tolist() == [2.0, 0.5, 1.0]
    assert smoothing_factors(torch.tensor([0.0]), [torch.ones(1, 1)]).tolist() == [1.0]


def test_smoothing_loses_less_where_a_channel_of_the_inputs_is_large() -> None:
    x, weight = torch.randn(100, 64), torch.randn(48, 64)
    x[:, 5] *= 60.0
    exact = x @ weight.t()
    factors = smoothing_factors(x.abs().amax(dim=0), [weight])
    lost = [
        (round_rows(inputs).dequantized() @ round_rows(matrix).dequantized().t() - exact).square().mean()
        for inputs, matrix in ((x / factors, weight * factors), (x, weight))
    ]
    assert lost[0] < 0.2 * lost[1]
