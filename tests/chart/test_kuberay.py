"""The KubeRay manifest: valid for Kubernetes, with restricted pods, a real command and a valid configuration."""

import contextlib
import copy
import http.server
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from cluster.cli.main import app
from cluster.processes.effective_config import STOP_MARGIN_S, PortDrawer
from cluster.supervisor.ray_placement import Node, RayPlacement, bundle_of
from cluster.supervisor.supervisor import Role
from tandem.config.cluster import load
from tests.chart.pods import lapses
from tests.chart.schemas import KUBERNETES, mistakes
from tests.support.http_server import serving

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "deploy" / "kuberay.yaml"
OBJECTS = {one["kind"]: one for one in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}
JOB = OBJECTS["RayJob"]["spec"]
RAY = JOB["rayClusterSpec"]
HEAD, (WORKERS,) = RAY["headGroupSpec"], RAY["workerGroupSpecs"]
GROUPS = pytest.mark.parametrize("group", [HEAD, WORKERS], ids=["head", "workers"])


def options():
    """Options of the job's command, as `tandem` itself parses them."""
    shell, option, script = shlex.split(JOB["entrypoint"])
    assert (shell, option) == ("sh", "-c")
    *_, command_line = script.split(" && ")
    executed, program, name, *arguments = shlex.split(command_line)
    assert (executed, program) == ("exec", "tandem"), "signals are for the command, not for a shell"
    command = get_command(app).commands[name]
    return command.make_context(name, list(arguments)).params


