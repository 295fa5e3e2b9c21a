"""The cost of KV: exactly the blocks held times the seconds."""

from array import array

import pytest

from engine.scheduler.scheduler import Scheduler
from engine.types.request import BlockSeconds, Request
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger


def test_block_seconds_sum_blocks_over_time() -> None:
    held = BlockSeconds()
    held.change(3, 10.0)
    held.change(4, 12.0)
    assert held.until(13.0) == 3 * 2.0 + 4 * 1.0
    held.change(0, 20.0)
    assert held.until(99.0) == 3 * 2.0 + 4 * 8.0


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_block_seconds_cover_admission_to_end(num_tokens: int) -> None:
    """After every step the sum equals an observer's who reads the block table at every moment."""
    now_s, expected = 100.0, 0.0
    scheduler = Scheduler(ledger.config(), BlockHasher(ledger.SECRET), clock=lambda: now_s)
    request = Request(
        request_id=RequestId("r"),
        token_ids=array("i", range(30)),
        num_prompt_tokens=30,
        params=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        hash_root=ledger.ROOT,
        arrival_s=now_s,
    )
    scheduler.add(request)
    now_s += 5.0
    assert request.held.until(now_s) == 0.0
    runner = ledger.LedgerRunner()
    while (batch := scheduler.schedule(now_s)) is not None:
        held = len(request.block_table)
        assert held >= 2
        now_s += 0.25
        expected += held * 0.25
        scheduler.commit(batch, runner.execute(batch))
    assert request.finish_reason is not None
    assert request.held.until(now_s + 1000.0) == pytest.approx(expected)
