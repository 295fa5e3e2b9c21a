"""The compiled kernels, for all tests of them."""

import pytest

from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.library import KernelLibrary, load_kernels


@pytest.fixture(scope="module")
def library() -> KernelLibrary:
    """Without a compiler the engine computes in plain torch, which other tests hold: these have nothing to test."""
    try:
        return load_kernels()
    except KernelsUnavailable as missing:
        pytest.skip(f"no compiled kernels, plain torch runs instead: {missing}")
