"""Which kernel variants an engine makes Triton compile, as a launch on an H200 would choose."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SETTING = "TRITON_INTERPRET"
NUM_BATCHES = 60
pytestmark = pytest.mark.timeout(900)
"""Compiling takes a minute of a slow processor, many at the lowest priority of a busy one."""


@pytest.fixture(scope="module")
def found(request):
    """In a new process: this one may use the interpreter. Random batches are run for the one test that needs them."""
    covers_all = test_triton_warm_up_covers_all_specialisations.__name__
    num_batches = NUM_BATCHES if any(item.name == covers_all for item in request.session.items) else 0
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    command = [sys.executable, "-m", "tests.unit.engine.kernels.triton_specialisations", str(num_batches)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.turn(2)
def test_triton_warm_up_covers_all_specialisations(found):
    """For any number of rows, alignment of arrays, and sampling options."""
    assert len(found["launched"]) > 20
    assert not found["late"]


def test_triton_warm_up_compiles_only_launched_kernels(found):
    """Types, alignments, absent arguments, warps and stages: reported registers and spills are the real ones."""
    launched = found["launched"]
    cases = {case.pop("name"): case for case in found["cases"]}
    astray = {name for name, case in cases.items() if case not in launched}
    assert all("fixed" in name for name in astray), astray  # of other dtypes than this engine's
    assert len(cases) - len(astray) > 15
