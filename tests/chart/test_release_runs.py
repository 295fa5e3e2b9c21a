"""A rendered release as real processes: its own commands, variables, configuration and secrets, without a cluster.

What Kubernetes would give is given here: a Redis, an address for each pod, mounted files. Nothing else is changed.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chart.pods import containers
from tests.chart.rendering import RELEASE, Rendered, preset, render
from tests.support.pod_probes import grpc_probe, http_probe, plain_secret
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.slow
_ROOT = Path(__file__).parents[2]
_ADDRESSES = {"prefill": "127.0.0.2", "decode": "127.0.0.3", "router": "127.0.0.1", "test": "127.0.0.1"}
_NOT_HERE = {"HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"}
_START_S = 120.0


class Release:
    """The pods of a rendered release; a context manager."""

    def __init__(self, rendered: Rendered, folder: Path, redis: RedisServer) -> None:
        self._rendered = rendered
        self._etc = folder / "etc"
        self._secrets = {one["metadata"]["name"]: plain_secret(one) for one in rendered.of("Secret")}
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        text = rendered.cluster_yaml().replace("/etc/tandem", str(self._etc))
        text = text.replace(f"{RELEASE}-tandem-redis:6379", f"127.0.0.1:{redis.port}")
        _write(self._etc / "cluster" / "cluster.yaml", text)
        _write(self._etc / "api-keys" / "api-keys.yaml", self._secrets[f"{RELEASE}-tandem-api-keys"]["api-keys.yaml"])

        for name, content in self._secrets[f"{RELEASE}-tandem-cluster-tls"].items():
            _write(self._etc / "cluster-tls" / name, content)

    def __enter__(self) -> "Release":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def start(self, component: str) -> subprocess.Popen[bytes]:
        """Run a pod's main container."""
        [container] = containers(self._rendered.pod(component))
        variables = self._environment(container, _ADDRESSES[component])
        command = [
            re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word).replace("/etc/tandem", str(self._etc))
            for word in (*container["command"], *container.get("args", ()))
        ]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        variables = {name: value for name, value in variables.items() if name not in _NOT_HERE}
        ours = [sys.executable, "-m", "cluster.cli.main"] if command[0] == "tandem" else [sys.executable]
        process = subprocess.Popen([*ours, *command[1:]], env=inherited | variables, cwd=_ROOT)
        self._running[component] = process
        return process

    def stop(self, component: str) -> int:
        """As the kubelet does; returns the exit code, or raises when the grace period was too short."""
        process = self._running[component]
        process.send_signal(signal.SIGTERM)
        return process.wait(self._rendered.pod(component)["spec"]["terminationGracePeriodSeconds"])

    def passes(self, component: str, kind: str) -> bool:
        """One run of a probe."""
        [container] = containers(self._rendered.pod(component))
        probe, address = container[kind], _ADDRESSES[component]
        if "grpc" in probe:
            return grpc_probe(f"{address}:{probe['grpc']['port']}")
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        return http_probe(f"http://{address}:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}")

    def wait_for(self, component: str, kind: str) -> None:
        ends_s = time.monotonic() + _START_S
        while not self.passes(component, kind):
            assert self._running[component].poll() is None, f"{component} ended"
            assert time.monotonic() < ends_s, f"{component} has not passed its {kind}"
            time.sleep(0.1)  # as the kubelet between two goes; a probe has nothing else to wait for

    def _environment(self, container: Any, address: str) -> dict[str, str]:
        made: dict[str, str] = {}
        for variable in container["env"]:
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                value = self._secrets[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            elif "fieldRef" in source:
                value = address if source["fieldRef"]["fieldPath"] == "status.podIP" else "0"
            else:
                value = re.sub(r"\$\((\w+)\)", lambda found: made[found[1]], variable["value"])
            value = value.replace("/etc/tandem", str(self._etc))
            made[variable["name"]] = re.sub(r"[\w.-]+-router\.[\w.-]+\.svc", "127.0.0.1", value)
        return made


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def release(tmp_path: Path) -> Iterator[Release]:
    http, grpc_port = _free_port("0.0.0.0"), _free_port("0.0.0.0")
    values = preset("laptop")
    values["router"]["ports"] = {"http": http, "grpc": grpc_port}
    for role in ("prefill", "decode"):
        values[role] = values[role] | {"port": _free_port(_ADDRESSES[role])}
    rendered = render(values)
    [secret] = [one for one in rendered.of("Secret") if one["metadata"]["name"].endswith("-redis")]
    with RedisServer(password=plain_secret(secret)["password"]) as redis, Release(rendered, tmp_path, redis) as running:
        yield running


def test_release_serves_passes_probes_and_drains(release: Release) -> None:
    release.start("decode")
    release.start("prefill")
    release.start("router")
    for component in ("prefill", "decode", "router"):
        release.wait_for(component, "startupProbe")
        release.wait_for(component, "readinessProbe")
        assert release.passes(component, "livenessProbe")
    assert release.start("test").wait(60.0) == 0
    for component in ("prefill", "decode", "router"):
        assert release.stop(component) == 0
        assert not release.passes(component, "readinessProbe")
