"""bf16 projections by oneDNN with weights reordered once: the fallback where our own kernels cannot run."""

from bisect import bisect_left

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.cpu.gemm import Epilogue

REORDERED_FOR_ROWS = 512
"""Batch for which oneDNN lays weights out; the layout serves every other batch as well (measured at 1 to 2048)."""

_BLOCK = 512
_ROW_COUNTS = (1, 2, 4, 8, *range(16, 128, 16), *range(128, 256, 32), *range(256, 512, 64), _BLOCK, 528, 544, 576)
"""Numbers of rows with which oneDNN is called: others are padded, and more are split into blocks.

It compiles a kernel for every shape, and both it and torch's wrapper of it cache the last 1,024: batches of all sizes
took about 170 MB beside the memory budget of the built-in model. A padded batch takes as long as one of that
size. Up to 64 remaining rows join the last block: on their own they would read all weights once more.
"""


class OneDnnLinear:
    """Interface of `PackedLinear` on torch's own operators. It allocates its result, and cannot be looked up by id."""

    __slots__ = ("_bias", "_epilogue", "_weight", "columns", "depth", "dtype", "nbytes", "out_dtype")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, epilogue: Epilogue = Epilogue.STORE) -> None:
        """Reorder `weight`, as PackedLinear's. Raises ValueError unless it is bf16 and oneDNN supports that."""
        if weight.dtype is not torch.bfloat16 or not onednn_bf16():
            raise ValueError(f"oneDNN does not take {weight.dtype} weights here")
        rows, self.depth = weight.shape
        self.columns = rows // 2 if epilogue is Epilogue.GATED else rows
        self.dtype = weight.dtype
        self.out_dtype = torch.float32 if epilogue is Epilogue.STORE_FLOAT32 else weight.dtype
        self.nbytes = weight.nbytes
        self._epilogue = epilogue
        self._bias = bias
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, REORDERED_FOR_ROWS)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Multiply `x` `[num_rows, depth]` into `out` `[num_rows, num_columns]`. Raises ValueError for others."""
        if x.shape[1:] != (self.depth,) or out.shape != (x.shape[0], self.columns):
            raise ValueError(
                f"this projection takes rows of {self.depth} to {self.columns}, "
                f"not {tuple(x.shape)} to {tuple(out.shape)}"
            )
        if x.dtype is not self.dtype or out.dtype is not self.out_dtype:
            raise ValueError(f"this projection takes {self.dtype} to {self.out_dtype}, not {x.dtype} to {out.dtype}")
        begin = 0
        while len(x) - begin > _ROW_COUNTS[-1]:
            self._multiply(x[begin : begin + _BLOCK], out[begin : begin + _BLOCK])
            begin += _BLOCK
        self._multiply(x[begin:], out[begin:])

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        """Do as `__call__` for at most the largest of `_ROW_COUNTS` rows."""
        num_rows = len(x)
        if padding := _ROW_COUNTS[bisect_left(_ROW_COUNTS, num_rows)] - num_rows:
            x = F.pad(x, (0, 0, 0, padding))
        product = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        if padding:
            product = product[:num_rows]
        if self._epilogue is Epilogue.GATED:
            gate, value = product.chunk(2, dim=-1)
            torch.mul(F.silu(gate), value, out=out)
        elif self._epilogue is Epilogue.ADD:
            out += product
        else:
            out.copy_(product)


def onednn_bf16() -> bool:
    """Whether this torch and processor run bf16 through oneDNN."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
