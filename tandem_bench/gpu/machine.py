"""The machine and its measured maximum rates, with which the engine's are compared."""

import importlib.util
import os
import platform
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.backends.select import select_backend
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.gpu.timing import seconds_per_call
from tandem_bench.report import figure

_PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "numpy", "safetensors")
_READ_BYTES, _SMALL_READ_BYTES = 4 << 30, 64 << 20
_GEMMS = ((8192, 8192, 8192), (8192, 4096, 28_672), (8192, 14_336, 4096), (4096, 4096, 4096))
"""Rows, depth, columns: a square product, and the largest of an 8B model over 8k tokens."""
_SMALL_GEMMS = ((256, 256, 256),)


def environment(stage: Stage) -> Findings:
    yield Note(name="python", text=f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")
    for package in _PACKAGES:
        yield Note(name=package, text=_version(package))
    place = stage.place
    if place.type == "cuda":
        facts = torch.cuda.get_device_properties(place)
        yield Note(name="gpu", text=f"{facts.name}, sm_{facts.major}{facts.minor}")
        yield Note(name="cuda", text=str(torch.version.cuda))
        yield figure("gpu.memory", facts.total_memory / 2**30, "GiB")
        yield figure("gpu.free_memory", torch.cuda.mem_get_info(place)[0] / 2**30, "GiB")
        yield figure("gpu.multiprocessors", facts.multi_processor_count, "")
    backend = select_backend(stage.backend_options)
    yield Note(name="backend", text=f"{backend.name} ({type(backend).__name__})")


def ceilings(stage: Stage) -> Findings:
    yield figure("ceiling.read", read_bytes_per_s(stage) / 1e9, "GB/s")
    dtypes = (torch.float32,) if stage.is_small else (torch.bfloat16, torch.float16)
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        yield figure(f"ceiling.gemm.{name}", gemm_flops_per_s(stage, dtype) / 1e12, "TFLOP/s")


def read_bytes_per_s(stage: Stage) -> float:
    """Measure streaming memory that no cache holds: the better of a sum and a matrix times a vector."""
    size = _SMALL_READ_BYTES if stage.is_small else _READ_BYTES
    dtype = getattr(torch, stage.dtype)
    width = 8192
    matrix = torch.ones(size // width // dtype.itemsize, width, dtype=dtype, device=stage.place)
    vector = torch.ones(1, width, dtype=dtype, device=stage.place)
    words = matrix.view(torch.int32)
    ways = (lambda _: F.linear(vector, matrix), lambda _: words.amax())
    return matrix.nbytes / min(seconds_per_call(way, stage.place, calls=2) for way in ways)


def gemm_flops_per_s(stage: Stage, dtype: torch.dtype) -> float:
    """Measure the best of several large products through torch, of random numbers, as power depends on data."""
    return max(_gemm_rates(stage, dtype))


def _gemm_rates(stage: Stage, dtype: torch.dtype) -> Iterator[float]:
    for rows, depth, columns in _SMALL_GEMMS if stage.is_small else _GEMMS:
        x = torch.randn(rows, depth, device=stage.place).to(dtype)
        weight = torch.randn(columns, depth, device=stage.place).to(dtype)
        seconds = seconds_per_call(partial(_product, x, weight), stage.place, calls=8)
        yield 2 * rows * depth * columns / seconds


def _product(x: Tensor, weight: Tensor, _number: int) -> Tensor:
    return F.linear(x, weight)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "importable" if importlib.util.find_spec(package.partition("-")[0]) else "not installed"
