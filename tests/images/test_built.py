"""The images, built and run here; takes minutes, mostly for packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_images_can_be_built_and_serve() -> None:
    assert os.geteuid() == 0, "layers are mounts: run this as root"
    command = [sys.executable, "-m", "tests.images"]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=3000.0)
