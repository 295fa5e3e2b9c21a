"""deploy/compose.yaml as it is, brought up by Docker's compose program through podman's Docker API."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.containers.engine import Engine, EngineFailed
from tests.containers.images import COLLECTOR, PROMETHEUS, SERVICES, Images
from tests.images.context import ROOT

LEFT_OUT = ("grafana",)
"""No package of it is to be had where this runs."""
_HEALTH_S = 8.0


class Composed:
    """A copy of deploy/ with secrets of its own, and its services; a context manager."""

    def __init__(self, engine: Engine, images: Images) -> None:
        self._engine = engine
        self._folder = folder = engine.folder / "composed"
        self.ports = {name: _free_port() for name in ("TANDEM_HTTP_PORT", "TANDEM_GRPC_PORT", "PROMETHEUS_PORT")}
        self._variables = {
            "PATH": os.environ["PATH"],
            "DOCKER_HOST": engine.docker_host(),
            "TANDEM_ROUTER_IMAGE": images.router,
            "TANDEM_WORKER_IMAGE": images.worker,
            "REDIS_IMAGE": SERVICES,
            "PROMETHEUS_IMAGE": PROMETHEUS,
            "COLLECTOR_IMAGE": COLLECTOR,
            **{name: str(port) for name, port in self.ports.items()},
        }
        ours = shutil.ignore_patterns("secrets", "data", ".env")
        shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=ours)
        for name in ("rules", "dashboards"):
            shutil.copytree(ROOT / "helm/tandem" / name, folder / "helm/tandem" / name)
        subprocess.run([folder / "deploy/secrets.sh"], check=True, capture_output=True)
        self._over = threading.Event()
        self._timer = threading.Thread(target=self._check_health)

    def __enter__(self) -> "Composed":
        self._timer.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._timer.join()
        self.compose("down", "--timeout", "5", "--volumes")

    def compose(self, *words: str) -> str:
        """Raises AssertionError with what compose said."""
        program = Path(sys.executable).with_name("docker-compose")
        command = [str(program), "--file", str(self._folder / "deploy/compose.yaml"), *words]
        done = subprocess.run(command, env=self._variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}{self.logs()}"
        return done.stdout

    def up(self) -> list[str]:
        """Start everything that can be had here, and wait until it is healthy; names of the services."""
        names = [name for name in self.compose("config", "--services").split() if name not in LEFT_OUT]
        self.compose("up", "--no-build", "--pull", "never", "--detach", "--wait", "--wait-timeout", "1800", *names)
        return names

    def container(self, service: str) -> Any:
        return self._engine.inspect(f"tandem-{service}-1")

    def run_in(self, service: str, *command: str) -> str:
        """Raises EngineFailed."""
        return self._engine.podman("exec", f"tandem-{service}-1", *command)

    def log(self, service: str) -> str:
        return self._engine.logs(f"tandem-{service}-1")

    def logs(self) -> str:
        """The last words of everybody."""
        names = self._engine.podman("ps", "--all", "--format", "{{.Names}}").split()
        return "".join(f"\n== {name}\n{self._engine.logs(name)[-1500:]}" for name in names)

    def secret(self, name: str) -> str:
        return (self._folder / "deploy/secrets" / name).read_text().strip()

    def ask(self, key: str | None, trace_id: str) -> Any:
        """A few tokens. Raises urllib.error.HTTPError."""
        body = json.dumps({"model": "tandem-tiny", "prompt": "Once upon a time", "max_tokens": 8}).encode()
        headers = {"Content-Type": "application/json", "traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://127.0.0.1:{self.ports['TANDEM_HTTP_PORT']}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120.0) as answer:
            return json.load(answer)

    def value(self, expression: str) -> str | None:
        """What Prometheus says of an expression with one series; None while there is none."""
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.ports['PROMETHEUS_PORT']}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=30.0) as answer:
            found = json.load(answer)["data"]["result"]
        return found[0]["value"][1] if found else None

    def _check_health(self) -> None:
        """Run all health checks from time to time: podman leaves that to systemd, which is not here."""
        while not self._over.wait(_HEALTH_S):
            for name in self._engine.podman("ps", "--format", "{{.Names}}").split():
                try:
                    self._engine.podman("healthcheck", "run", name)
                except EngineFailed:
                    continue  # not healthy, has no check, or is gone


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
