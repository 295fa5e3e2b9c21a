"""`nixl` between two processes with pools in GPU memory: every byte, damage, revocations, a receiver that closes."""

import numpy as np
import pytest
import torch

from kv_transfer.transports.nixl.agent import problem
from kv_transfer.transports.same_host import has_rdma
from tests.support.kv_transfer.nixl_pools import HOST, Pools, check_pair, place
from tests.support.kv_transfer.transport_needs import require

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_rdma(), reason="needs an RDMA device: nixl is not used between GPUs over TCP"),
]

FIRST = "cuda:0"
LAST = f"cuda:{max(0, torch.cuda.device_count() - 1)}"
"""Another GPU, where there is one."""


@pytest.mark.parametrize(
    ("here", "there", "seed"), [(FIRST, LAST, 1), (LAST, FIRST, 2), (FIRST, FIRST, 3), (HOST, LAST, 4), (LAST, HOST, 5)]
)
def test_nixl_between_gpus_moves_every_byte_and_stops(here: str, there: str, seed: int) -> None:
    require("nixl")
    check_pair(seed, here, there)


def test_nixl_problem_finds_none_with_this_gpu() -> None:
    require("nixl")
    layout = Pools.from_seed(1).pairing.source
    region, _ = place(np.zeros(8 * layout.region_block_bytes, np.uint8), layout, FIRST)
    assert problem(region.device) is None
