"""Matrices on a GPU and how they are multiplied: dense ones here, others in `engine.backends.cuda.quantized`."""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.triton.gemm_few import MAX_ROWS, FewRowsWorkspace, gemm_few
from engine.kernels.triton.gemm_fixed import gemm_fixed
from engine.kernels.triton.gemv import gemv
from engine.kernels.triton.tuning import FewRowsLaunch, LaunchTable, OneRowLaunch


class Product(Protocol):
    """A matrix of weights `[out_features, in_features]` that multiplies rows."""

    @property
    def out_features(self) -> int:
        """Rows of the matrix; of a gated one, gates and values together."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that the weights hold."""
        ...

    def fuses(self, num_rows: int, *, is_gated: bool = False) -> bool:
        """Whether a kernel of ours multiplies so many rows and adds, or gates, in the same pass."""
        ...

    def fill(
        self, x: Tensor, bias: Tensor | None, out: Tensor, *, residual: Tensor | None = None, is_gated: bool = False
    ) -> None:
        """Fill `out` as `gemm_few` does, for rows that it fuses."""
        ...

    def multiply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """Multiply any number of rows, `[num_rows, in_features]`, to `[num_rows, out_features]`."""
        ...


class SplitWorkspace:
    """Memory for the parts of products whose depth is split: of the largest, complete when all are made."""

    def __init__(self) -> None:
        self.memory: FewRowsWorkspace | None = None

    def reserve(self, num_values: int, num_tiles: int, device: torch.device) -> None:
        """Hold at least so many numbers and counters."""
        if (present := self.memory) is not None:
            num_values = max(num_values, present.parts.numel())
            num_tiles = max(num_tiles, present.arrivals.numel())
        self.memory = FewRowsWorkspace.allocate(num_values, num_tiles, device)


class _Launches(NamedTuple):
    """Launches of our kernels for one matrix; None where the library serves that many rows."""

    one_row: OneRowLaunch | None
    few_rows: FewRowsLaunch | None


class DenseProducts:
    """How a backend multiplies by dense weights: in one fixed order, or few rows by kernels of ours and many by the
    vendor's library.
    """

    def __init__(
        self, table: LaunchTable, workspace: SplitWorkspace, *, dtype: torch.dtype, deterministic: bool, pdl: bool
    ) -> None:
        self.fixed = table.gemm(wide=dtype is torch.float32) if deterministic else None
        self.pdl = pdl
        self.workspace = workspace
        self._table = None if deterministic or dtype is torch.float32 else table

    def product(self, weight: Tensor, *, is_gated: bool = False) -> "DenseProduct":
        """Multiply by `weight`; `is_gated`: its rows are gates, then values."""
        return DenseProduct(weight, self, self._launches(weight, is_gated=is_gated))

    def _launches(self, weight: Tensor, *, is_gated: bool) -> _Launches:
        """Find the launches for a matrix, and keep memory for its parts."""
        if self._table is None:
            return _Launches(None, None)
        features, depth = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
        few_rows = self._table.few_rows(features, depth, gated=is_gated)
        if few_rows is not None and few_rows.num_splits > 1:
            num_tiles = -(-features // few_rows.block_n)
            num_values = num_tiles * few_rows.num_splits * few_rows.block_n * MAX_ROWS
            self.workspace.reserve(num_values, num_tiles, weight.device)
        return _Launches(self._table.one_row(features, depth, gated=is_gated), few_rows)


class DenseProduct:
    """Implements Product for weights in the dtype of the rows."""

    __slots__ = ("_launches", "_products", "_weight")

    def __init__(self, weight: Tensor, products: DenseProducts, launches: _Launches) -> None:
        self._weight = weight  # [out_features, in_features]
        self._products = products
        self._launches = launches

    @property
    def out_features(self) -> int:
        return self._weight.shape[0]

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes

    def fuses(self, num_rows: int, *, is_gated: bool = False) -> bool:
        few, one = self._launches.few_rows, self._launches.one_row
        return (num_rows <= MAX_ROWS and few is not None) or (num_rows == 1 and one is not None)

    def fill(
        self, x: Tensor, bias: Tensor | None, out: Tensor, *, residual: Tensor | None = None, is_gated: bool = False
    ) -> None:
        pdl, (one_row, few_rows) = self._products.pdl, self._launches
        if len(x) == 1 and one_row is not None:
            gemv(x, self._weight, bias, out, one_row, residual=residual, is_gated=is_gated, pdl=pdl)
        elif few_rows is not None:
            workspace = self._products.workspace.memory
            gemm_few(
                x,
                self._weight,
                bias,
                out,
                few_rows,
                residual=residual,
                workspace=workspace,
                is_gated=is_gated,
                pdl=pdl,
            )

    def multiply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        if self._products.fixed is None:
            return F.linear(x, self._weight, bias).to(out_dtype)
        out = x.new_empty(x.shape[0], self._weight.shape[0], dtype=out_dtype)
        gemm_fixed(x, self._weight, bias, out, self._products.fixed)
        return out
