"""The wheel that a checkout makes, built once."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.environment import ROOT


@pytest.fixture(scope="session")
def checkout() -> list[str]:
    """Its files as git knows them, ignored ones left out."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def wheel(checkout: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: what an earlier build left in `build/` would come along, and nothing is left there."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in checkout:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--disable-pip-version-check", "-w", str(dist)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False, timeout=600.0)
    assert done.returncode == 0, done.stdout + done.stderr
    [made] = dist.glob("*.whl")
    return made
