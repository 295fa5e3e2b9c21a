"""Thousands of hand-offs between real workers, each with an injected fault. See plan.py for the faults."""

from collections.abc import Sequence

import pytest

from kv_transfer.layout.lanes import lanes_between
from tests.proofs.faults.campaign import campaign, check_campaign, replay
from tests.proofs.faults.owners import first_sent
from tests.proofs.faults.plan import plan_batch
from tests.proofs.faults.shares import COUNTED, NIGHTLY_COUNT, share

_CI_COUNT = 2_000


@pytest.mark.parametrize("transport", COUNTED)
@pytest.mark.in_turns
def test_fault_campaign_commits_no_wrong_byte_and_leaks_no_block(transport: str) -> None:
    check_campaign(transport, count=share(transport, _CI_COUNT), seed=1)


def test_campaign_shares_add_up_to_the_full_count() -> None:
    for count in (_CI_COUNT, NIGHTLY_COUNT):
        assert sum(share(transport, count) for transport in COUNTED) >= count


def test_batch_plan_is_determined_by_its_seed() -> None:
    assert plan_batch("tcp", 7) == plan_batch("tcp", 7)
    assert plan_batch("tcp", 7) != plan_batch("tcp", 8)
    assert plan_batch("tcp", 7) != plan_batch("tls", 7)


@pytest.mark.parametrize("index", [None, 1])
def test_batch_can_be_replayed_whole_or_by_handoff(index: int | None) -> None:
    report = replay("memory", 3, index)
    assert not report.violations
    assert report.count + report.num_undisturbed == (1 if index is not None else len(plan_batch("memory", 3).transfers))


def seeds_of(violations: Sequence[str]) -> set[int]:
    return {int(violation.split(":")[0].split()[1]) for violation in violations}


def test_violation_report_names_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: object, blocks: object) -> None:
        del blocks
        self.violations.append("seen")

    monkeypatch.setattr("tests.proofs.faults.pools.GuardedPool._check", wrong)
    report = campaign("memory", count=10_000, seed=40)
    assert 40 in seeds_of(report.violations), "it stops at the first round"
    assert report.count < 1000


def test_batches_go_between_pools_in_regions_too() -> None:
    """A good share of those that the campaign runs, of every combination."""
    plans = [plan_batch("tcp", seed) for seed in range(100)]
    kinds = {(plan.source.num_regions > 1, plan.destination.num_regions > 1) for plan in plans}
    assert len(kinds) == 4
    assert sum(len(lanes_between(plan.source, plan.destination)) > 1 for plan in plans) > 30


def test_batches_keep_windowed_layers_apart_too() -> None:
    """A good share of those that the campaign runs, and of most of their hand-offs something is not sent."""
    plans = [plan for seed in range(100) if (plan := plan_batch("tcp", seed)).source.windowed_layers]
    assert len(plans) > 10
    assert {len(plan.source.groups) for plan in plans} >= {2, 3}
    skipped = [
        first_sent(plan.destination, transfer.num_tokens, transfer.held_tokens) > 0
        for plan in plans
        for transfer in plan.transfers
    ]
    assert sum(skipped) > len(skipped) / 2
