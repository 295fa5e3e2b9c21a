"""Every family over several ranks: their parts, summed where the decoder sums them, give the whole model's logits."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

from tests.support.engine.families import FAMILY_CASES, FamilyCase
from tests.support.engine.paged_harness import Session, load_plain, random_tokens, reference_logits
from tests.support.engine.thread_ranks import ThreadRanks


@pytest.mark.parametrize("size", [2, 4])  # 4 ranks share 2 key-value heads
@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_family_ranks_sum_to_the_whole(case: FamilyCase, size: int, tmp_path: Path) -> None:
    reference = case.model()
    case.save(reference, tmp_path)
    tokens = random_tokens(random.Random(case.name), 30)
    shared: list[Tensor | None] = [None] * size
    meeting = Barrier(size)

    def run(rank: int) -> Tensor:
        group = ThreadRanks(rank, shared, meeting)
        session = Session(load_plain(tmp_path, group=group), seed=7)  # type: ignore[arg-type]
        request = session.request(tokens, capacity=32)
        return torch.cat([session.logits(request, count) for count in (17, 12, 1)])

    with ThreadPoolExecutor(size) as pool:
        logits = list(pool.map(run, range(size)))
    assert logits[0].shape == (30, 97)
    torch.testing.assert_close(logits[0], reference_logits(reference, tokens), atol=1e-4, rtol=0.0)
