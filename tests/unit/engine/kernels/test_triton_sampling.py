"""Sampling kernels against the torch sampler: the same random words, noise and tokens."""

import random
from array import array

import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import interpreted, interpreting  # isort: skip
import triton
import triton.language as tl

from engine.kernels.triton.cutoffs import LEAST, kth_bound, kth_listed, list_groups, order_of
from engine.kernels.triton.noise import accurate_log, gumbel_of, philox_words, uniform_tile
from engine.kernels.triton.sampling import TritonSampling
from engine.sampling.backend import UNUSABLE, DrawParams, LogitEdits, TorchSampling, gumbel_noise, philox4x32
from engine.sampling.sampler import Sampler, SampleRow
from engine.sampling.token_counts import Penalties, TokenCounts
from engine.types.request import Request
from tandem.values.ids import BlockHash, RequestId
from tandem.values.sampling import SamplingParams
from tests.suite import rotation

__all__ = ["interpreted"]


with interpreting():

    @triton.jit
    def words_kernel(out_ptr, position, choice, seed_ptr, BLOCK: tl.constexpr):
        seed = tl.load(seed_ptr)
        quad = tl.arange(0, BLOCK)
        words = philox_words(quad, position, choice, (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32))
        for number in tl.static_range(4):
            tl.store(out_ptr + quad * 4 + number, words[number].to(tl.int64))

    @triton.jit
    def noise_kernel(out_ptr, first, position, choice, seed_ptr, BLOCK: tl.constexpr):
        quads = first // 4 + tl.arange(0, BLOCK // 4)
        tile = uniform_tile(quads, position, choice, tl.load(seed_ptr))
        tl.store(out_ptr + tl.arange(0, BLOCK), gumbel_of(tile))

    @triton.jit
    def log_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
        index = tl.arange(0, BLOCK)
        tl.store(out_ptr + index, accurate_log(tl.load(x_ptr + index)))

    @triton.jit
    def kth_kernel(x_ptr, listed_ptr, bounds_ptr, size, k, GROUP: tl.constexpr, BLOCK: tl.constexpr):
        """Order of the k-th largest, and the bound on it from the largest of each group."""
        index = tl.arange(0, BLOCK)
        orders = order_of(tl.load(x_ptr + index, mask=index < size, other=float("-inf")))
        orders = tl.max(tl.reshape(orders, [BLOCK // GROUP, GROUP]), 1)
        most = tl.max(orders, 0) + 1
        bound = tl.maximum(kth_bound(orders, BLOCK // GROUP, most, k, BLOCK // GROUP), LEAST)
        listed = list_groups(orders, bound, listed_ptr, BLOCK // GROUP)
        tl.store(bounds_ptr, bound)
        tl.store(bounds_ptr + 1, kth_listed(x_ptr, size, 1.0, listed_ptr, listed, bound, most, k, GROUP, 64))


SEEDS = (0, 1, 2**31, 2**32 + 5, 2**63 - 1, -1, -(2**63), 0x123456789ABCDEF)


@pytest.mark.parametrize("seed", SEEDS)
def test_triton_sampling_random_words_match_philox(seed):
    out, quads = torch.empty(64, 4, dtype=torch.int64), torch.arange(64)
    words_kernel[(1,)](out, 77, 3, torch.tensor([seed]), BLOCK=64)
    key = torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF)
    expected = philox4x32((quads, torch.tensor(77), torch.tensor(3), torch.tensor(0)), key)
    assert torch.equal(out & 0xFFFFFFFF, torch.stack(expected, -1))


@pytest.mark.parametrize("seed", SEEDS)
def test_triton_sampling_noise_matches_sampler(seed):
    out = torch.empty(1024)
    noise_kernel[(1,)](out, 4096, 12, 1, torch.tensor([seed]), BLOCK=1024)
    expected = gumbel_noise(torch.tensor([seed]), torch.tensor([12]), torch.tensor([1]), 5120)[0, 4096:]
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-6)


def test_triton_log_is_accurate_near_one():
    near_one = 1.0 + torch.linspace(-0.3, 0.3, 1024, dtype=torch.float64).pow(3)
    wide = torch.logspace(-37.5, 38, 1024, dtype=torch.float64)
    for x in (near_one.float(), wide.float()):
        out = torch.empty_like(x)
        log_kernel[(1,)](x, out, BLOCK=1024)
        torch.testing.assert_close(out.double(), x.double().log(), atol=1e-12, rtol=3e-7)


def orders_of(x):
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def test_triton_kth_largest_handles_every_kind_of_float():
    """The order found lies between the k-th largest and the next one below; the groups' bound is at most that."""
    rng, size = random.Random(0), 150  # the last group is not full; all groups are read in three blocks
    x = torch.randn(size, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.linspace(-30, 38, size)
    x[::7] = x[3].clone()
    x[::11] = float("-inf")
    x[::13] = 0.0
    x[::17] = -0.0
    ordered = orders_of(x).sort(descending=True).values.tolist()
    for k in [1, 2, size - 1, size, *(rng.randint(1, size) for _ in range(8))]:
        bounds, listed = torch.empty(2, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
        kth_kernel[(1,)](x, listed, bounds, size, k, GROUP=8, BLOCK=256)
        bound, kth = bounds.tolist()
        lower = [order for order in ordered if order < ordered[k - 1]]
        assert bound <= kth
        assert max(lower[:1], default=-(2**31)) < kth <= max(ordered[k - 1], LEAST.value), k


def draw_params(rng, rows, greedy=0.0):
    def column(dtype, choose):
        return torch.tensor([choose() for _ in range(rows)], dtype=dtype)

    return DrawParams(
        temperature=column(torch.float32, lambda: 0.0 if rng.random() < greedy else rng.choice([0.3, 0.7, 1.0, 1.5])),
        min_p=column(torch.float32, lambda: rng.choice([0.0, 0.0, 0.01, 0.1, 0.5, 1.0])),
        top_p=column(torch.float32, lambda: rng.choice([1.0, 1.0, 0.1, 0.5, 0.9, 0.95, 0.999])),
        top_k=column(torch.int64, lambda: rng.choice([0, -1, 1, 2, 5, 50, 1000, 10**6])),
        seed=column(torch.int64, lambda: rng.getrandbits(63) - 2**62),
        position=column(torch.int64, lambda: rng.randrange(5000)),
        choice=column(torch.int64, lambda: rng.randrange(16)),
    )


SIZES = ((1, 4), (3, 8), (65, 16), (2048, 8), (4099, 8), (32_003, 2))
SPREADS = (0.5, 2.0, 6.0)


def draw_case(vocab_size, rows, spread, seed=0):
    rng = random.Random(vocab_size + seed + int(spread))
    generator = torch.Generator().manual_seed(vocab_size + seed + int(spread))
    logits = torch.randn(rows, vocab_size, generator=generator) * spread
    logits[-1, : vocab_size // 2] = float("-inf")  # banned
    logits[-2] = -logits[-2].abs() - 1.0
    params = draw_params(rng, rows)
    drawn, expected = TritonSampling().choose(logits, params), TorchSampling().choose(logits, params)
    assert torch.equal(drawn, expected)


def shifted(cases, values):
    """Every pair of a case and a value, such that each turn has all cases and, with one or another, all values."""
    return [(case, values[(i + turn) % len(values)]) for i, case in enumerate(cases) for turn in range(len(values))]


@pytest.mark.in_turns
@pytest.mark.parametrize(("size", "spread"), shifted(SIZES, SPREADS))
def test_triton_sampling_draws_reference_token(size, spread):
    draw_case(*size, spread)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize(("vocab_size", "rows"), [(2048, 32), (65_536, 4), (152_064, 2)])
def test_triton_sampling_draws_over_large_vocabularies(vocab_size, rows, spread, seed):
    draw_case(vocab_size, rows, spread, 10 * (seed + 1))


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_triton_sampling_keeps_ties_at_cutoff(cut):
    logits = torch.full((8, 64), -4.0)
    logits[:, ::16] = 2.0  # four equal ones in two groups: each of them is the third, holds the half, is the largest
    rows = len(logits)
    values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **cut}
    params = DrawParams(
        temperature=torch.ones(rows),
        min_p=torch.full((rows,), values["min_p"]),
        top_p=torch.full((rows,), values["top_p"]),
        top_k=torch.full((rows,), values["top_k"]),
        seed=torch.arange(rows),
        position=torch.ones(rows, dtype=torch.int64),
        choice=torch.zeros(rows, dtype=torch.int64),
    )
    drawn = TritonSampling().choose(logits, params)
    assert torch.equal(drawn, TorchSampling().draw(logits, params))
    assert sorted(set(drawn.tolist())) == list(range(0, 64, 16))


HARD_ROWS = {
    "equal": lambda x: torch.full_like(x, -2.5),
    "ties": lambda x: (x * 2.0).round(),
    "zeros of both signs": lambda x: torch.where(x > 1.0, 0.0, torch.where(x > 0.0, -0.0, -1.0)),
    "few are allowed": lambda x: torch.where(torch.arange(len(x)) % 700 == 3, x, float("-inf")),
    "one is allowed": lambda x: torch.where(torch.arange(len(x)) == len(x) - 2, x, float("-inf")),
    "one dominates": lambda x: torch.where(torch.arange(len(x)) == 40, 90.0, x),
    "noise is rounded off": lambda x: (x * 2.0).round() * 1e6,
    "huge": lambda x: x * 1e30,
    "tiny": lambda x: x * 1e-38,
    "ascending": lambda x: x.sort().values,
}


HARD_SIZE = 2100  # a section and a part of one
CUTS = (
    *((0.0, top_p, top_k) for top_p in (1.0, 0.605, 1e-30) for top_k in (0, 1, 70, HARD_SIZE - 1)),
    *((0.0, 1.0, HARD_SIZE), (1.0, 1.0, 0), (1.0, 0.605, 70)),
)
"""Of min-p, top-p and top-k, at their extremes too. No share of equal tokens is a whole number of them: which of two
that is would be up to rounding."""


@pytest.mark.in_turns
@pytest.mark.parametrize(("name", "part"), shifted(HARD_ROWS, range(rotation.TURNS)))
def test_triton_sampling_draws_reference_token_from_hard_row(name, part):
    """With every cut-off; alone and in a batch."""
    row = HARD_ROWS[name](torch.randn(HARD_SIZE, generator=torch.Generator().manual_seed(4)))
    cuts = CUTS[part :: rotation.TURNS]
    min_p, top_p, top_k = (torch.tensor(column) for column in zip(*cuts, strict=True))
    rows = len(cuts)
    params = DrawParams(
        temperature=torch.full((rows,), 0.9),
        min_p=min_p,
        top_p=top_p,
        top_k=top_k,
        seed=torch.arange(rows),
        position=torch.arange(rows) * 3,
        choice=torch.zeros(rows, dtype=torch.int64),
    )
    logits = row.repeat(rows, 1)
    drawn = TritonSampling().choose(logits, params)
    assert torch.equal(drawn, TorchSampling().choose(logits, params))
    assert torch.equal(TritonSampling().choose(logits[2:3], params.rows(2, 3)), drawn[2:3])


@pytest.mark.parametrize("vocab_size", [1, 15, 5000])
def test_triton_argmax_picks_first_of_equals(vocab_size):
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0)).round()
    logits[3] = 1.0
    expected = torch.from_numpy(logits.numpy().argmax(axis=-1))
    assert torch.equal(TritonSampling().choose(logits, None), expected)


def request(rng, vocab_size, row):
    prompt, output = ([rng.randrange(vocab_size) for _ in range(n)] for n in (9, rng.choice([0, 1, 12])))
    return Request(
        request_id=RequestId(str(row)),
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            seed=rng.getrandbits(40),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.7]),
            frequency_penalty=rng.choice([0.0, 0.4, -0.4]),
            logit_bias={rng.randrange(vocab_size): rng.uniform(-3, 3) for _ in range(rng.choice([0, 4]))} or None,
            min_tokens=rng.choice([0, 5]),
            stop_token_ids=(1, 2),
        ),
        hash_root=BlockHash(b""),
        choice_index=rng.randrange(3),
    )


def edits_of(requests, sampler):
    edits = [(i, t, v) for i, r in enumerate(requests) for t, v in (r.params.logit_bias or {}).items()]
    edits += [
        (i, t, float("-inf")) for i, r in enumerate(requests) for t in sampler._banned(SampleRow(r, r.num_tokens))
    ]
    edits.append((-1, 0, 5.0))  # padding
    return LogitEdits(
        rows=torch.tensor([e[0] for e in edits], dtype=torch.int32),
        token_ids=torch.tensor([e[1] for e in edits], dtype=torch.int32),
        values=torch.tensor([e[2] for e in edits]),
    )


def test_triton_sampling_matches_reference_sampler():
    """Biases, bans and penalties too, from device state that the kernel updates."""
    rng, vocab_size, rows = random.Random(5), 600, 24
    requests = [request(rng, vocab_size, row) for row in range(rows)]
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    sampler = Sampler(eos_token_ids=(3,))
    expected = sampler.choose(logits, [SampleRow(r, r.num_tokens) for r in requests]).token_ids.tolist()

    counts = TokenCounts.allocate(rows + 2, vocab_size, "cpu")
    counts.counts.fill_(7)  # what an earlier request left
    slots = rng.sample(range(rows + 2), rows)
    for slot, r in zip(slots, requests, strict=True):
        ids = torch.tensor(r.token_ids, dtype=torch.int64)
        counts.restart(slot, ids[: r.num_prompt_tokens], ids[r.num_prompt_tokens :])
    before = counts.counts.clone()
    original = logits.clone()

    def column(dtype, name):
        return torch.tensor([getattr(r.params, name) for r in requests], dtype=dtype)

    chosen = TritonSampling().choose(
        logits,
        DrawParams(
            temperature=column(torch.float32, "temperature"),
            min_p=column(torch.float32, "min_p"),
            top_p=column(torch.float32, "top_p"),
            top_k=column(torch.int64, "top_k"),
            seed=column(torch.int64, "seed"),
            position=torch.tensor([r.num_output_tokens for r in requests]),
            choice=torch.tensor([r.choice_index for r in requests]),
        ),
        penalties=Penalties(
            counts=counts,
            slots=torch.tensor(slots, dtype=torch.int32),
            repetition=column(torch.float32, "repetition_penalty"),
            presence=column(torch.float32, "presence_penalty"),
            frequency=column(torch.float32, "frequency_penalty"),
        ),
        edits=edits_of(requests, sampler),
    )
    assert chosen.tolist() == expected
    assert torch.equal(logits, original)
    before[torch.tensor(slots), chosen] += 2
    assert torch.equal(counts.counts, before)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is numpy, which warns of NaN
@pytest.mark.parametrize("vocab_size", [9, 5000])
@pytest.mark.parametrize("greedy", [True, False])
def test_triton_sampling_rows_without_candidates_get_no_token(vocab_size, greedy):
    """Both kernels agree on those rows, and the other rows' tokens are unchanged."""
    rng, rows = random.Random(vocab_size), 12
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(1))
    logits[0] = float("nan")
    logits[2] = float("-inf")
    for row, value in ((4, float("nan")), (6, float("inf")), (8, float("-inf"))):
        logits[row, rng.randrange(vocab_size)] = value  # the last of them is a token that is banned
    params = None if greedy else draw_params(rng, rows)
    clean = logits.nan_to_num(0.0, 0.0, 0.0)
    counts = [TokenCounts.allocate(rows, vocab_size, "cpu") for _ in range(2)]
    chosen = []
    for kernels, seen in zip((TritonSampling(), TorchSampling()), counts, strict=True):
        penalties = None
        if params is not None:
            ones, zeros = torch.ones(rows), torch.zeros(rows)
            slots = torch.arange(rows, dtype=torch.int32)
            penalties = Penalties(counts=seen, slots=slots, repetition=ones, presence=zeros, frequency=zeros)
        chosen.append(kernels.choose(logits, params, penalties=penalties))
    assert torch.equal(*chosen)
    assert (chosen[0] == UNUSABLE).nonzero()[:, 0].tolist() == [0, 2, 4, 6]
    good = [1, 3, 5, 7, 9, 10, 11]
    assert torch.equal(chosen[0][good], TorchSampling().choose(clean, params)[good])
    assert torch.equal(*(seen.counts for seen in counts))
    assert counts[0].counts.sum() == (0 if greedy else 2 * (rows - 4))


