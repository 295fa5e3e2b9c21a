"""The compiled kernels of this process: loading, features of the processor, and entry points that can be recorded.

A C function is bound once, when an object that uses it is made, by `library.function(name, signature)`, and called
with plain integers (`tensor.data_ptr()`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.kernels.cpu.build import KernelsUnavailable, build, openmp_runtime_of, torch_openmp_runtime
from tandem.native.library import NativeLibrary, address_of


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFeatures:
    """Instruction sets that kernels may use: compiled in, present in the processor, and enabled by the operating
    system.
    """

    avx2: bool
    avx512: bool
    avx512_bf16: bool
    avx512_vnni: bool
    amx_bf16: bool
    amx_int8: bool
    fast_bf16_dot: bool  # AVX-512's dot product of bf16 pairs, and it multiplies faster than float multiply-adds do

    @classmethod
    def from_bits(cls, bits: int) -> "CpuFeatures":
        """Decode the bits of `tandem_cpu_features()`, in the order of the fields."""
        return cls(**{name: bool(bits >> index & 1) for index, name in enumerate(cls.__slots__)})


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One recorded call of a C function."""

    address: int
    signature: str
    arguments: tuple[Any, ...]


class KernelLibrary:
    """The loaded library. Loading it twice gives the same code, so an engine may own its own instance."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._library = NativeLibrary(path)
        self._tape: list[KernelCall] | None = None
        self.features = CpuFeatures.from_bits(self.function("tandem_cpu_features", "", "i")())

    def function(self, name: str, signature: str, returns: str = "") -> Callable[..., Any]:
        """Bind a C function by name, as NativeLibrary does."""
        found = self._library.bind(name, signature, returns)
        address = address_of(found)

        def kernel(*arguments: Any) -> Any:
            if self._tape is not None:
                self._tape.append(KernelCall(address=address, signature=signature, arguments=arguments))
            return found(*arguments)

        return kernel

    def address(self, name: str) -> int:
        """Address of a C function, for another to call."""
        return address_of(self._library.bind(name, ""))

    @contextmanager
    def recording(self) -> Iterator[list[KernelCall]]:
        """Record every call made through `function` within the context, by the one thread that uses this library."""
        tape: list[KernelCall] = []
        self._tape = tape
        try:
            yield tape
        finally:
            self._tape = None


def load_kernels(cache_root: Path | None = None) -> KernelLibrary:
    """Build the library if needed and load it. Import torch first: the kernels then share its threads.

    Raises KernelsUnavailable: no compiler, a build that fails, a processor without AVX2, or another OpenMP runtime than
    torch's.
    """
    library = KernelLibrary(build(cache_root))
    ours, torchs = openmp_runtime_of(str(library.path)), torch_openmp_runtime()
    if torchs is not None and ours != torchs:
        raise KernelsUnavailable(f"the kernels run on the OpenMP runtime {ours}, torch on {torchs}")
    if not library.features.avx2:
        raise KernelsUnavailable("the processor has no AVX2")
    return library
