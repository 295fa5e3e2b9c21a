"""Scratch memory of selected pages never overlaps other threads', and returns the pages not selected."""

import shutil
import subprocess
from pathlib import Path

import pytest

from engine.kernels.cpu.build import SOURCES
from tandem.native.build import COMPILERS

NEIGHBOUR = Path(__file__).parent / "scratch_neighbour.cpp"


def test_cpu_scratch_foreign_mapping_is_kept(tmp_path):
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        pytest.skip("without a C++ compiler there are no compiled kernels, and the engine runs plain torch")
    program = tmp_path / "neighbour"
    flags = ("-std=c++17", "-O1", "-fopenmp", "-I", str(SOURCES))
    subprocess.run([compiler, *flags, str(NEIGHBOUR), "-o", str(program)], check=True, timeout=60)
    done = subprocess.run([str(program)], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "3 moved, 3 kept, 6 pages with the scratch, 3 after\n"
