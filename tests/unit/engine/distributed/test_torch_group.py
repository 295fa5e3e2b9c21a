"""Sums and gathers over real gloo: exact, equal on every rank, and in rank order when requested."""

import os

import pytest
import torch

from engine.distributed.links.lost import RankLost
from engine.distributed.torch_group import TorchGroup
from engine.model.parallel_group import SoloGroup
from tests.support.engine.thread_ranks import run_ranks

LARGE = 40_000
"""Elements beyond what is summed in rank order for speed."""


def values(rank: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_sums_are_equal_on_every_rank(size: int) -> None:
    kinds = [(3, 5, torch.float32), (2, LARGE, torch.float32), (7, 9, torch.bfloat16), (1, LARGE, torch.float16)]

    def work(group):
        made = [values(group.rank, *shape, dtype=dtype) for *shape, dtype in kinds]
        # A column slice is not contiguous: its neighbours stay as they are.
        wide = values(group.rank, 4, 6)
        kept, part = wide.clone(), wide[:, 1:3]
        for tensor in (*made, part):
            assert group.all_reduce_(tensor) is tensor
        kept[:, 1:3] = part
        assert torch.equal(kept, wide)
        return [*made, part]

    results = run_ranks(size, work)
    expected = [sum(values(r, *shape, dtype=dtype).double() for r in range(size)) for *shape, dtype in kinds]
    expected.append(sum(values(r, 4, 6)[:, 1:3].double() for r in range(size)))
    for each in results:
        assert all(torch.equal(mine, first) for mine, first in zip(each, results[0], strict=True))
        for mine, right in zip(each, expected, strict=True):
            tolerance = 1e-5 if mine.dtype == torch.float32 else 0.1
            torch.testing.assert_close(mine.double(), right, atol=tolerance, rtol=0.02)


def test_all_reduce_fixed_order_is_independent_of_neighbours() -> None:
    def work(group):
        whole = values(group.rank, 5 * LARGE)
        parts = [part.clone() for part in whole.split(LARGE // 7)]
        group.all_reduce_(whole)
        return whole, torch.cat([group.all_reduce_(part) for part in parts])

    for whole, pieces in run_ranks(4, work, fixed_order=True):
        assert torch.equal(whole, pieces)
        ordered = values(0, 5 * LARGE)
        for rank in (1, 2, 3):
            ordered += values(rank, 5 * LARGE)
        assert torch.equal(whole, ordered)


def test_torch_group_gather_returns_on_rank_0_only() -> None:
    results = run_ranks(3, lambda group: group.gather(values(group.rank, 4, 2)))
    assert all(torch.equal(part, values(rank, 4, 2)) for rank, part in enumerate(results[0]))
    assert (len(results[0]), results[1:]) == (3, [[], []])


def test_torch_group_missing_rank_times_out() -> None:
    fd = os.memfd_create("alone")
    with pytest.raises(RankLost, match="rank 0 did not join the group"):
        TorchGroup(fd, rank=0, size=2, device=torch.device("cpu"), timeout_s=0.2)
    os.close(fd)


def test_torch_group_lost_rank_or_closed_group_raises() -> None:
    def work(group):
        if group.rank == 1:
            return None
        with pytest.raises(RankLost, match="rank 0 lost the other ranks"):
            group.all_reduce_(torch.ones(3))
        group.close()
        with pytest.raises(RankLost, match="closed"):
            group.gather(torch.ones(3))
        return group

    run_ranks(2, work)


def test_torch_group_of_one_is_identity() -> None:
    tensor = torch.ones(3)
    assert SoloGroup().all_reduce_(tensor) is tensor
    assert SoloGroup().gather(tensor) == [tensor]
    SoloGroup().barrier()
