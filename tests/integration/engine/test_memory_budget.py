"""A process under its full load stays within the memory budget made at start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.engine.memory_budget_main import MEMORY_BYTES

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("auto", "float32"),
        *(pytest.param(*way, marks=pytest.mark.slow) for way in (("auto", "bfloat16"), ("torch", "float32"))),
    ],
)
def test_engine_process_stays_within_memory_budget(kernels: str, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.engine.memory_budget_main", kernels, dtype],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["limit"] == MEMORY_BYTES
    assert found["most_used"] >= 0.9 * found["num_blocks"], "the load was too small to prove anything"
    assert found["grown"] > found["kv"] + found["weights"], "the process did not take what it was given"
    assert found["grown"] <= found["limit"]
