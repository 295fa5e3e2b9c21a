"""The GPU suite's part `cluster`, small on a CPU: it runs, and tells an answer that is not the expected one."""

import time

import pytest

from tandem_bench.client import Client
from tandem_bench.clusters import RunningCluster, Setup, running
from tandem_bench.errors import ClusterFailed
from tandem_bench.gpu.cluster.fleet import Found
from tandem_bench.gpu.cluster.part import cluster
from tandem_bench.gpu.cluster.plan import Plan
from tandem_bench.gpu.cluster.runs import Expected
from tandem_bench.gpu.stage import Note, Stage
from tandem_bench.report import Row

WITH_LAST_QUESTION = {"cluster.shm.8.first", "cluster.shm.8", "cluster.shm.kill prefill"}


@pytest.mark.turn(2)  # most of a minute: eleven processes start
def test_whole_clusters_agree_except_where_the_expected_answer_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    learn = Expected.learn

    async def learn_wrongly(self: Expected, colocated: RunningCluster, client: Client) -> Found:
        found = await learn(self, colocated, client)
        self.tokens[-1] = (self.tokens[-1][0] + 1, *self.tokens[-1][1:])
        return found

    monkeypatch.setattr(Expected, "learn", learn_wrongly)
    stage = Stage(device="cpu", shape="tiny", seed=7, deadline_s=time.monotonic() + 240.0)
    plan = Plan.of(stage)
    found = list(cluster(stage))
    rows = {row.name: row for row in found if isinstance(row, Row)}
    different = {name.removesuffix(": different"): rows[name].value for name in rows if name.endswith(": different")}
    runs = {f"cluster.{way}.{count}" for way, count in (("shm", plan.few), ("shm", plan.many), ("tcp", plan.few))}
    runs |= {f"{name}.first" for name in runs}
    runs |= {"cluster.shm.kill decode", "cluster.shm.kill prefill", "cluster.shm.restored"}
    assert different == {name: int(name in WITH_LAST_QUESTION) for name in runs}
    missed = {name for name, row in rows.items() if row.met is False}
    assert missed == {f"{name}: different" for name in WITH_LAST_QUESTION}
    assert rows["cluster.shm.8: handed over"].value == plan.many
    assert rows["cluster.tcp.4: handed over"].value == plan.few
    assert rows["cluster.shm.8: KV moved"].value > 0
    assert rows["cluster.shm.kill decode: requests moved"].value >= 1
    notes = {note.name: note.text for note in found if isinstance(note, Note)}
    assert "worker decode-0 left" in notes["cluster.shm.complaints"]
    assert "router-0" in notes["cluster.shm.log"]


async def test_cluster_that_does_not_start_leaves_its_log() -> None:
    with pytest.raises(ClusterFailed, match=r"engine\.device is cuda"):
        async with running(Setup(mode="tcp", engine={"device": "cuda"})):
            pytest.fail("there is no GPU")