def test_triton_sampling_rows_without_penalties_need_no_slot():
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    counts = TokenCounts.allocate(1, 100, "cpu")
    penalties = Penalties(
        counts=counts,
        slots=torch.tensor([-1, 0], dtype=torch.int32),
        repetition=torch.ones(2),
        presence=torch.zeros(2),
        frequency=torch.zeros(2),
    )
    params = draw_params(random.Random(0), 2, greedy=1.0)
    chosen = TritonSampling().choose(logits, params, penalties=penalties)
    assert torch.equal(chosen, logits.argmax(-1))
    assert counts.counts.sum() == 2
    assert counts.counts[0, chosen[1]] == 2


@pytest.mark.parametrize("greedy", [0.0, 1.0])
def test_triton_sampling_after_drafts_equals_reference(greedy):
    """Rows that share a slot, each with one draft more; only the first of them is counted."""
    rows, vocab_size = 6, 100
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(3))
    drafts = torch.tensor([[-1, -1], [7, -1], [7, 7], [-1, -1], [-1, -1], [9, -1]])
    slots = torch.tensor([1, 1, 1, -1, 0, 0], dtype=torch.int32)
    some = torch.randint(0, 4, (2, vocab_size), dtype=torch.int32, generator=torch.Generator().manual_seed(4))
    counts = [TokenCounts(counts=some)]
    counts.append(TokenCounts(counts=some.clone()))
    chosen = []
    for kernels, seen in zip((TritonSampling(), TorchSampling()), counts, strict=True):
        penalties = Penalties(
            counts=seen,
            slots=slots,
            repetition=torch.full((rows,), 1.5),
            presence=torch.full((rows,), 0.5),
            frequency=torch.full((rows,), 2.0),
            drafts=drafts,
        )
        chosen.append(kernels.choose(logits, draw_params(random.Random(0), rows, greedy=greedy), penalties=penalties))
    assert torch.equal(*chosen)
    assert torch.equal(*(seen.counts for seen in counts))
