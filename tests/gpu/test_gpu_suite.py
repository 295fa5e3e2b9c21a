"""Kernels and engine on CUDA, as tandem_bench/gpu_suite.py compares them: with plain torch and with transformers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]
ROOT = Path(__file__).parents[2]


def test_parity_of_kernels_and_engine(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    command = [sys.executable, str(ROOT / "tandem_bench" / "gpu_suite.py"), "--only", "parity", "--json", str(file)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())["rows"]
    judged = [row for row in rows if row["goal"] is not None]
    assert any("bfloat16" in row["name"] for row in judged)
    assert all(row["met"] for row in judged)
