"""Compiled sampling against the torch reference: same tokens for the same logits, parameters and noise."""

import random

import numpy as np
import pytest
import torch

from engine.kernels.cpu.library import load_kernels
from engine.kernels.cpu.sampling import CpuSampling
from engine.sampling.backend import UNUSABLE, DrawParams, TorchSampling, forbid_by_torch_
from engine.types.token_guide import num_words


@pytest.fixture(scope="module")
def library():
    return load_kernels()


def draw_params(rng, rows):
    def column(dtype, choose):
        return torch.tensor([choose() for _ in range(rows)], dtype=dtype)

    return DrawParams(
        temperature=column(torch.float32, lambda: rng.choice([0.3, 0.7, 1.0, 1.5])),
        min_p=column(torch.float32, lambda: rng.choice([0.0, 0.0, 0.01, 0.1, 0.5, 1.0])),
        top_p=column(torch.float32, lambda: rng.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.95, 0.999])),
        top_k=column(torch.int64, lambda: rng.choice([0, -1, 1, 2, 5, 50, 1000, 10**6])),
        seed=column(torch.int64, lambda: rng.getrandbits(63) - 2**62),
        position=column(torch.int64, lambda: rng.randrange(5000)),
        choice=column(torch.int64, lambda: rng.randrange(16)),
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab_size", [1, 3, 63, 64, 65, 2048, 32_003])
def test_cpu_sampling_draws_reference_token(library, vocab_size, threads):
    rng = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    ours, reference = CpuSampling(library, threads), TorchSampling()
    for spread in (0.5, 2.0, 6.0):
        logits = torch.randn(17, vocab_size) * spread
        logits[3] = (logits[3] * 4).round() / 4  # many ties
        logits[4, : vocab_size // 2] = float("-inf")  # banned
        logits[5] = -logits[5].abs() - 1.0
        params = draw_params(rng, 17)
        assert torch.equal(ours.draw(logits, params), reference.draw(logits, params))


@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_sampling_with_ties_does_not_depend_on_batch(library, kernels):
    """Logits equal to the k-th are kept, and top-p's share is of all that are kept, whatever other rows keep."""
    sampling = CpuSampling(library, 1) if kernels == "compiled" else TorchSampling()
    tied, other = torch.tensor([[2.0] + [1.0] * 30 + [0.0] * 33]), torch.randn(1, 64)
    chosen = set()
    for seed in range(50):
        both = DrawParams(
            temperature=torch.ones(2),
            min_p=torch.zeros(2),
            top_p=torch.tensor([0.45, 0.45]),
            top_k=torch.tensor([2, 0]),
            seed=torch.tensor([seed, seed]),
            position=torch.tensor([3, 3]),
            choice=torch.tensor([0, 0]),
        )
        token = sampling.draw(tied.clone(), both.rows(0, 1))
        assert token == sampling.draw(torch.cat([tied, other]), both)[0]
        chosen.add(int(token))
    assert len(chosen) > 10


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1000, 4099])
def test_cpu_argmax_equals_numpy(library, vocab_size):
    rng = np.random.default_rng(vocab_size)
    ours = CpuSampling(library, 2)
    for _ in range(20):
        logits = rng.normal(size=(5, vocab_size)).astype(np.float32)
        logits[1] = np.round(logits[1])
        logits[2] = -np.inf
        logits[3, rng.integers(vocab_size)] = np.nan
        assert np.array_equal(ours.argmax(torch.from_numpy(logits)).numpy(), logits.argmax(axis=-1))
        logits[4, rng.integers(vocab_size)] = np.inf
        given = torch.from_numpy(logits)
        chosen = ours.choose(given, None)
        assert torch.equal(chosen, TorchSampling().choose(given, None))
        assert np.flatnonzero(chosen == UNUSABLE).tolist() == [2, 3, 4]


def test_cpu_sampling_noise_has_gumbel_distribution(library):
    weights = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    rows = 20_000
    ones = torch.ones(rows)
    params = DrawParams(
        temperature=ones,
        min_p=torch.zeros(rows),
        top_p=ones,
        top_k=torch.zeros(rows, dtype=torch.int64),
        seed=torch.arange(rows),
        position=torch.zeros(rows, dtype=torch.int64),
        choice=torch.zeros(rows, dtype=torch.int64),
    )
    drawn = CpuSampling(library, 2).draw(weights.log().expand(rows, -1), params)
    share = torch.bincount(drawn, minlength=5) / rows
    assert (share - weights).abs().max() < 0.015  # more than four standard deviations


def test_cpu_sampling_single_candidate_is_chosen(library):
    logits = torch.full((4, 300), float("-inf"))
    logits[torch.arange(4), torch.tensor([0, 77, 255, 299])] = 1.0
    params = draw_params(random.Random(1), 4)
    assert CpuSampling(library, 1).draw(logits, params).tolist() == [0, 77, 255, 299]


@pytest.mark.parametrize("vocab_size", [64, 150, 2048])
@pytest.mark.parametrize("guided", [[0, 2, 4], [1, 2, 3], [3]])
def test_forbid_agrees_in_all_implementations(library, vocab_size, guided):
    bits = torch.randint(-(2**31), 2**31, (len(guided), num_words(vocab_size)), dtype=torch.int32)
    rows, logits = torch.tensor(guided), torch.randn(5, vocab_size)
    places = torch.arange(vocab_size)
    expected = logits.clone()
    for row, words in zip(guided, bits, strict=True):
        expected[row][(words[places // 32] >> (places % 32)) & 1 == 0] = float("-inf")
    for forbid_ in (CpuSampling(library, 1).forbid_, TorchSampling().forbid_, forbid_by_torch_):
        found = logits.clone()
        forbid_(found, rows, bits)
        assert torch.equal(found, expected)


def test_forbid_respects_row_stride(library):
    logits = torch.randn(3, 128)
    found = logits[:, :64]
    CpuSampling(library, 1).forbid_(found, torch.tensor([1]), torch.zeros(1, 2, dtype=torch.int32))
    assert found[1].isneginf().all()
    assert logits[1, 64:].isfinite().all()
    assert found[0].isfinite().all()
    assert found[2].isfinite().all()
