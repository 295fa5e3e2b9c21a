"""deploy/compose.yaml as Docker's own program reads it, and the files that it mounts."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.config.access import read_keys
from tandem.config.cluster import ClusterConfig, load
from tandem.rpc.cluster_credentials import ClusterCredentials
from tandem.rpc.mutual_tls import TlsFiles
from tests.support.monitoring_files import promtool

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OURS = {"router", "prefill-0", "decode-0", "decode-1"}


def compose(folder: Path, *files: str) -> Any:
    """The whole file, with defaults and anchors resolved."""
    program = Path(sys.executable).with_name("docker-compose")
    options = [word for file in files for word in ("--file", str(DEPLOY / file))]
    command = [str(program), *options, "--env-file", str(folder / ".env"), "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where secrets.sh was run."""
    folder = tmp_path_factory.mktemp("deploy")
    shutil.copy(DEPLOY / "secrets.sh", folder)
    subprocess.run([folder / "secrets.sh"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def whole(made: Path) -> Any:
    return compose(made, "compose.yaml")


def settings(made: Path, monkeypatch: pytest.MonkeyPatch, whole: Any) -> ClusterConfig:
    for name, value in whole["services"]["router"]["environment"].items():
        monkeypatch.setenv(name, value.replace("/run/secrets", str(made / "secrets")))
    keys = {"router.api_keys_file": str(made / "secrets/api_keys")}
    return load(DEPLOY / "config/cluster.yaml", keys)


def test_compose_containers_are_hardened(whole):
    assert set(whole["services"]) == OURS | {"redis", "prometheus", "grafana", "collector"}
    for name, service in whole["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["init"] is True, name
        assert not service["user"].startswith(("0:", "root")), name
        assert {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"}.isdisjoint(service), name
        for port in service.get("ports", ()):
            assert port["host_ip"] == "127.0.0.1", name
        if name != "collector":
            assert service["healthcheck"]["test"], name


def test_compose_publishes_no_port_of_redis_or_workers(whole):
    inside = {name for name, network in whole["networks"].items() if network.get("internal")}
    for name in (OURS - {"router"}) | {"redis"}:
        assert set(whole["services"][name]["networks"]) <= inside, name
        assert not whole["services"][name].get("ports"), name


def test_compose_secrets_exist_only_as_private_files(whole, made):
    values = [path.read_text().strip() for path in (made / "secrets").iterdir()]
    text = json.dumps(whole)
    assert not [value for value in values if value in text]
    for path in (made / "secrets").iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
    named = {Path(one["file"]).name for one in whole["secrets"].values()}
    assert named | {"first_key"} == {path.name for path in (made / "secrets").iterdir()}


def test_compose_secrets_script_is_idempotent(made):
    before = {path.name: path.read_text() for path in (made / "secrets").iterdir()}
    subprocess.run([made / "secrets.sh"], check=True, capture_output=True)
    assert {path.name: path.read_text() for path in (made / "secrets").iterdir()} == before


def test_compose_images_are_versioned(whole):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, service in whole["services"].items():
        tag = service["image"].rpartition(":")[2]
        assert tag == version if name in OURS else any(letter.isdigit() for letter in tag), name


def test_compose_configuration_matches_services(whole, made, monkeypatch):
    config = settings(made, monkeypatch, whole)
    assert config.secret is not None
    for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
        assert len(pool.addresses) == pool.replicas
        for index, address in enumerate(pool.addresses):
            service = whole["services"][f"{role}-{index}"]
            assert address == f"{role}-{index}:7000"
            assert service["command"][:2] == ["tandem", role]
            assert service["command"][-2:] == ["--index", str(index)]
            assert service["healthcheck"]["test"][1:5] == ["python3", "-m", "cluster.probe", role]
            assert service["healthcheck"]["test"][-2:] == ["--index", str(index)]
            assert _seconds(service["stop_grace_period"]) > pool.drain_s + 9.0
    assert {port["target"] for port in whole["services"]["router"]["ports"]} == {
        config.router.port,
        config.router.grpc_port,
    }
    files = TlsFiles(**{part: made / f"secrets/member_{part}" for part in ("cert", "key", "ca")}, setting="cluster.tls")
    tls = config.cluster.tls
    assert [tls.cert, tls.key, tls.ca] == [f"/run/secrets/{path.name}" for path in (files.cert, files.key, files.ca)]
    ClusterCredentials(files)
    for name in OURS:
        assert {path.name for path in (files.cert, files.key, files.ca)} <= {
            one["source"] for one in whole["services"][name]["secrets"]
        }
    keys, _ = read_keys(made / "secrets/api_keys", config.router.limits)
    # /metrics beyond loopback is for operators: Prometheus, and nobody else by a key that clients have.
    assert [(key.tenant, key.operator) for key in keys] == [("first", False), ("metrics", True)]


def test_compose_old_prometheus_key_becomes_operator(made, tmp_path):
    shutil.copy(DEPLOY / "secrets.sh", tmp_path)
    (tmp_path / "secrets").mkdir()
    old = (made / "secrets/api_keys").read_text().replace(", operator: true", "")
    (tmp_path / "secrets/api_keys").write_text(old)
    for _ in range(2):
        subprocess.run([tmp_path / "secrets.sh"], check=True, capture_output=True)
        assert (tmp_path / "secrets/api_keys").read_text() == (made / "secrets/api_keys").read_text()


def test_compose_gpu_file_gives_each_worker_one_gpu(made, whole):
    both = compose(made, "compose.yaml", "compose.gpu.yaml")["services"]
    given = []
    for name in sorted(OURS - {"router"}):
        [device] = both[name]["deploy"]["resources"]["reservations"]["devices"]
        given += device["device_ids"]
        assert both[name]["build"]["target"] == "cuda"
        assert both[name]["read_only"] is True
        assert both[name]["command"] == whole["services"][name]["command"]
    assert sorted(given) == ["0", "1", "2"]


def test_compose_prometheus_configuration_is_valid(tmp_path, made, whole):
    text = (DEPLOY / "config/prometheus.yaml").read_text()
    (tmp_path / "prometheus.yaml").write_text(text.replace("/run/secrets", str(made / "secrets")))
    shutil.copytree(ROOT / "helm/tandem/rules", tmp_path / "rules")
    output = promtool("check", "config", tmp_path / "prometheus.yaml")
    every = {f"rules/{path.name}" for path in (ROOT / "helm/tandem/rules").glob("*.yaml")}
    assert set(yaml.safe_load(text)["rule_files"]) == every - {"rules/planner.yaml"}
    assert output.count("rules found") == len(every) - 1
    mounts = {one["target"]: one["source"] for one in whole["services"]["prometheus"]["volumes"]}
    assert Path(mounts["/etc/prometheus/rules"]) == ROOT / "helm/tandem/rules"
    hosts = {
        target.split(":")[0]
        for job in yaml.safe_load(text)["scrape_configs"]
        for one in job["static_configs"]
        for target in one["targets"]
    }
    for host in hosts - {"127.0.0.1"}:
        assert set(whole["services"][host]["networks"]) & set(whole["services"]["prometheus"]["networks"]), host


def test_compose_grafana_has_dashboards_and_prometheus_source(whole):
    service = whole["services"]["grafana"]
    mounts = {one["target"]: Path(one["source"]) for one in service["volumes"]}
    provisioning = mounts[service["environment"]["GF_PATHS_PROVISIONING"]]
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"] is True
    [provider] = yaml.safe_load((provisioning / "dashboards/tandem.yaml").read_text())["providers"]
    dashboards = mounts[provider["options"]["path"]]
    assert len(list(dashboards.glob("*.json"))) == 6
    assert (dashboards / Path(service["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]).name).is_file()


def test_compose_collector_receives_traces_of_services(whole, made, monkeypatch):
    config = yaml.safe_load((DEPLOY / "config/collector.yaml").read_text())
    for pipeline in config["service"]["pipelines"].values():
        for kind, used in pipeline.items():
            assert set(used) <= set(config[kind]), kind
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert settings(made, monkeypatch, whole).telemetry.otlp_endpoint == f"http://collector:{port}"
    for name in OURS:
        assert "cluster" in whole["services"][name]["networks"]
    assert "cluster" in whole["services"]["collector"]["networks"]


def _seconds(text: str) -> float:
    minutes, _, seconds = text.removesuffix("s").rpartition("m")
    return 60.0 * float(minutes or 0) + float(seconds or 0)
