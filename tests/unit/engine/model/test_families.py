"""Every family against transformers on small random models, in float32: chunks, decoding, prefix hits, ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.families.registry import FAMILIES
from engine.types.request import BlockTable
from tests.support.engine.families import FAMILY_CASES, FamilyCase
from tests.support.engine.paged_harness import Session, load_plain, random_tokens, reference_logits

TOLERANCE = 1e-4


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0.0)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The most likely tokens, one by one."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_families_all_have_a_case() -> None:
    before = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}  # test_parity
    assert {case.served_as for case in FAMILY_CASES} | before == FAMILIES.keys()


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_families_equal_transformers(case: FamilyCase, tmp_path: Path) -> None:
    rng = random.Random(case.name)
    reference = case.model()
    case.save(reference, tmp_path)
    model = load_plain(tmp_path)
    tokens = random_tokens(rng, 45)
    expected = reference_logits(reference, tokens)
    session = Session(model, seed=7)

    close(session.logits(session.request(tokens, capacity=48), len(tokens)), expected)

    chunked = session.request(tokens, capacity=60)
    while chunked.num_uncomputed_tokens:
        start = chunked.num_computed_tokens
        count = min(chunked.num_uncomputed_tokens, rng.randint(1, 17))
        close(session.logits(chunked, count), expected[start : start + count])

    decoding = session.request(tokens, capacity=48)
    session.logits(decoding, 33)
    for i in range(33, len(tokens)):
        close(session.logits(decoding, 1), expected[i : i + 1])

    hit = session.request(tokens, capacity=24)
    others = list(chunked.block_table)[:6]  # 24 tokens that another request has computed
    hit.block_table = BlockTable([*others, *hit.block_table])
    hit.num_computed_tokens = 24
    close(session.logits(hit, 21), expected[24:])


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_families_choose_transformers_tokens(case: FamilyCase, tmp_path: Path) -> None:
    """Two requests in one mixed batch, in chunks, so that only wanted rows leave the last layer."""
    rng = random.Random(case.name)
    reference = case.model()
    case.save(reference, tmp_path)
    session = Session(load_plain(tmp_path), seed=3)
    prompts = [random_tokens(rng, 21), random_tokens(rng, 9)]
    requests = [session.request(prompt, capacity=40) for prompt in prompts]
    session.run(requests, num_output=8, chunk=6, rng=rng)
    for prompt, request in zip(prompts, requests, strict=True):
        assert list(request.token_ids[len(prompt) :])[:8] == greedy(reference, prompt, 8)
