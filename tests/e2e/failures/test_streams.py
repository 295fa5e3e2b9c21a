"""Workers that are killed, frozen, thawed or told to go under 32 live streams: every text is an undisturbed run's."""

import pytest

from tests.proofs.kills.campaign import PATIENT, Workers
from tests.proofs.streams.campaign import SHAPE, Blow, Campaign, learn, lines
from tests.support.running_cluster import running


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "blows",
    [
        {Blow.KILL: 8, Blow.FREEZE: 1, Blow.THAW: 1, Blow.DRAIN: 1},
        pytest.param({Blow.KILL: 200}, marks=pytest.mark.slow),
        pytest.param({Blow.FREEZE: 10, Blow.THAW: 10, Blow.DRAIN: 20}, marks=pytest.mark.slow),
    ],
    ids=["eleven", "two-hundred-kills", "freezes-and-drains"],
)
@pytest.mark.turn(2)
async def test_streams_under_faults_are_complete_and_equal(oracle, hatchery, blows: dict[Blow, int]) -> None:
    num_blows = sum(blows.values())
    async with running(command=hatchery.command, policy=PATIENT, **SHAPE) as cluster:
        known = await learn(cluster.local.http_url, oracle, 9 if num_blows < 20 else 24, seed=num_blows)
        report = await Campaign(Workers(cluster, hatchery.folder), known, seed=num_blows).run(blows)
    print(*lines(report), sep="\n")
    assert not report.problems, "\n".join(lines(report))
    assert len(report.struck) == num_blows
    assert report.num_continued["worker_lost"] > num_blows
