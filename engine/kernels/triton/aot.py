"""Compiles every kernel for sm_90 without a GPU: `python -m engine.kernels.triton.aot [--representative] [--json]`.

Prints registers per thread, bytes of spilled registers per thread, and shared memory per program, as the assembler and
the linker that come with triton report them, and exits with 1 when a kernel spills more than `MAX_SPILL_BYTES` or needs
more shared memory than a program may have. Compiled kernels go to triton's cache (TRITON_CACHE_DIR).
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels.triton.aot_cases import AotCase, all_cases
from engine.kernels.triton.tuning import LaunchTable, load_table

_TARGET = GPUTarget("cuda", 90, 32)
_DIVISIBLE: list[list[object]] = [["tt.divisibility", 16]]
MAX_SPILL_BYTES = 64
"""Most bytes spilled per thread. A few words spilled outside a loop cost less than a smaller tile."""
MAX_TIMED_SPILL_BYTES = 288
"""The same of a launch that was timed on a GPU: on an H200 prefill that spills 208 bytes makes 495 TFLOP/s, and 355
with twice the threads, which spill nothing."""
MAX_SHARED_BYTES = 227 * 1024
"""Most shared memory of one program on sm_90."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """Resources of one compiled kernel."""

    name: str
    registers: int
    spill_bytes: int
    """Stack per thread: these kernels have no arrays of their own, so it is all spills."""
    shared_bytes: int
    num_warps: int
    num_stages: int
    timed: bool = False

    @property
    def excessive(self) -> bool:
        """Whether the kernel exceeds a bound."""
        most = MAX_TIMED_SPILL_BYTES if self.timed else MAX_SPILL_BYTES
        return self.spill_bytes > most or self.shared_bytes > MAX_SHARED_BYTES


def source_of(case: AotCase) -> ASTSource:
    """Source to compile for a case. Raises ValueError when the case leaves an argument undefined."""
    names = case.kernel.arg_names
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    signature = {name: case.types.get(name, "constexpr") for name in names}
    missing = [name for name in names if name not in case.types and name not in case.constants]
    if missing:
        raise ValueError(f"{case.name}: arguments without type or value: {missing}")
    return ASTSource(case.kernel, signature, constants, _alignments(case))


def compile_case(case: AotCase) -> KernelResources:
    """Compile one case to machine code. Returns its resources. Raises triton's errors when it cannot be compiled."""
    fuse = not case.constants.get("FIXED_KEYS")  # as the launchers do
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, "enable_fp_fusion": fuse}
    options["launch_pdl"] = bool(case.constants.get("PDL"))
    compiled = triton.compile(source_of(case), target=_TARGET, options=options)
    registers, stack = _usage(compiled.asm["cubin"])
    return KernelResources(
        name=case.name,
        registers=registers,
        spill_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        timed=case.timed,
    )


def _alignments(case: AotCase) -> dict[tuple[int], list[list[object]]]:
    """Alignments that a launch would find: pointers, strides and sizes are multiples of 16 in every model worth tuning.

    Arguments that the kernel's decorator excludes from specialisation are left out.
    """
    return {
        (parameter.num,): _DIVISIBLE
        for parameter in case.kernel.params
        if parameter.name in case.types
        and not parameter.do_not_specialize
        and not parameter.do_not_specialize_on_alignment
        and not case.types[parameter.name].startswith("fp")
    }


def compile_all(table: LaunchTable, *, representative: bool = False, only: str = "") -> Iterator[KernelResources]:
    """Compile the cases one after another, with launches of `table`; `only`: those whose name contains it."""
    for case in all_cases(table):
        if (case.representative or not representative) and only in case.name:
            yield compile_case(case)


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes, by the `cuobjdump` that triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    if found is None:
        raise ValueError(f"cuobjdump printed no resource usage: {done.stdout!r:.200}")
    return int(found[1]), int(found[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row per kernel while compiling. Returns 1 when one exceeds a bound."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.triton.aot", description="compile for sm_90")
    parser.add_argument("--representative", action="store_true", help="only what every test run compiles")
    parser.add_argument("--only", default="", metavar="TEXT", help="only kernels whose name holds this")
    parser.add_argument("--gpu", default="NVIDIA H200", help="whose launch table; default: %(default)s")
    parser.add_argument("--tables", type=Path, help="directory of launch tables; default: the shipped ones")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    table = load_table(options.gpu, options.tables) if options.tables else load_table(options.gpu)
    excessive = 0
    for found in compile_all(table, representative=options.representative, only=options.only):
        excessive += found.excessive
        if options.json:
            line = json.dumps(asdict(found))
        else:
            line = (
                f"{found.name:44} {found.registers:4} registers {found.spill_bytes:5} B spilled "
                f"{found.shared_bytes:7} B shared {found.num_warps:3} warps {found.num_stages:2} stages"
                f"{'  TOO MUCH' if found.excessive else ''}"
            )
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 1 if excessive else 0


if __name__ == "__main__":
    sys.exit(main())
