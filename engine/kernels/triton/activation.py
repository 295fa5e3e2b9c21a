"""The gate of SwiGLU (Shazeer, 2020): `silu(gate) * up` of one stacked projection."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(stacked_ptr, out_ptr, stacked_stride, size, BLOCK: tl.constexpr):
    """Compute one section of one row, in float32."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate_ptr = stacked_ptr + row * stacked_stride + columns
    gate = tl.load(gate_ptr, mask=mask, other=0.0)
    up = tl.load(gate_ptr + size, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out_ptr + row * size + columns, (wide * tl.sigmoid(wide) * up).to(gate.dtype), mask=mask)


def silu_mul(stacked: Tensor, out: Tensor) -> None:
    """Gate `[num_rows, 2 * size]`, gate before up, into contiguous `[num_rows, size]`."""
    num_rows, size = out.shape
    if num_rows:
        silu_mul_kernel[(num_rows, -(-size // _BLOCK))](stacked, out, stacked.stride(0), size, BLOCK=_BLOCK)
