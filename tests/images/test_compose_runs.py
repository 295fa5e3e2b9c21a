"""What of deploy/compose.yaml can run without an engine, as processes: its files, commands, secrets, health checks.

Where containers have names, processes have addresses of loopback; nothing else is changed.
"""

import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.images.test_compose import DEPLOY, OURS, ROOT, compose
from tests.support.otlp_receiver import otlp_receiver
from tests.support.redis_server import binary

pytestmark = pytest.mark.slow
_ADDRESSES = {"prefill-0": "127.0.0.2", "decode-0": "127.0.0.3", "decode-1": "127.0.0.4"}
_TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
_START_S = 300.0


class Composed:
    """The services, as processes of this machine; a context manager."""

    def __init__(self, folder: Path, *, collector_port: int) -> None:
        self._folder = folder
        shutil.copy(DEPLOY / "secrets.sh", folder)
        subprocess.run([folder / "secrets.sh"], check=True, capture_output=True)
        self._services = compose(folder, "compose.yaml")["services"]
        self.ports = {name: _free_port() for name in ("http", "grpc", "redis", "prometheus")}
        worker = _free_port()
        self._names = {
            **{f"{name}:7000": f"{address}:{worker}" for name, address in _ADDRESSES.items()},
            "router:8000": f"127.0.0.1:{self.ports['http']}",
            "redis:6379": f"127.0.0.1:{self.ports['redis']}",
            "collector:4317": f"127.0.0.1:{collector_port}",
            "127.0.0.1:9090": f"127.0.0.1:{self.ports['prometheus']}",
            "0.0.0.0:9090": f"127.0.0.1:{self.ports['prometheus']}",
            "port: 8000": f"port: {self.ports['http']}",
            "grpc_port: 8001": f"grpc_port: {self.ports['grpc']}",
            "port 6379": f"port {self.ports['redis']}",
            "dir /data": f"dir {folder}",
            "/run/secrets": str(folder / "secrets"),
            "/etc/tandem/cluster": str(folder),
            "/etc/redis.conf": str(folder / "redis.conf"),
            "/etc/prometheus": str(folder),
            "path=/prometheus": f"path={folder / 'tsdb'}",
        }
        for name in ("cluster.yaml", "redis.conf", "prometheus.yaml"):
            (folder / name).write_text(self._here((DEPLOY / "config" / name).read_text()))
        shutil.copytree(ROOT / "helm/tandem/rules", folder / "rules")
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Composed":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def start(self, name: str, *command: str) -> None:
        """As compose would; the router's command is its image's."""
        service = self._services[name]
        words = [self._here(word) for word in command or service["command"]]
        programs = {
            "tandem": [sys.executable, "-m", "cluster.cli.main"],
            "redis-server": [binary()],
            "prometheus": ["prometheus"],
        }
        words = [*programs[words[0]], *words[1:]]
        self._running[name] = subprocess.Popen(words, env=self._environment(name), cwd=ROOT)

    def stop(self, name: str) -> int:
        """SIGTERM, with compose's grace period."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(60.0)

    def is_healthy(self, name: str) -> bool:
        """By its own health check."""
        _, program, *words = self._services[name]["healthcheck"]["test"]
        command = [{"python3": sys.executable}.get(program, program), *(self._here(word) for word in words)]
        done = subprocess.run(command, env=self._environment(name), cwd=ROOT, capture_output=True, check=False)
        assert program != "python3" or done.returncode != 2, done.stderr
        return done.returncode == 0

    def wait_for(self, name: str) -> None:
        ends_s = time.monotonic() + _START_S
        while not self.is_healthy(name):
            assert self._running[name].poll() is None, f"{name} ended"
            assert time.monotonic() < ends_s, f"{name} never got well"

    def secret(self, name: str) -> str:
        return (self._folder / "secrets" / name).read_text().strip()

    def prometheus(self, path: str) -> Any:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.ports['prometheus']}/api/v1/{path}", timeout=10.0
        ) as answer:
            return json.load(answer)["data"]

    def value(self, expression: str) -> str | None:
        """Of an expression with one series; None while there is none."""
        found = self.prometheus(f"query?{urllib.parse.urlencode({'query': expression})}")["result"]
        return found[0]["value"][1] if found else None

    def rules(self) -> list[Any]:
        return [rule for group in self.prometheus("rules")["groups"] for rule in group["rules"]]

    def ask(self, key: str | None) -> Any:
        body = json.dumps({"model": "tandem-tiny", "prompt": "Once upon a time", "max_tokens": 8}).encode()
        headers = {"Content-Type": "application/json", "traceparent": f"00-{_TRACE_ID}-00f067aa0ba902b7-01"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        url = f"http://127.0.0.1:{self.ports['http']}/v1/completions"
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60.0) as answer:
            return json.load(answer)

    def _environment(self, name: str) -> dict[str, str]:
        variables = {key: self._here(value) for key, value in self._services[name].get("environment", {}).items()}
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home()), "PYTHONPATH": str(ROOT)} | variables

    def _here(self, text: str) -> str:
        for there, here in self._names.items():
            text = text.replace(there, here)
        return text


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        return int(held.getsockname()[1])


def _wait(reached: Any, what: str) -> None:
    ends_s = time.monotonic() + _START_S
    while not reached():
        assert time.monotonic() < ends_s, what
        signal.sigtimedwait([], 0.1)


async def test_compose_services_reach_each_other(tmp_path: Path) -> None:
    async with otlp_receiver() as collector:
        with Composed(tmp_path, collector_port=collector.port) as composed:
            await asyncio.to_thread(_run, composed)
    assert {span.name for span in collector.of_trace(_TRACE_ID)} >= {"tandem.place", "tandem.decode", "tandem.prefill"}


def _run(composed: Composed) -> None:
    composed.start("redis")
    for name in sorted(OURS - {"router"}):
        composed.start(name)
    composed.start("router", "tandem", "router", "--config", "/etc/tandem/cluster/cluster.yaml")
    composed.start("prometheus", "prometheus", *composed._services["prometheus"]["command"])
    for name in sorted({*OURS, "prometheus"}):
        composed.wait_for(name)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        composed.ask(None)
    assert composed.ask(composed.secret("first_key"))["usage"]["completion_tokens"] == 8
    _wait(lambda: composed.value('up{job="tandem"}') == "1", "Prometheus scrapes the router")
    _wait(lambda: composed.value("count(count by(worker)(tandem_worker_requests))") == "3", "it sees three workers")
    _wait(lambda: {rule["health"] for rule in composed.rules()} == {"ok"}, "every rule can be evaluated")
    assert len(composed.rules()) > 30
    for name in ("router", "prefill-0", "decode-0", "decode-1"):
        assert composed.stop(name) == 0
