"""Programmatic dependent launch (CUDA Programming Guide, Hopper and newer): a kernel starts while the one before ends.

A decoding step is hundreds of kernels of a few microseconds, and between two the memory stands still: the last
programs of one end, the next is launched, and fills its pipelines. A kernel launched with `launch_pdl` may start when
every program of the kernel before has called `launch_dependents` or ended. It may then read what no such kernel of the
step writes: weights, and what was complete when the last kernel without `launch_pdl` began. It must call
`wait_for_previous` before it touches anything else: that returns when the kernel before has ended and its writes can be
seen.

Every program of such a kernel must wait, also one with nothing to do: "the kernel before has ended" says something
about the kernels before that only because it has waited too.
"""

import triton
import triton.language as tl
from triton.language.extra import cuda

LINE_BYTES = tl.constexpr(128)
"""Bytes that one pointer of `prefetch_lines` fetches."""


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Let the next kernel start, and wait until the one before has ended; nothing unless launched so."""
    if PDL:
        # At once: programs of the next kernel take what room this one leaves, and fetch their weights meanwhile.
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()


@triton.jit
def prefetch_lines(pointers):
    """Ask for the lines of memory at `pointers`, without waiting: they come to the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
