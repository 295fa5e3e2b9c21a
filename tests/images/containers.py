"""Requirements of an image: run as any user, write to nothing of its own, and serve."""

import json
import os
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.images.building import Image
from tests.images.layers import Layers, start

USER = 54321
"""A user unknown to the image: no name, no home, and only the group that OpenShift gives to all of them."""
_CONFIG = "/etc/tandem/cluster"
_START_S, _STOP_S = 300.0, 90.0


class Container:
    """A process of an image; a context manager."""

    def __init__(self, image: Image, root: Path, config: Path, command: Sequence[str]) -> None:
        self._process = start(root, command, image.variables, folder=image.folder, user=USER, mounts={config: _CONFIG})

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *_: Any) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self) -> int:
        return self._process.wait(_START_S)

    def zombies(self) -> list[int]:
        """Children that ended and that nobody asked about."""
        everybody = psutil.Process(self._process.pid).children(recursive=True)
        return [one.pid for one in everybody if one.status() == psutil.STATUS_ZOMBIE]

    def stop(self) -> int:
        """SIGTERM to number 1 of the container, as an engine does it."""
        [first] = psutil.Process(self._process.pid).children()
        os.kill(first.pid, signal.SIGTERM)
        return self._process.wait(_STOP_S)


class Cluster:
    """One of each, of two images, on loopback; a context manager."""

    def __init__(self, layers: Layers, router: Image, worker: Image, folder: Path) -> None:
        self._images = {"router": router, "prefill": worker, "decode": worker}
        self._roots = {"router": layers.show(router.layers, "router"), "worker": layers.show(worker.layers, "worker")}
        self._config = folder / "cluster"
        self._config.mkdir(mode=0o755)
        self.http = _free_port()
        settings = {
            "secret": secrets.token_hex(16),
            "engine": {"device": "cpu", "memory_bytes": 2 << 30},
            "router": {"port": self.http, "grpc_port": _free_port()},
            "prefill": {"addresses": [f"127.0.0.1:{_free_port()}"]},
            "decode": {"addresses": [f"127.0.0.1:{_free_port()}"]},
        }
        (self._config / "cluster.yaml").write_text(yaml.safe_dump(settings))
        self._running: dict[str, Container] = {}

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: Any) -> None:
        for container in self._running.values():
            container.__exit__()

    def run(self, role: str, *command: str) -> Container:
        """A container of a role's image."""
        root = self._roots["router" if role == "router" else "worker"]
        return Container(self._images[role], root, self._config, command)

    def begin(self, role: str) -> None:
        """As the image says, or for a pool as the chart does."""
        ours = ["tandem", role, "--config", f"{_CONFIG}/cluster.yaml"]
        self._running[role] = self.run(role, *(self._images[role].command if role == "router" else ours))

    def is_healthy(self, role: str) -> bool:
        """The image's health check, or for a pool that of compose.yaml, in a container of its own."""
        probe = ["python3", "-m", "cluster.probe", role, "--config", f"{_CONFIG}/cluster.yaml"]
        with self.run(role, *(self._images[role].health[1:] if role == "router" else probe)) as container:
            return container.wait() == 0

    def wait_for(self, role: str) -> None:
        ends_s = time.monotonic() + _START_S
        while not self.is_healthy(role):
            assert not self._running[role].has_ended, f"{role} ended"
            assert time.monotonic() < ends_s, f"{role} never got well"

    def ask(self) -> dict[str, Any]:
        """Return the response to a short completion."""
        body = json.dumps({"model": "tandem-tiny", "prompt": "Once upon a time", "max_tokens": 8}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.http}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60.0) as answer:
            return json.load(answer)

    def zombies(self) -> list[int]:
        return [pid for container in self._running.values() for pid in container.zombies()]

    def stop(self, role: str) -> int:
        return self._running.pop(role).stop()


def output_of(root: Path, image: Image, *command: str) -> str:
    """The output of a command that must succeed, of an image whose files are at `root`; sees no configuration."""
    process = start(root, command, image.variables, folder=image.folder, user=USER, output=subprocess.PIPE)
    output, _ = process.communicate(timeout=_START_S)
    assert process.returncode == 0, f"{' '.join(command)}: exit code {process.returncode}: {output.decode()}"
    return output.decode()


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
