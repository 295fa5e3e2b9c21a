"""The KubeRay manifest: what Kubernetes takes, pods that may run, and a command and a configuration that are real."""

import copy
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from cluster.cli import app
from cluster.effective import STOP_MARGIN_S
from cluster.ray_placement import Node, Placement, bundle_of
from cluster.supervisor import Role
from tandem.config import load
from tests.chart.pods import lapses
from tests.chart.schemas import KUBERNETES, mistakes

MANIFEST = Path(__file__).parents[2] / "deploy" / "kuberay.yaml"
OBJECTS = {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}
JOB = OBJECTS["RayJob"]["spec"]
RAY = JOB["rayClusterSpec"]
HEAD, (WORKERS,) = RAY["headGroupSpec"], RAY["workerGroupSpecs"]
GROUPS = pytest.mark.parametrize("group", [HEAD, WORKERS], ids=["head", "workers"])


def options():
    """Of the command that the job runs, as `tandem` itself reads them."""
    program, name, *arguments = shlex.split(JOB["entrypoint"])
    assert program == "tandem"
    command = get_command(app).commands[name]
    return command.make_context(name, list(arguments)).params


def settings(tmp_path):
    """What the job's process reads, with the keys that a user would have made."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("api_keys: [sha256:" + "0" * 64 + "]\n")
    keys.chmod(0o600)
    path = tmp_path / "cluster.yaml"
    path.write_text(OBJECTS["ConfigMap"]["data"]["cluster.yaml"].replace("/etc/tandem/keys/keys.yaml", str(keys)))
    return load(path)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_and_kuberay_take_it(version):
    wrong = [told for one in OBJECTS.values() for told in mistakes(one, version)]
    for group in (HEAD, WORKERS):
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(group["template"])}
        pod["metadata"]["name"] = "a-pod"
        wrong += mistakes(pod, version)
    assert wrong == []


def test_a_field_that_does_not_exist_is_noticed():
    spoilt = copy.deepcopy(OBJECTS["RayJob"])
    spoilt["spec"]["rayClusterSpec"]["authOption"] = spoilt["spec"]["rayClusterSpec"].pop("authOptions")
    assert any("authOption" in told for told in mistakes(spoilt, KUBERNETES[0]))


@GROUPS
def test_pods_are_restricted(group):
    # The head's autoscaler, which KubeRay puts in, asks the API server for pods: its token is KubeRay's business.
    pod = copy.deepcopy(group["template"])
    pod["spec"]["automountServiceAccountToken"] = False
    assert list(lapses(pod)) == []


@GROUPS
def test_every_volume_is_mounted_and_every_mount_is_there(group):
    spec = group["template"]["spec"]
    mounted = {mount["name"] for one in spec["containers"] for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_the_command_is_one_of_ours_and_finds_its_file():
    asked = options()
    assert asked["ray"] == "auto"
    mounts = HEAD["template"]["spec"]["containers"][0]["volumeMounts"]
    assert str(asked["config"]) in [mount["mountPath"] for mount in mounts]


def test_ray_asks_for_a_token():
    assert RAY["authOptions"] == {"mode": "token"}
    assert tuple(map(int, RAY["rayVersion"].split("."))) >= (2, 52, 0)


def test_workers_fit_into_the_pods(tmp_path):
    config = settings(tmp_path)
    limits = WORKERS["template"]["spec"]["containers"][0]["resources"]["limits"]
    nodes = [
        Node(
            node_id=str(i), host=f"10.0.0.{i}", total={"CPU": float(limits["cpu"])}, free={"CPU": float(limits["cpu"])}
        )
        for i in range(WORKERS["minReplicas"])
    ]
    placement = Placement()
    for role, count in ((Role.PREFILL, config.prefill.replicas), (Role.DECODE, config.decode.replicas)):
        for index in range(count):
            bundle = bundle_of(config, role, has_gpus=False)
            assert placement.choose(f"{role.value}-{index}", role, bundle, nodes, 0.0) is not None


def test_the_service_finds_the_doors(tmp_path):
    config, service = settings(tmp_path), OBJECTS["Service"]["spec"]
    assert service["selector"].items() <= HEAD["template"]["metadata"]["labels"].items()
    assert not service["selector"].items() <= WORKERS["template"]["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in HEAD["template"]["spec"]["containers"][0]["ports"]}
    served = {port["name"]: (port["port"], ports[port["targetPort"]]) for port in service["ports"]}
    router = config.router
    assert served == {"http": (router.port, router.port), "grpc": (router.grpc_port, router.grpc_port)}
    assert router.host == "0.0.0.0"


def test_there_is_time_to_drain(tmp_path):
    config, spec = settings(tmp_path), HEAD["template"]["spec"]
    told = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
    stop_s = float(told["RAY_JOB_STOP_WAIT_TIME_S"])
    pools_s = max(config.prefill.drain_s, config.decode.drain_s) + STOP_MARGIN_S
    assert stop_s > config.decode.drain_s + STOP_MARGIN_S + pools_s, "routers first, then workers"
    assert spec["terminationGracePeriodSeconds"] > stop_s
    assert JOB["jobId"] in spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
