"""Sampling: each parameter against a plain version of its definition, and rows independent of their batch."""

import math
from array import array
from dataclasses import replace
from random import Random

import pytest
import torch

from engine.runner.device_queue import HostQueue
from engine.runner.pending_samples import PendingSamples
from engine.sampling.backend import TorchSampling, adjusted
from engine.sampling.sampler import Sampler, SampleRow
from engine.sampling.token_counts import TokenCounts
from engine.types.request import Request
from tandem.errors import InvariantError
from tandem.values.ids import BlockHash, RequestId
from tandem.values.sampling import SamplingParams

VOCAB = 32
EOS = 2


def make(prompt=(5, 6), output=(), choice=0, **params):
    return Request(
        request_id=RequestId("r"),
        token_ids=array("i", [*prompt, *output]),
        num_prompt_tokens=len(prompt),
        params=SamplingParams(**params),
        hash_root=BlockHash(b""),
        choice_index=choice,
    )


def logits_of(*seeds):
    return torch.stack([torch.randn(VOCAB, generator=torch.Generator().manual_seed(s)) * 2 for s in seeds])


def sample(logits, requests, sampler=None):
    sampler = sampler or Sampler(eos_token_ids=(EOS,))
    chosen = sampler.choose(logits, [SampleRow(request, request.num_tokens) for request in requests])
    return PendingSamples(HostQueue(), chosen).tokens()


def ids(logits, requests):
    return [token.token_id for token in sample(logits, requests)]


def frequencies(row, count=20_000, **params):
    """Observed share of each token over many seeds."""
    requests = [make(seed=seed, **params) for seed in range(count)]
    drawn = torch.tensor(ids(row.expand(count, -1), requests))
    return torch.bincount(drawn, minlength=len(row)) / count


def test_sampler_greedy_takes_largest_logit():
    logits = logits_of(0, 1, 2)
    assert ids(logits, [make(temperature=0.0)] * 3) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_sampler_draws_follow_softmax(temperature):
    row = logits_of(3)[0]
    expected = (row / temperature).softmax(-1)
    assert (frequencies(row, temperature=temperature) - expected).abs().max() < 0.015


@pytest.mark.parametrize(
    "params", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.8, "min_p": 0.05}, {"top_k": 1}]
)
def test_sampler_truncation_keeps_right_tokens(params):
    row = logits_of(4)[0]
    kept = row.clone()
    probabilities = row.softmax(-1)
    kept[probabilities < params.get("min_p", 0.0) * probabilities.max()] = -math.inf
    order = kept.argsort(descending=True)
    kept[order[params.get("top_k", VOCAB) :]] = -math.inf
    total, nucleus = 0.0, params.get("top_p", 1.0)
    for token, share in zip(order.tolist(), kept[order].softmax(-1).tolist(), strict=True):
        if total >= nucleus:
            kept[token] = -math.inf
        total += share
    observed = frequencies(row, **params)
    assert set(observed.nonzero().flatten().tolist()) <= set(kept.isfinite().nonzero().flatten().tolist())
    assert (observed - kept.softmax(-1)).abs().max() < 0.015


def test_sampler_penalties_follow_their_formulas():
    row = logits_of(5)[0]
    prompt, output = [1, 2, 3, 3], [3, 4, 4, 4]
    expected = row.clone()
    for token in {*prompt, *output}:
        expected[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
    for token in set(output):
        expected[token] -= 0.7 * output.count(token) + 0.4
    request = make(prompt, output, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.4)
    kernels = Spy()
    sample(torch.stack([row, row]), [request, make(prompt, output)], Sampler(eos_token_ids=(), kernels=kernels))
    changed = adjusted(torch.stack([row, row]), penalties=kernels.penalties)
    torch.testing.assert_close(changed[0], expected)
    assert torch.equal(changed[1], row)


class Spy(TorchSampling):
    """Records the calls of the kernels, before they have counted the chosen tokens."""

    penalties = None

    def choose(self, logits, params, *, penalties=None, edits=None):
        if penalties is not None:
            counts = TokenCounts(counts=penalties.counts.counts.clone())
            self.penalties = replace(penalties, counts=counts)
        return super().choose(logits, params, penalties=penalties, edits=edits)


def test_sampler_penalty_counts_survive_pause():
    """One sampler over steps of varying batches; each row's counts outlive the steps without it."""
    kept, rng = Sampler(eos_token_ids=(EOS,)), Random(3)
    params = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3}
    requests = [make(prompt=[i, 7], seed=i, temperature=i % 2, **params) for i in range(6)]
    for step in range(40):
        company = rng.sample(requests, rng.randint(1, 4))
        logits = logits_of(*(100 * step + i for i in range(len(company))))
        fresh = ids(logits, company)
        assert [token.token_id for token in sample(logits, company, kept)] == fresh
        for request, token in zip(company, fresh, strict=True):
            request.token_ids.append(token)


