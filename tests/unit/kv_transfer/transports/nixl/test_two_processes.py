"""`nixl` between two processes whose pools are on a device that is the CPU: UCX, its sockets and two agents are real.

tests/gpu has the same on GPUs.
"""

import pytest

from tests.support.kv_transfer.nixl_pools import CPU, HOST, check_pair
from tests.support.kv_transfer.transport_needs import require


@pytest.mark.parametrize(("here", "there", "seed"), [(CPU, CPU, 1), (HOST, CPU, 2), (CPU, HOST, 3)])
def test_nixl_between_processes_moves_every_byte_and_stops(here: str, there: str, seed: int) -> None:
    require("nixl")
    check_pair(seed, here, there)
