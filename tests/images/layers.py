"""Layers of files and processes that see nothing else, made of the kernel's own parts: what an engine does, in small.

The base image is this machine, with its Python as `python3`: all is laid over it and nothing of it is changed. Needs
root and a mount namespace of its own (see __main__.py), with which all mounts and layers go away. Nothing here removes
files: what lies below a mount is the machine's.
"""

import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_SEEN = {
    "bin",
    "dev",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "opt",
    "proc",
    "root",
    "run",
    "sbin",
    "sys",
    "usr",
    "var",
}
_INHERITED = (
    "PIP_",
    "SSL_",
    "REQUESTS_",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "NO_PROXY",
)


class Layers:
    """Places for layers, in memory. `machine` is the mount namespace in which they must not be made."""

    def __init__(self, folder: Path, *, machine: str) -> None:
        self._folder = folder
        self._count = 0
        if namespace() == machine:
            raise RuntimeError("layers are mounts: only in a mount namespace of their own")
        _run("mount", "-t", "tmpfs", "-o", "size=16g", "layers", str(folder))
        self.base = self._new("base")
        (self.base / "root").mkdir(mode=0o755)

    def grow(self, parents: Sequence[Path], name: str) -> tuple[Path, Path]:
        """A new layer on top of others: where it is kept, and the root that shows all of them."""
        top = self._new(name)
        return top, self._mount(parents, name, upper=top)

    def show(self, parents: Sequence[Path], name: str) -> Path:
        """A root that nobody can write to; what an engine mounts comes on top of it."""
        places = self._new(name)
        for folder in ("etc/tandem/cluster", "cache", "models"):
            (places / folder).mkdir(parents=True)
        return self._mount([*parents, places], name, upper=None)

    def _new(self, name: str) -> Path:
        self._count += 1
        made = self._folder / f"{self._count}-{name}"
        made.mkdir(mode=0o755)
        return made

    def _mount(self, parents: Sequence[Path], name: str, *, upper: Path | None) -> Path:
        root = self._new(f"{name}-root")
        options = "lowerdir=" + ":".join([*map(str, reversed(parents)), "/"])
        if upper is not None:
            options += f",upperdir={upper},workdir={self._new(f'{name}-work')}"
        _run("mount", "-t", "overlay", "overlay", "-o", options, str(root))
        _devices(root / "dev")
        _run("mount", "-o", "bind,ro", sys.base_prefix, str(root / "usr/local"))  # where images of Python have it
        for hidden in (one for one in root.iterdir() if one.is_dir() and not one.is_symlink()):
            if hidden.name not in {*_SEEN, "cache", "models", "build", "own"}:
                _run("mount", "-t", "tmpfs", "-o", "mode=1777", "hidden", str(hidden))
        return root


def namespace() -> str:
    """Of mounts, that this process is in."""
    return str(Path("/proc/self/ns/mnt").readlink())


def start(
    root: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    folder: str,
    user: int = 0,
    mounts: Mapping[Path, str] | None = None,
    output: int | None = None,
) -> "subprocess.Popen[bytes]":
    """A process that is number 1 of its own, with this root; a user other than root has no right that root has.

    `output`: where its output goes, as `subprocess` says it.
    """
    bound = [f"mount --bind {shlex.quote(str(at))} {shlex.quote(str(root) + to)}" for at, to in (mounts or {}).items()]
    bound += [f"mount -t tmpfs -o mode=1777 fresh {root}{one}" for one in ("/tmp", "/cache", "/models") if user]
    inside = ["chroot", str(root)]
    if user:
        rights = ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        inside += ["setpriv", f"--reuid={user}", "--regid=0", "--clear-groups", *rights, "--"]
    inside += ["env", "-i", "-C", folder, *(f"{name}={value}" for name, value in variables.items()), *command]
    script = " && ".join([f"mount -t proc proc {root}/proc", *bound, f"exec {shlex.join(inside)}"])
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    return subprocess.Popen([*apart, "sh", "-c", script], stdout=output)


def _devices(at: Path) -> None:
    """Of its own: nobody who does something to these does it to the machine's."""
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "devices", str(at))
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(at / name, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        (at / name).chmod(0o666)
    for name, to in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        (at / name).symlink_to(f"/proc/self/fd{to}")
    (at / "shm").mkdir()
    _run("mount", "-t", "tmpfs", "-o", "mode=1777,size=256m", "shared", str(at / "shm"))


def inherited_variables() -> dict[str, str]:
    """Variables with which a builder reaches packages."""
    return {name: value for name, value in os.environ.items() if name.startswith(_INHERITED)}


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
