"""Thousands of hand-offs between real workers, each of which something goes wrong with. See plan.py for what can."""

from collections.abc import Sequence

import pytest

from tests.proofs.faults.campaign import Tally, campaign, replay
from tests.proofs.faults.plan import Kind, plan_batch
from tests.proofs.faults.shares import COUNTED, share

_CI, _NIGHTLY = 2_000, 100_000


def run(transport: str, count: int, seed: int) -> Tally:
    tally = campaign(transport, count=count, seed=seed)
    print(tally.table())
    return tally


def check(tally: Tally, count: int) -> None:
    assert not tally.violations, "replay with: python -m tests.proofs.faults --transport NAME --replay SEED"
    assert tally.count >= count
    hurt = {kind for _transport, kind, _outcome in tally.wounds}
    assert hurt == set(Kind)
    assert sum(n for (_, outcome), n in tally.transfers.items() if outcome.startswith("committed")) > count / 2


@pytest.mark.parametrize("transport", COUNTED)
@pytest.mark.in_turns
def test_no_wrong_byte_is_committed_and_no_block_leaks(transport: str) -> None:
    count = share(transport, _CI)
    check(run(transport, count, seed=1), count)


@pytest.mark.slow
@pytest.mark.parametrize("transport", COUNTED)
def test_nor_in_the_full_count(transport: str) -> None:
    count = share(transport, _NIGHTLY)
    check(run(transport, count, seed=1_000_000), count)


def test_the_shares_make_up_the_whole() -> None:
    for count in (_CI, _NIGHTLY):
        assert sum(share(transport, count) for transport in COUNTED) >= count


def test_a_seed_names_one_batch() -> None:
    assert plan_batch("tcp", 7) == plan_batch("tcp", 7)
    assert plan_batch("tcp", 7) != plan_batch("tcp", 8)
    assert plan_batch("tcp", 7) != plan_batch("tls", 7)


@pytest.mark.parametrize("index", [None, 1])
def test_a_batch_can_be_run_again_whole_or_one_hand_off_of_it(index: int | None) -> None:
    tally = replay("memory", 3, index)
    assert not tally.violations
    assert tally.count + tally.num_unhurt == (1 if index is not None else len(plan_batch("memory", 3).transfers))


def seeds_of(violations: Sequence[str]) -> set[int]:
    return {int(violation.split(":")[0].split()[1]) for violation in violations}


def test_whoever_finds_something_is_told_where(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: object, blocks: object) -> None:
        del blocks
        self.violations.append("seen")

    monkeypatch.setattr("tests.proofs.faults.pools.GuardedPool._check", wrong)
    tally = campaign("memory", count=10_000, seed=40)
    assert 40 in seeds_of(tally.violations), "it stops at the first round"
    assert tally.count < 1000
