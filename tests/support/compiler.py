"""Skips what compiles native code where there is no compiler for it."""

import shutil

import pytest

from tandem.native.build import COMPILERS

WITHOUT_COMPILER = f"there is no C++ compiler here ({' or '.join(COMPILERS)})"


def has_compiler() -> bool:
    return any(shutil.which(name) for name in COMPILERS)


needs_compiler = pytest.mark.skipif(not has_compiler(), reason=WITHOUT_COMPILER)
