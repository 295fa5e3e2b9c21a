"""Placement on a small load: nearly the hits of one shared cache, and less queueing than least backlog."""

import pytest

from cluster.simulator.model.report import Report
from cluster.simulator.studies.placement import PlacementCase, PlacementResult, compare_placement, placement_table
from tests.support.cluster.small_clusters import load

CASE = PlacementCase(num_workers=4, num_blocks=3_000)


@pytest.fixture(scope="module")
def result() -> PlacementResult:
    trace = load(500, rate=20.0, prefix=256, prompt=400.0, turns=5.0)
    return compare_placement(trace, CASE, ("random", "least_load", "tandem"), seed=1)


def of(result: PlacementResult, policy: str) -> Report:
    return next(report for report in result.reports if report.policy == policy)


def test_tandem_placement_nears_hit_rate_of_shared_cache(result: PlacementResult) -> None:
    assert result.share_of_ideal(of(result, "tandem")) >= 0.97
    assert result.share_of_ideal(of(result, "random")) < 0.8


def test_placement_no_policy_queues_longer_than_least_backlog(result: PlacementResult) -> None:
    assert of(result, "tandem").queue_ms.p99 <= of(result, "least_load").queue_ms.p99


def test_placement_table_lists_every_policy(result: PlacementResult) -> None:
    lines = placement_table(result).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["shared", "random", "least_load", "tandem"]