def settings(tmp_path):
    """The configuration of the job's process, with keys that a user would have made."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("api_keys: [sha256:" + "0" * 64 + "]\n")
    keys.chmod(0o600)
    path = tmp_path / "cluster.yaml"
    path.write_text(OBJECTS["ConfigMap"]["data"]["cluster.yaml"].replace("/etc/tandem/keys/keys.yaml", str(keys)))
    return load(path)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kuberay_manifest_validates(version):
    wrong = [mistake for one in OBJECTS.values() for mistake in mistakes(one, version)]
    for group in (HEAD, WORKERS):
        pod = {"apiVersion": "v1", "kind": "Pod", **copy.deepcopy(group["template"])}
        pod["metadata"]["name"] = "a-pod"
        wrong += mistakes(pod, version)
    assert wrong == []


def test_kuberay_validation_detects_unknown_field():
    spoilt = copy.deepcopy(OBJECTS["RayJob"])
    spoilt["spec"]["rayClusterSpec"]["authOption"] = spoilt["spec"]["rayClusterSpec"].pop("authOptions")
    assert any("authOption" in mistake for mistake in mistakes(spoilt, KUBERNETES[0]))


@GROUPS
def test_kuberay_pods_are_restricted(group):
    # The head's autoscaler, which KubeRay puts in, asks the API server for pods: its token is KubeRay's business.
    pod = copy.deepcopy(group["template"])
    pod["spec"]["automountServiceAccountToken"] = False
    assert list(lapses(pod)) == []


@GROUPS
def test_kuberay_volumes_and_mounts_match(group):
    spec = group["template"]["spec"]
    mounted = {mount["name"] for one in spec["containers"] for mount in one["volumeMounts"]}
    assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_kuberay_command_accepts_its_options_and_mounted_file():
    given = options()
    assert given["ray"] == "auto"
    mounts = HEAD["template"]["spec"]["containers"][0]["volumeMounts"]
    assert str(given["config"]) in [mount["mountPath"] for mount in mounts]


def test_kuberay_requires_a_token():
    assert RAY["authOptions"] == {"mode": "token"}
    assert tuple(map(int, RAY["rayVersion"].split("."))) >= (2, 52, 0)


def test_kuberay_workers_fit_into_pods(tmp_path):
    config = settings(tmp_path)
    limits = WORKERS["template"]["spec"]["containers"][0]["resources"]["limits"]
    nodes = [
        Node(
            node_id=str(i), host=f"10.0.0.{i}", total={"CPU": float(limits["cpu"])}, free={"CPU": float(limits["cpu"])}
        )
        for i in range(WORKERS["minReplicas"])
    ]
    placement = RayPlacement()
    for role, count in ((Role.PREFILL, config.prefill.replicas), (Role.DECODE, config.decode.replicas)):
        for index in range(count):
            bundle = bundle_of(config, role, has_gpus=False)
            assert placement.choose(f"{role.value}-{index}", role, bundle, nodes, 0.0) is not None


def test_kuberay_service_reaches_the_routers(tmp_path):
    config, service = settings(tmp_path), OBJECTS["Service"]["spec"]
    assert service["selector"].items() <= HEAD["template"]["metadata"]["labels"].items()
    assert not service["selector"].items() <= WORKERS["template"]["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in HEAD["template"]["spec"]["containers"][0]["ports"]}
    served = {port["name"]: (port["port"], ports[port["targetPort"]]) for port in service["ports"]}
    router = config.router
    assert served == {"http": (router.port, router.port), "grpc": (router.grpc_port, router.grpc_port)}
    assert router.host == "0.0.0.0"


class Pages(http.server.BaseHTTPRequestHandler):
    """Answers its one page by the server's `well`, and 404 for all others."""

    def do_GET(self):
        self.send_response((200 if self.server.well else 503) if self.path == self.server.page else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def pages(page, port=0):
    with serving(Pages, port=port) as server:
        server.page, server.well = page, True
        yield server


def test_kuberay_head_is_ready_for_the_job_and_later_for_requests(tmp_path):
    """KubeRay submits the job to ready pods only: with a probe that needs the routers it would never start."""
    probe = HEAD["template"]["spec"]["containers"][0]["readinessProbe"]["exec"]["command"]
    with PortDrawer() as ports:
        free_port = ports.draw("127.0.0.1", "a test")
    config, began = tmp_path / "cluster.yaml", tmp_path / "began"
    config.write_text(f"router: {{port: {free_port}}}\n")
    with pages("/api/healthz") as ray:
        script = probe[-1]
        for theirs, ours in (
            ("python3", sys.executable),
            ("127.0.0.1:52365", f"127.0.0.1:{ray.server_port}"),
            ("/etc/tandem/cluster.yaml", str(config)),
            ("/tmp/tandem-began", str(began)),
        ):
            assert theirs in script
            script = script.replace(theirs, ours)

        def is_ready():
            return subprocess.run([*probe[:-1], script], cwd=ROOT, capture_output=True, check=False).returncode == 0

        assert is_ready(), "for the job"
        entrypoint = shlex.split(JOB["entrypoint"])[-1].replace("/tmp/tandem-began", str(began))
        subprocess.run(["sh", "-c", entrypoint.split("&&")[0]], check=True)
        assert not is_ready(), "workers are loading"
        with pages("/readyz", free_port) as routers:
            assert is_ready()
            routers.well = False
            assert not is_ready()
            routers.well, ray.well = True, False
            assert not is_ready()


@GROUPS
def test_ray_probes_use_only_programs_in_the_image(group):
    one = group["template"]["spec"]["containers"][0]
    assert one["livenessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}
    assert "wget" not in yaml.safe_dump(one["readinessProbe"])


def test_kuberay_grace_period_covers_drain(tmp_path):
    config, spec = settings(tmp_path), HEAD["template"]["spec"]
    environment = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
    stop_s = float(environment["RAY_JOB_STOP_WAIT_TIME_S"])
    pools_s = max(config.prefill.drain_s, config.decode.drain_s) + STOP_MARGIN_S
    assert stop_s > config.decode.drain_s + STOP_MARGIN_S + pools_s, "routers first, then workers"
    assert spec["terminationGracePeriodSeconds"] > stop_s
    assert JOB["jobId"] in spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
