"""The generator against its published vectors, and the noise against its distribution."""

import pytest
import torch

from engine.sampling.backend import gumbel_noise, philox4x32

# Random123's kat_vectors, "philox4x32 10": counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def word(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_matches_known_answers(counter, key, expected):
    c, k = [word(v) for v in counter], [word(v) for v in key]
    assert tuple(int(w) for w in philox4x32((c[0], c[1], c[2], c[3]), (k[0], k[1]))) == expected


def noise(seeds, positions, choices, vocab_size=1001):
    return gumbel_noise(*(torch.tensor(v, dtype=torch.int64) for v in (seeds, positions, choices)), vocab_size)


def test_philox_row_depends_on_seed_position_and_choice_only():
    rows = [(0, 0, 0), (1, 0, 0), (-1, 0, 0), (2**63 - 1, 5, 1), (0, 1, 0), (0, 0, 1), (-(2**63), 0, 0), (2**32, 0, 0)]
    together = noise(*zip(*rows, strict=True))
    for i, row in enumerate(rows):
        assert torch.equal(noise(*([v] for v in row))[0], together[i])
    assert len({tuple(row.tolist()) for row in together}) == len(rows)


def test_philox_noise_is_independent_of_vocabulary_size():
    assert torch.equal(noise([9], [4], [0], 40)[:, :37], noise([9], [4], [0], 37))


def test_philox_noise_is_standard_gumbel_and_finite():
    sample = noise(list(range(300)), [3] * 300, [0] * 300).double().flatten()
    assert torch.isfinite(sample).all()
    assert abs(sample.mean() - 0.5772) < 0.01
    assert abs(sample.var() - 1.6449) < 0.03
    for quantile in (0.01, 0.5, 0.99):
        expected = -torch.log(-torch.log(torch.tensor(quantile, dtype=torch.float64)))
        assert abs((sample < expected).double().mean() - quantile) < 0.005
