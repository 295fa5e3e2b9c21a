"""Pools whose workers span several pods: the group, its members and their network policies."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster.cli.main import app
from engine.distributed.links.node_group import NodeGroup
from tandem.config.cluster import ClusterConfig
from tandem.rpc.cluster_credentials import open_credentials
from tandem.rpc.mutual_tls import TlsFiles
from tandem.values.roles import WorkerRole
from tests.chart.pods import POD_IP, environment, read_by
from tests.chart.rendering import Rendered, render
from tests.chart.value_sets import GOOD
from worker.node_group import node_group

POOLS = [
    ("workers over nodes", "prefill"),
    ("workers over nodes", "decode"),
    ("workers over nodes, of GPUs, that grow", "decode"),
    ("workers over nodes in the tls of the cluster", "decode"),
    ("workers of GPUs over nodes in both pools", "decode"),
]
_LABEL = "leaderworkerset.sigs.k8s.io"


class _Unread:
    """Credentials whose files are never read."""

    def __init__(self, files: TlsFiles, *, is_permissive: bool) -> None:
        self.files, self.is_permissive = files, is_permissive


def group_of(config: ClusterConfig, role: str) -> NodeGroup | None:
    return node_group(config, WorkerRole(role), 1, POD_IP, open_credentials(config.cluster.tls, (POD_IP,)))


@pytest.fixture(params=POOLS, ids=lambda pool: "-".join(pool))
def pool(request: pytest.FixtureRequest) -> tuple[Rendered, str, dict[str, Any]]:
    """A release, the pool's name, and its set. The files of cluster.tls need not exist."""
    values, role = request.param
    request.getfixturevalue("monkeypatch").setattr("tandem.rpc.cluster_credentials.ClusterCredentials", _Unread)
    release = render(GOOD[values])
    return release, role, release.named("LeaderWorkerSet", f"-{role}")


def test_node_group_leader_waits_for_members(
    pool: tuple[Rendered, str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, role, one = pool
    group = group_of(read_by(release, role, tmp_path, monkeypatch), role)
    assert group is not None
    # Not given up before the startup probe would: that makes the whole group anew.
    assert group.join_s == release.values[role]["startupSeconds"]
    spec = one["spec"]["leaderWorkerTemplate"]
    assert spec["size"] == group.num_nodes == release.values[role]["nodesPerWorker"]
    assert spec["restartPolicy"] == "RecreateGroupOnPodRestart"
    # A group that still starts is not thrown away with all that its pods have fetched.
    assert one["metadata"]["annotations"] == {f"{_LABEL}/experimental-recreate-group-after-start": "true"}
    [worker] = spec["leaderTemplate"]["spec"]["containers"]
    assert {"name": "ranks", "containerPort": group.port, "protocol": "TCP"} in worker["ports"]
    assert not [made for made in release.of("StatefulSet") if made["metadata"]["name"] == one["metadata"]["name"]]
    assert ("replicas" in one["spec"]) == (release.values[role]["autoscaling"]["mode"] == "none")


def test_node_pod_command_follows_leader(
    pool: tuple[Rendered, str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, role, one = pool
    waits = group_of(read_by(release, role, tmp_path, monkeypatch), role)
    there = read_by(release, f"{role}-node", tmp_path, monkeypatch)
    [node] = one["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]["containers"]
    fields = {
        made["name"]: made["valueFrom"]["fieldRef"]["fieldPath"]
        for made in node["env"]
        if "fieldRef" in made.get("valueFrom", {})
    }
    # The operator's own labels say which group this is, and which of its nodes.
    assert fields["GROUP_INDEX"] == f"metadata.labels['{_LABEL}/group-index']"
    assert fields["NODE_INDEX"] == f"metadata.labels['{_LABEL}/worker-index']"
    [worker] = one["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    revision = {"fieldRef": {"fieldPath": f"metadata.labels['{_LABEL}/template-revision-hash']"}}
    for container in (worker, node):
        assert {"name": "GROUP_REVISION", "valueFrom": revision} in container["env"]
    variables = environment(node) | {"NODE_INDEX": "1", "LWS_LEADER_ADDRESS": "chat-0.chat"}
    arguments = [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], arg) for arg in node["args"]]
    seen: list[NodeGroup] = []
    monkeypatch.setattr(
        "engine.distributed.ranks.node_starter.NodeStarter.run", lambda self: seen.append(self._group) or 0
    )
    monkeypatch.setattr("tandem.config.cluster.load", lambda _path: there)
    monkeypatch.setattr("tandem.telemetry.logs.configure", lambda *_: None)  # the runner's own streams end with it
    arguments[0] = f"--config={tmp_path / 'cluster.yaml'}"
    done = CliRunner().invoke(app, [*node["command"][1:], *arguments])
    assert done.exit_code == 0, done.output
    assert waits is not None
    assert seen == [replace(waits, host="chat-0.chat")]


def test_node_group_pods_reach_no_other_group(pool: tuple[Rendered, str, dict[str, Any]]) -> None:
    release, role, one = pool
    name = one["metadata"]["name"]
    # Policies add up: what is open to all workers is open to first pods, so those alone may be of the pool's own.
    template = one["spec"]["leaderWorkerTemplate"]
    first, neighbour = (template[part]["metadata"]["labels"] for part in ("leaderTemplate", "workerTemplate"))
    [of_pool] = [made for made in release.of("NetworkPolicy") if made["metadata"]["name"] == name]
    assert (_selects(of_pool, first), _selects(of_pool, neighbour)) == (True, False)
    policies = [
        made for made in release.of("NetworkPolicy") if f"{name}-" in made["metadata"]["name"] and _groups(made)
    ]
    scaling = release.values[role]["autoscaling"]
    most = scaling["maxReplicas"] if scaling["mode"] != "none" else one["spec"]["replicas"]
    assert {index for policy in policies for index in _groups(policy)} == {str(index) for index in range(most)}
    for policy in policies:
        spec = policy["spec"]
        own = spec["podSelector"]["matchLabels"]
        peers = [peer for rule in spec["ingress"] for peer in rule["from"]]
        peers += [peer for rule in spec["egress"] for peer in rule["to"]]
        assert peers
        for peer in peers:
            labels = peer["podSelector"]["matchLabels"]
            assert all(labels[f"{_LABEL}/{key}"] == own[f"{_LABEL}/{key}"] for key in ("name", "group-index"))


def _selects(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    return policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def _groups(policy: dict[str, Any]) -> set[str]:
    labels = policy["spec"]["podSelector"]["matchLabels"]
    return {labels[f"{_LABEL}/group-index"]} if f"{_LABEL}/group-index" in labels else set()
