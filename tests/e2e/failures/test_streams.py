"""Workers that are killed, frozen, thawed or drained under 32 live streams: every text equals an undisturbed run's."""

from typing import Any

import pytest

from tests.proofs.kills.campaign import PATIENT, Workers
from tests.proofs.streams.campaign import NUM_STREAMS, SHAPE, Campaign, Fault, learn, lines, ranked
from tests.support.running_cluster import running


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "faults",
    [
        {Fault.KILL: 8, Fault.FREEZE: 1, Fault.THAW: 1, Fault.DRAIN: 1},
        pytest.param({Fault.KILL: 200}, marks=pytest.mark.slow),
        pytest.param({Fault.FREEZE: 10, Fault.THAW: 10, Fault.DRAIN: 20}, marks=pytest.mark.slow),
    ],
    ids=["eleven", "two-hundred-kills", "freezes-and-drains"],
)
@pytest.mark.turn(2)
async def test_streams_under_faults_are_complete_and_equal(oracle, fork_servers, faults: dict[Fault, int]) -> None:
    await check(oracle, fork_servers, faults, SHAPE, NUM_STREAMS)


@pytest.mark.timeout(3600)
@pytest.mark.slow
async def test_streams_of_workers_whose_ranks_are_killed_are_complete_and_equal(oracle, fork_servers) -> None:
    await check(oracle, fork_servers, {Fault.KILL: 15, Fault.RANK: 35}, ranked(2, 2), NUM_STREAMS // 2)


async def check(oracle, fork_servers, faults: dict[Fault, int], shape: dict[str, Any], num_streams: int) -> None:
    num_faults = sum(faults.values())
    async with running(command=fork_servers.command, policy=PATIENT, **shape) as cluster:
        known = await learn(cluster.local.http_url, oracle, 9 if num_faults < 20 else 24, seed=num_faults)
        workers = Workers(cluster, fork_servers.folder)
        report = await Campaign(workers, known, seed=num_faults, num_streams=num_streams).run(faults)
    print(*lines(report), sep="\n")
    assert not report.problems, "\n".join([*lines(report), *cluster.logs.tracebacks()])
    assert len(report.injected) == num_faults
    assert report.num_continued["worker_lost"] > num_faults
