"""The version before this one, as `python -m tests.previous REVISION` keeps it: its code, what it says, its protos.

Tests run it beside this one. Its model is this checkout's: weights are no part of a version.
"""

import json
import lzma
import os
import subprocess
import sys
import tarfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from cluster.processes.effective_config import module_prefix
from cluster.processes.launcher import Command
from cluster.supervisor.supervisor import ProcessPlan, Role
from tandem.model_path import BUILTIN, model_directory
from tandem.protocol.version_negotiation import VersionRange
from tests.previous.revision import DEFAULTS_INSIDE, unpack, unpack_tar

DATA = Path(__file__).with_name("data")
ARCHIVE = DATA / "code.tar.xz"
DESCRIPTORS = DATA / "wire.binpb"
SAMPLES = DATA / "samples.json"
SAMPLES_INSIDE = "samples"
"""In the archive: this folder's, as it was when that version was the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """Which versions of the protocols it speaks."""

    session: VersionRange
    handoff: VersionRange


def spoken() -> Spoken:
    """As its HELLOs say."""
    versions = json.loads(SAMPLES.read_text())["spoken"]
    return Spoken(session=VersionRange(*versions["session"]), handoff=VersionRange(*versions["handoff"]))


def descriptors() -> FileDescriptorSet:
    """Of its `.proto` files."""
    return FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())


def samples() -> dict[str, bytes]:
    """What it says (`tests.previous.samples`)."""
    return {name: bytes.fromhex(data) for name, data in json.loads(SAMPLES.read_text())["said"].items()}


def samples_read() -> dict[str, Any]:
    """What it understands of those itself."""
    read: dict[str, Any] = json.loads(SAMPLES.read_text())["read"]
    return read


class Release:
    """Unpacked code of the previous version."""

    def __init__(self, folder: Path, revision: str | None = None) -> None:
        """`folder`: an empty one, which is the code's from now on. `revision`: of this checkout's history, in place of
        the version before.
        """
        self.folder = folder
        if revision is None:
            with tarfile.open(fileobj=BytesIO(lzma.decompress(ARCHIVE.read_bytes()))) as archive:
                unpack_tar(archive, folder)
        else:
            unpack(revision, folder)
        (folder / "engine/builtin_model").symlink_to(model_directory(BUILTIN))

    def says_of(self, messages: Mapping[str, bytes]) -> dict[str, Any]:
        """What its code understands of samples."""
        encoded = json.dumps({name: data.hex() for name, data in messages.items()})
        command = [sys.executable, "-P", "-m", SAMPLES_INSIDE, "read"]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment(), input=encoded, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        read: dict[str, Any] = json.loads(done.stdout)
        return read

    def environment(self) -> dict[str, str]:
        """Of a process of it, but for its folder."""
        return {**os.environ, "PYTHONPATH": str(self.folder)}

    def defaults(self) -> dict[str, Any]:
        """Every setting that it knows, with its default."""
        read: dict[str, Any] = yaml.safe_load((self.folder / DEFAULTS_INSIDE).read_text())
        return read

    def command(self, plan: ProcessPlan, config_path: Path, ready_fd: int) -> list[str]:
        """How `LocalCluster` starts a process of it: with the arguments that its own parent would give it."""
        own = self.config(config_path, plan.name)
        arguments = ["--config", str(own), "--index", str(plan.index), "--ready-fd", str(ready_fd)]
        if plan.role is Role.ROUTER and yaml.safe_load(own.read_text())["router"]["processes"] > 1:
            arguments += ["--siblings", str(config_path.parent)]
        return [*self.prefix(), *module_prefix(plan.role), *arguments]

    def config(self, config_path: Path, name: str) -> Path:
        """A configuration without the settings that it does not know, which it would refuse."""
        own = config_path.with_name(f"previous-{name}.yaml")
        own.touch(mode=0o600)
        own.write_text(yaml.safe_dump(known(yaml.safe_load(config_path.read_text()), self.defaults())))
        return own

    def prefix(self) -> list[str]:
        """What a command line of Python begins with, to run in its folder and with its code."""
        return ["/usr/bin/env", "-C", str(self.folder), f"PYTHONPATH={self.folder}"]

    def among(self, names: Collection[str], others: Command) -> Command:
        """How `LocalCluster` starts these processes from it, and all others as `others` says."""

        def command(plan: ProcessPlan, config_path: Path, ready_fd: int) -> Sequence[str]:
            return (self.command if plan.name in names else others)(plan, config_path, ready_fd)

        return command


def known(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Of a configuration what stands in `defaults`, too. What is empty there may hold anything."""
    return {
        name: known(value, defaults[name]) if isinstance(value, dict) and defaults[name] else value
        for name, value in config.items()
        if name in defaults
    }
