"""The code of one revision of this repository, unpacked from a checkout with its history."""

import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFAULTS_INSIDE = "defaults.yaml"
"""Beside the code: every setting that the version knows."""
_PACKAGES = frozenset(
    {"tandem", "engine", "kv_transfer", "fabric", "router", "worker", "prefill_worker", "decode_worker"}
)
"""What processes of any revision run; not every revision has all of them."""
_LEFT_OUT = (":!engine/builtin_model", ":!*.pyi")
_DEFAULTS = """
try:
    from tandem.config.cluster import ClusterConfig, dump
except ImportError:  # before tandem.config became a package
    from tandem.config import ClusterConfig, dump
print(dump(ClusterConfig()))
"""


def unpack(revision: str, folder: Path) -> None:
    """What processes of it run, without the model. A clone that lacks it (a shallow one) says so through git."""
    there = git("ls-tree", "--name-only", revision).decode().split()
    extract(revision, folder, *sorted(_PACKAGES.intersection(there)), "--", *_LEFT_OUT)
    (folder / DEFAULTS_INSIDE).write_bytes(python(folder, "-c", _DEFAULTS))


def extract(revision: str, folder: Path, *paths: str) -> None:
    """These files of it."""
    with tarfile.open(fileobj=BytesIO(git("archive", revision, *paths))) as archive:
        unpack_tar(archive, folder)


def unpack_tar(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive of our own. Python before 3.11.4 (Debian 12's) has no filters."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], stdout=subprocess.PIPE, check=True).stdout


def python(code: Path, *arguments: str) -> bytes:
    """The output of Python in that code's folder, with that code alone."""
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=code, env=environment, stdout=subprocess.PIPE, check=True).stdout
