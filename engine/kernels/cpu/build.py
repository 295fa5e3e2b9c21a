"""Builds the library of compiled kernels: the sources of this folder, linked with torch's own OpenMP runtime.

The sources use no torch headers, so the library fits every torch, and torch's extension loader, which would need ninja
and link libtorch, is not needed (see tandem/native/build.py).
"""

import re
from pathlib import Path

from tandem.native import build as native
from tandem.native.build import NATIVE, NativeUnavailable, Processors, Recipe

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O3", NATIVE, "-fopenmp", "-fPIC", "-fno-math-errno", "-fvisibility=hidden")
_OPENMP_RUNTIME = re.compile(r"/lib(?:gomp|iomp5|omp)[^/]*\.so[^/]*$")

_AVX2 = frozenset(("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_DOTS = {"avx512_vnni", "avx512_bf16"}
_TILES = {"amx_tile", "amx_bf16", "amx_int8"}
PROCESSORS = (
    Processors(
        flags=("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        features=_AVX512 | _DOTS | _TILES,
    ),
    Processors(flags=("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), features=_AVX512 | _DOTS),
    Processors(flags=("-march=x86-64-v4", "-mavx512vnni"), features=_AVX512 | {"avx512_vnni"}),
    Processors(flags=("-march=x86-64-v4",), features=_AVX512),
    Processors(flags=("-march=x86-64-v3",), features=_AVX2),
)
"""Kinds that the kernels tell apart: x86-64's levels of the System V ABI, and what the kernels use beyond them."""

KernelsUnavailable = NativeUnavailable
"""Raised when compiled kernels cannot be used here; the engine falls back to torch. The message gives the reason."""


def build(cache_root: Path | None = None, *, sources: Path = SOURCES) -> Path:
    """Path of the compiled library, which is built unless the cache has it. Raises KernelsUnavailable."""
    return native.build(recipe(sources), cache_root)


def recipe(sources: Path = SOURCES) -> Recipe:
    """Recipe of the kernels for this process."""
    openmp = mapped_openmp_runtime() or "-lgomp"
    return Recipe(name="kernels", sources=sources, flags=FLAGS, libraries=(openmp,), processors=PROCESSORS)


def mapped_openmp_runtime() -> str | None:
    """The OpenMP library mapped into this process, which is torch's once torch is imported; None without any.

    Linking against that very file makes the kernels run on torch's thread pool: a second pool would compete for
    the cores, because idle OpenMP threads spin.
    """
    runtimes = sorted(openmp_runtimes())
    return runtimes[0] if runtimes else None


def openmp_runtimes() -> set[str]:
    """Every OpenMP library mapped into this process."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/" in line)
    return {path for path in paths if _OPENMP_RUNTIME.search(path)}
