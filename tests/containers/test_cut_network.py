"""Seven machines with network partitions between any two, and crashes with a return under another address."""

import random
from pathlib import Path

import pytest

from tests.containers.campaign import Campaign, Cut, Death, Report, learn, lines
from tests.containers.engine import Engine
from tests.containers.images import Images
from tests.containers.nodes import NODES, Nodes, pairs
from tests.support.oracle import Oracle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
NUM_KNOWN = 16
_CUTS_S = (0.4, 8.0)
"""Shorter than the time after which anybody is given up, and longer than every lease."""


def blows(seed: int) -> list[Cut | Death]:
    """Each pair of machines once, each machine twice."""
    draw = random.Random(seed)
    cuts = [Cut(one=one, other=other, seconds=draw.uniform(*_CUTS_S)) for one, other in pairs()]
    return [*cuts, *(Death(name=name, silently=silently) for name in NODES for silently in (False, True))]


async def test_network_cuts_and_lost_machines_cost_no_answer(engine: Engine, images: Images, tmp_path: Path) -> None:
    with Nodes(engine, images) as nodes:
        campaign = Campaign(nodes, (), seed=1)
        await campaign.until_whole("start")
        assert not campaign.report.problems
        known = await learn(nodes, Oracle(), NUM_KNOWN, seed=1)
        report: Report = await Campaign(nodes, known, seed=1).run(blows(1))
        print(*lines(report), sep="\n", flush=True)
        logs = "\n".join(f"== {name}\n{nodes.log(name)}" for name in nodes.addresses)
    (tmp_path / "logs.txt").write_text(logs)
    assert not report.problems, f"logs: {tmp_path / 'logs.txt'}"
    assert len(report.blows) == 35
    assert report.num_answers > 100