def test_sampler_pending_token_is_counted():
    params = {"temperature": 0.0, "repetition_penalty": 3.0}
    logits = logits_of(1).abs() + 1.0
    request, kept = make(**params), Sampler(eos_token_ids=(EOS,))
    first = int(kept.choose(logits, [SampleRow(request, 2)]).token_ids[0])
    second = int(kept.choose(logits, [SampleRow(request, 3)]).token_ids[0])  # its row came before the first was read
    assert second == ids(logits, [make(output=[first], **params)])[0] != first
    with pytest.raises(InvariantError):
        Sampler(eos_token_ids=(EOS,)).choose(logits, [SampleRow(make(**params), 3)])


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 3}, {"seed": 3, "presence_penalty": 0.5}])
def test_sampler_nan_row_has_no_token_and_affects_no_other(params):
    logits = logits_of(*range(6))
    expected = ids(logits, [make(**params, num_logprobs=1) for _ in range(6)])
    logits[1, 5], logits[2], logits[4, 0] = math.nan, -math.inf, math.inf
    requests = [make(**params, num_logprobs=1) for _ in range(6)]
    tokens = sample(logits, requests)
    assert [i for i, token in enumerate(tokens) if token is None] == [1, 2, 4]
    assert [tokens[i].token_id for i in (0, 3, 5)] == [expected[i] for i in (0, 3, 5)]


def test_sampler_penalties_without_output_change_nothing():
    row = logits_of(5)
    assert ids(row, [make(temperature=0.0, presence_penalty=2.0)]) == row.argmax(-1).tolist()


def test_sampler_logit_bias_forces_and_bans():
    logits = logits_of(6, 6)
    best = int(logits[0].argmax())
    biased = [make(temperature=0.0, logit_bias={7: 100.0}), make(temperature=0.0, logit_bias={best: -100.0})]
    first, second = ids(logits, biased)
    assert first == 7
    assert second == int(logits[0].topk(2).indices[1])


def test_sampler_min_tokens_bans_all_end_tokens():
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 9] = 9.0, 8.0
    ends = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (9,)}
    assert ids(logits, [make(output=[5], **ends)])[0] not in (EOS, 9)
    assert ids(logits, [make(output=[5, 5], **ends)]) == [EOS]
    assert ids(logits, [make(output=[5], ignore_eos=True, **ends)]) == [EOS]


def test_sampler_logprobs_are_of_unmodified_distribution():
    logits = logits_of(8, 9, 10)
    requests = [
        make(temperature=0.0, logit_bias={4: 100.0}, num_logprobs=3),
        make(temperature=0.0),
        make(temperature=2.0, top_k=2, num_logprobs=0, seed=5),
    ]
    before = logits.clone()
    biased, plain, drawn = sample(logits, requests)
    assert torch.equal(logits, before)
    expected = logits.log_softmax(-1)
    assert biased.token_id == 4
    assert biased.logprob == pytest.approx(float(expected[0, 4]))
    top = expected[0].topk(3)
    assert [t.token_id for t in biased.top_logprobs] == top.indices.tolist()
    assert [t.logprob for t in biased.top_logprobs] == pytest.approx(top.values.tolist())
    assert plain.logprob is None
    assert plain.top_logprobs == ()
    assert drawn.logprob == pytest.approx(float(expected[2, drawn.token_id]))
    assert drawn.top_logprobs == ()


def test_sampler_row_is_independent_of_batch_and_slot():
    params = [
        {"temperature": 0.9, "seed": 1},
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 5, "seed": 2},
        {"temperature": 0.7, "top_p": 0.6, "repetition_penalty": 1.3, "seed": 3},
        {"temperature": 1.0, "min_p": 0.1, "logit_bias": {3: 2.0}, "seed": 4},
        {"temperature": 1.0, "frequency_penalty": 0.5, "min_tokens": 9, "seed": -(2**63)},
    ]
    logits = logits_of(*range(20, 26))
    requests = [make(output=[8, 9, 9], **p) for p in params]
    together = ids(logits, requests)
    assert together == [ids(logits[i : i + 1], [make(output=[8, 9, 9], **p)])[0] for i, p in enumerate(params)]
    assert together[::-1] == ids(logits.flip(0), requests[::-1])


def test_sampler_choices_and_positions_draw_independently():
    flat = torch.zeros(64, VOCAB)
    by_choice = ids(flat, [make(seed=1, choice=i) for i in range(64)])
    by_position = ids(flat, [make(seed=1, output=[5] * i) for i in range(64)])
    assert len(set(by_choice)) > 20
    assert len(set(by_position)) > 20
    assert by_position == ids(flat, [make(prompt=[7] * 9, seed=1, output=[5] * i) for i in range(64)])
    assert by_choice[0] == by_position[0]
    assert by_choice[1:] != by_position[1:]


def test_sampler_single_allowed_token_is_chosen():
    row = torch.full((VOCAB,), -math.inf)
    row[11] = 0.0
    assert frequencies(row, count=500)[11] == 1.0
