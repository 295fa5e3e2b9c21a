"""A container engine of the tests' own: podman and buildah, with storage, networks and settings in one folder.

Whatever it makes is gone when it is left. Needs root, and packages of Debian's that `make container-engine` installs.
"""

import json
import os
import random
import resource
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROGRAMS = ("podman", "buildah", "runc", "iptables", "catatonit", "debootstrap", "nsenter")
_GENTLY = ("nice", "-n", "19", "ionice", "-c3")
_FOLDER = Path("/var/tmp")  # on disk: the images take some gigabytes
_STOP_S = 30.0
_HELPERS = ("/usr/lib/podman", "/usr/libexec/podman")


def why_not() -> str | None:
    """Why there is no engine here; None where there is one."""
    if os.geteuid() != 0:
        return "containers need root here"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    for name in ("netavark", "aardvark-dns"):
        absent += [] if any(Path(folder, name).exists() for folder in _HELPERS) else [name]
    return f"no {', '.join(absent)} here: sudo make container-engine" if absent else None


class EngineFailed(AssertionError):
    """A command of the engine failed; what it said is the message."""


class Engine:
    """A context manager."""

    def __init__(self) -> None:
        self.folder = Path()
        self._service: subprocess.Popen[bytes] | None = None
        self.variables: dict[str, str] = {}

    def __enter__(self) -> "Engine":
        # Short: podman allows 50 characters for where its sockets are.
        self.folder = folder = Path(tempfile.mkdtemp(prefix="tandem-", dir=_FOLDER))
        folder.chmod(0o755)
        (folder / "containers.conf").write_text(_settings(folder))
        kind = subprocess.run(["stat", "-f", "-c", "%T", folder], check=True, capture_output=True, text=True).stdout
        driver = "vfs" if kind.strip() == "overlayfs" else "overlay"
        (folder / "storage.conf").write_text(
            f'[storage]\ndriver = "{driver}"\nrunroot = "{folder}/run"\ngraphroot = "{folder}/storage"\n'
        )
        self.variables = {
            **os.environ,
            "CONTAINERS_CONF": f"{folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
            # The machine's own network while images are built; and images that have health checks.
            "BUILDAH_ISOLATION": "chroot",
            "BUILDAH_FORMAT": "docker",
        }
        return self

    def __exit__(self, *_: Any) -> None:
        if self._service is not None:
            self._service.terminate()
            self._service.wait(_STOP_S)
        names = self.podman("network", "ls", "--format", "{{.Name}}").split()
        for command in ("pod rm --all --force --time 0", "rm --all --force --time 0", "volume rm --all --force"):
            self._do(["podman", *command.split()], check=False)
        for name in names:
            self._do(["podman", "network", "rm", "--force", name], check=False)
        self._do(["buildah", "rm", "--all"], check=False)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed([one for one in mounts if Path(one).is_relative_to(self.folder)]):
            subprocess.run(["umount", "--lazy", place], check=False)
        shutil.rmtree(self.folder)

    def podman(self, *words: str, text: str | None = None) -> str:
        """What a command prints. Raises EngineFailed."""
        return self._do(["podman", *words], text=text)

    def gently(self, *words: str, cwd: Path | None = None, more: Mapping[str, str] | None = None) -> str:
        """A long command that gives way to everything else on this machine."""
        return self._do([*_GENTLY, *words], cwd=cwd, more=more)

    def import_folder(self, folder: Path, name: str) -> None:
        """An image of one layer, of what is in a folder."""
        script = f"tar -C {shlex.quote(str(folder))} -c . | podman import --quiet - {shlex.quote(name)}"
        self.gently("bash", "-o", "pipefail", "-c", script)

    def build(self, text: str, name: str, *, context: Path, more: Sequence[str] = ()) -> None:
        """An image of a few lines of a Dockerfile."""
        file = self.folder / "Dockerfile"
        file.write_text(text)
        self.gently("buildah", "build", "--file", str(file), *more, "--tag", name, str(context))

    def network(self, name: str) -> str:
        """A bridge of its own; the first three numbers of its addresses."""
        subnet = _free_subnet()
        self.podman("network", "create", "--subnet", f"{subnet}.0/24", name)
        return subnet

    def inspect(self, name: str) -> Any:
        return json.loads(self.podman("inspect", name))[0]

    def logs(self, name: str) -> str:
        """What a container wrote, to both of its outputs."""
        command = ["podman", "logs", name]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def docker_host(self) -> str:
        """Where podman answers as Docker does, until the end."""
        socket = self.folder / "docker.sock"
        if self._service is None:
            command = ["podman", "system", "service", "--time", "0", f"unix://{socket}"]
            self._service = subprocess.Popen(command, env=self.variables)
            while not socket.exists():
                assert self._service.poll() is None, "podman's service ended"
                time.sleep(0.1)
        return f"unix://{socket}"

    def _do(
        self,
        command: Sequence[str],
        *,
        text: str | None = None,
        cwd: Path | None = None,
        more: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> str:
        variables = {**self.variables, **(more or {})}
        done = subprocess.run(command, env=variables, cwd=cwd, input=text, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise EngineFailed(f"{shlex.join(command)}: {done.stdout[-3000:]}{done.stderr[-6000:]}")
        return done.stdout


def _settings(folder: Path) -> str:
    """Of containers.conf. Nobody here may raise limits, and crun does not know this kind of machine's cgroups."""
    limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    ours = [f'"{name}={":".join(map(str, _bounded(kind)))}"' for name, kind in limits.items()]
    return "\n".join(
        [
            "[containers]",
            f"default_ulimits = [{', '.join(ours)}]",
            "[engine]",
            'runtime = "runc"',
            'cgroup_manager = "cgroupfs"',
            'events_logger = "file"',
            # Names without a registry are those of images that were built here.
            "compat_api_enforce_docker_hub = false",
            f'tmp_dir = "{folder}/tmp"',
            "[network]",
            # Knows containers by name on networks that lead nowhere, too.
            'network_backend = "netavark"',
            f'network_config_dir = "{folder}/net"',
            "",
        ]
    )


def _bounded(kind: int) -> tuple[int, int]:
    most = 4096
    soft, hard = (most if limit == resource.RLIM_INFINITY else min(limit, most) for limit in resource.getrlimit(kind))
    return soft, hard


def _free_subnet() -> str:
    """Three numbers of addresses that lead nowhere from here."""
    routes = subprocess.run(["ip", "-4", "route"], check=True, capture_output=True, text=True).stdout
    return random.choice([subnet for number in range(256) if (subnet := f"10.213.{number}") not in routes])
