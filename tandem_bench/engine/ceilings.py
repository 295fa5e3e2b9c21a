"""The machine's maximum rates: bytes read and operations per second, measured here and now.

The best of several short tries counts: a ceiling is what an undisturbed machine reaches, and a shared machine's
bandwidth may halve from one second to the next.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.gemm import huge_bytes
from engine.kernels.cpu.library import KernelLibrary, load_kernels
from engine.kernels.cpu.measure import measure_ceilings
from tandem_bench.report import Row, figure

_READ_BYTES = 1 << 30
"""Size of several times the largest last-level cache (300 MiB on the machine of these figures)."""
_GEMM_ROWS, _GEMM_WIDTH = 1024, 4096
_GEMV_ROWS, _GEMV_WIDTH = 65_536, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Maximum rates of one device."""

    read_bytes_per_s: float
    """Rate of streaming memory that no cache holds."""
    gemm_flops_per_s: float
    """Rate of a large matrix product through torch: oneDNN on a CPU, cuBLAS on CUDA."""
    gemv_bytes_per_s: float
    """Rate of a matrix times a vector through torch, in bytes of the matrix."""
    peak_flops_per_s: float | None = None
    """Rate of the matrix units when nothing has to be fetched; None where no kernel measures it."""

    def rows(self) -> list[Row]:
        rows = [
            figure("ceiling.read", self.read_bytes_per_s / 1e9, "GB/s"),
            figure("ceiling.gemv", self.gemv_bytes_per_s / 1e9, "GB/s"),
            figure("ceiling.gemm", self.gemm_flops_per_s / 1e12, "TFLOP/s"),
        ]
        if self.peak_flops_per_s is not None:
            rows.append(figure("ceiling.peak", self.peak_flops_per_s / 1e12, "TFLOP/s"))
        return rows


def measure(device: torch.device, dtype: torch.dtype, num_threads: int) -> Ceilings:
    """Measure all rates, in about two seconds."""
    torch.set_num_threads(num_threads)
    library = own_kernels() if device.type == "cpu" else None
    with torch.inference_mode():
        return Ceilings(
            read_bytes_per_s=ReadMeter(device, num_threads).bytes_per_s(tries=8),
            gemm_flops_per_s=_gemm(device, dtype),
            gemv_bytes_per_s=_gemv(device, dtype),
            peak_flops_per_s=None if library is None else _tile_rate(library, num_threads),
        )


def own_kernels() -> KernelLibrary | None:
    """Load the engine's compiled kernels, which are closer to the machine than torch's operators, or None."""
    try:
        return load_kernels()
    except KernelsUnavailable:
        return None


class ReadMeter:
    """Reads more memory than any cache holds; keeps it allocated, so that page faults are not measured."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._device = device
        library = own_kernels() if device.type == "cpu" else None
        if library is None:
            self._data = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
            self._read: Callable[[], object] = self._data.sum
        else:
            self._data = huge_bytes(library, _READ_BYTES).fill_(1)
            self._read = _own_read(library, self._data, num_threads)

    def bytes_per_s(self, *, tries: int = 3) -> float:
        """Return the rate of the fastest pass."""
        return self._data.nbytes / _best_s(self._read, self._device, tries)


def _own_read(library: KernelLibrary, data: Tensor, num_threads: int) -> Callable[[], object]:
    read = library.function("tandem_read_bytes", "pii", "i")
    return lambda: read(data.data_ptr(), data.nbytes, num_threads)


def _tile_rate(library: KernelLibrary, num_threads: int) -> float | None:
    # A round is shorter than a scheduler's time slice: of many rounds, some are undisturbed.
    found = measure_ceilings(library, num_threads=num_threads, rounds=100, read_bytes=1 << 20)
    return found.tile_tflop_s * 1e12 or None


def _gemm(device: torch.device, dtype: torch.dtype) -> float:
    x = torch.randn(_GEMM_ROWS, _GEMM_WIDTH, device=device).to(dtype)
    weight = torch.randn(_GEMM_WIDTH, _GEMM_WIDTH, device=device).to(dtype)
    return 2 * _GEMM_ROWS * _GEMM_WIDTH**2 / _best_s(lambda: F.linear(x, weight), device, 8)


def _gemv(device: torch.device, dtype: torch.dtype) -> float:
    x = torch.randn(1, _GEMV_WIDTH, device=device).to(dtype)
    weight = torch.ones(_GEMV_ROWS, _GEMV_WIDTH, dtype=dtype, device=device)
    return weight.nbytes / _best_s(lambda: F.linear(x, weight), device, 4)


def _best_s(fn: Callable[[], object], device: torch.device, tries: int) -> float:
    fn()
    best_s = float("inf")
    for _ in range(tries):
        _settle(device)
        started_s = time.perf_counter()
        fn()
        _settle(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
