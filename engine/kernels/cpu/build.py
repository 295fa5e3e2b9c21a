"""Builds the library of compiled kernels: the sources of this folder, linked with torch's own OpenMP runtime.

The sources use no torch headers, so the library fits every torch, and torch's extension loader, which would need ninja
and link libtorch, is not needed (see tandem/native/build.py).
"""

import ctypes
import os
from pathlib import Path

from tandem.native import build as native
from tandem.native.build import NATIVE, NativeUnavailable, Processors, Recipe
from tandem.native.library import address_of

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=c++17", "-O3", NATIVE, "-fopenmp", "-fPIC", "-fno-math-errno", "-fvisibility=hidden")
_TORCH = "libtorch_cpu.so"

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
    openmp = torch_openmp_runtime() or "-lgomp"
    return Recipe(name="kernels", sources=sources, flags=FLAGS, libraries=(openmp,), processors=PROCESSORS)


class _SymbolInfo(ctypes.Structure):
    """`Dl_info` of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def torch_openmp_runtime() -> str | None:
    """Path of the OpenMP library that torch runs on; None until torch is imported.

    Linking against that very file makes the kernels run on torch's thread pool: a second pool would compete for
    the cores, because idle OpenMP threads spin. Other packages may have brought OpenMP libraries of their own
    (scikit-learn does), which neither torch nor the kernels call.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if line.endswith(f"/{_TORCH}"))
    torch = next(paths, None)
    return None if torch is None else openmp_runtime_of(torch)


def openmp_runtime_of(library: str) -> str | None:
    """Path of the OpenMP library that a loaded library calls; None if it calls none, or is not loaded."""
    info = _SymbolInfo()
    try:
        # Of a library's handle, dlsym(3) finds what the library or one of its dependencies defines, the nearest first.
        function = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD).GOMP_parallel
        found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address_of(function)), ctypes.byref(info))
    except (AttributeError, OSError):
        return None
    return os.fsdecode(info.file) if found and info.file else None
