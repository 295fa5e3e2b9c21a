"""The full count of faulty hand-offs between workers of one host: a part of the nightly of its own."""

import pytest

from tests.proofs.faults.campaign import check_campaign
from tests.proofs.faults.shares import NIGHTLY_COUNT, share


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_full_campaign_commits_no_wrong_byte_and_leaks_no_block(transport: str) -> None:
    check_campaign(transport, count=share(transport, NIGHTLY_COUNT), seed=1_000_000)
