"""Choices of one request on a real model: shared blocks and copies change no token."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.assembly import assemble
from engine.kv_storage.paged_cache import PagedKVCache
from engine.types.request import Request
from tandem.values.block_hash import root_hash
from tandem.values.ids import RequestId
from tandem.values.kv_layout import KVLayout
from tandem.values.sampling import SamplingParams
from tests.unit.engine.test_assembly import SPEC

ROOT = root_hash(secret=SPEC.secret, model_fingerprint="choices")


def generate(choices: Sequence[int], prompt: list[int], params: SamplingParams) -> tuple[list[list[int]], int, int]:
    """Output of each choice, run side by side; also the tokens computed and the blocks copied."""
    parts = assemble(replace(SPEC, num_blocks=32))
    requests = [
        Request(
            request_id=RequestId(f"{k}"),
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            params=params,
            hash_root=ROOT,
            choice_index=k,
            arrival_s=float(k),
        )
        for k in choices
    ]
    for request in requests:
        parts.scheduler.add(request)
    num_computed = num_copies = 0
    while (batch := parts.scheduler.schedule(0.0)) is not None:
        num_computed += batch.num_tokens
        num_copies += len(batch.copies)
        parts.scheduler.commit(batch, parts.runner.execute(batch))
    return [list(request.token_ids[len(prompt) :]) for request in requests], num_computed, num_copies


@pytest.mark.parametrize("length", [21, 32, 33])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_choices_equal_separate_requests(length: int, temperature: float) -> None:
    prompt = [7 * k % 500 + 3 for k in range(length)]
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=5, ignore_eos=True)
    together, num_computed, num_copies = generate(range(4), prompt, params)
    assert num_computed == length + 3 + 4 * 11
    assert num_copies == (0 if length % 16 == 1 else 3)
    alone = [generate([k], prompt, params)[0][0] for k in range(4)]
    assert together == alone
    assert len({tuple(output) for output in together}) > 1 if temperature else together == together[:1] * 4


def test_copy_blocks_covers_all_layers() -> None:
    layout = KVLayout(model_fingerprint="m", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=4, block_size=16)
    cache = PagedKVCache(layout, num_blocks=5)
    cache.tensor.copy_(torch.randn(cache.tensor.shape))
    before = cache.tensor.clone()
    cache.copy_blocks(torch.tensor([1, 1, 4]), torch.tensor([0, 2, 3]))
    assert torch.equal(cache.tensor, before[:, [1, 1, 1, 4, 4]])
