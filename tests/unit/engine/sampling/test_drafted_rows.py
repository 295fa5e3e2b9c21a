"""Rows after drafts are sampled as they would be in later steps, once the drafts had become tokens."""

from array import array
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch

from engine.runner.device_queue import HostQueue
from engine.runner.pending_samples import PendingSamples
from engine.sampling import sampler as sampler_module
from engine.sampling.constraints import AllOf, AllowedTokens, BannedSequences
from engine.sampling.sampler import Sampler, sample_rows
from engine.types.request import Batch, BatchItem, Request, SampledToken
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger

VOCAB = 32


def params(rng: Random) -> SamplingParams:
    return SamplingParams(
        min_tokens=rng.choice([0, 4]),
        temperature=rng.choice([0.0, 0.8, 1.3]),
        top_p=rng.choice([1.0, 0.8]),
        top_k=rng.choice([0, 9]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.4]),
        presence_penalty=rng.choice([0.0, 0.6]),
        frequency_penalty=rng.choice([0.0, 0.9]),
        logit_bias=rng.choice([{}, {5: 2.0, 7: -100.0}]),
        num_logprobs=rng.choice([None, 0, 3]),
        stop_token_ids=(3,),
        seed=rng.randrange(100),
    )


def guide(kind: str | None):
    if kind is None:
        return None
    banned = BannedSequences([[4, 5], [6], [7, 8, 9]])
    return banned if kind == "banned" else AllOf([banned, AllowedTokens(range(0, VOCAB, 2), VOCAB)])


def alone(request: Request, logits: torch.Tensor, seen: list[int], kind: str | None) -> SampledToken | None:
    """What a fresh sampler chooses for the request once it has these drafts."""
    twin = replace(request, token_ids=array("i", [*request.token_ids, *seen]), guide=guide(kind))
    if twin.guide is not None:
        for token in twin.token_ids[twin.num_prompt_tokens :]:
            twin.guide.accept(token)
    batch = Batch(items=(BatchItem(twin, twin.num_tokens - 1, 1, True),))
    return choose(Sampler(eos_token_ids=(2,)), logits[None].clone(), batch)[0]


def choose(sampler: Sampler, logits: torch.Tensor, batch: Batch) -> list[SampledToken | None]:
    return list(PendingSamples(HostQueue(), sampler.choose(logits, sample_rows(batch))).tokens())


@pytest.mark.parametrize("rows_at_once", [1, 5, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_sampler_drafted_rows_equal_rows_of_single_steps(
    seed: int, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over steps that keep some drafts, so that counts have to catch up; however rows are grouped."""
    monkeypatch.setitem(sampler_module._MAX_GROUP_ELEMENTS, "cpu", rows_at_once * VOCAB)
    rng, sampler = Random(seed), Sampler(eos_token_ids=(2,))
    kinds = [rng.choice([None, None, "banned", "allowed"]) for _ in range(5)]
    requests = [ledger.request([rng.randrange(VOCAB) for _ in range(6)], params=params(rng)) for _ in kinds]
    for request, kind in zip(requests, kinds, strict=True):
        request.guide = guide(kind)
    for step in range(8):
        items = []
        for request, kind in zip(requests, kinds, strict=True):
            # Of a guided request every draft is one that may come: the planner cuts the others.
            drafts = [
                rng.choice([0, 10, 12, 14]) if kind else rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 3]))
            ]
            items.append(BatchItem(request, request.num_tokens - 1, 1, True, tuple(drafts)))
        batch = Batch(items=tuple(items))
        logits = torch.randn(batch.num_samples, VOCAB, generator=torch.Generator().manual_seed(99 * seed + step)) * 2
        tokens = choose(sampler, logits.clone(), batch)
        place = 0
        for item, kind in zip(items, kinds, strict=True):
            for i in range(len(item.drafts) + 1):
                assert tokens[place + i] == alone(item.request, logits[place + i], list(item.drafts[:i]), kind)
            # The first sample is always kept; then as if the next drafts had been right.
            kept = [tokens[place].token_id]
            if item.drafts:
                kept += [rng.choice([0, 10, 12]) for _ in range(rng.randrange(len(item.drafts)))]
            for token in kept:
                item.request.token_ids.append(token)
                if item.request.guide is not None:
                    assert item.request.guide.accept(token)
            place += 1 + len(item.drafts)


def test_sampler_row_after_refused_draft_gets_no_token() -> None:
    request = ledger.request([1, 2], params=SamplingParams(temperature=0.0))
    request.guide = AllowedTokens([4, 6], VOCAB)
    batch = Batch(items=(BatchItem(request, 1, 1, True, (4, 5, 6)),))
    tokens = choose(Sampler(eos_token_ids=()), torch.zeros(4, VOCAB), batch)
    assert [token and token.token_id for token in tokens] == [4, 4, None, None]
    assert request.guide.num_tokens == 0
    bits = np.zeros(1, dtype=np.int32)
    request.guide.allow(bits)
    assert bits[0] == 1 << 4 | 1 << 6
