"""Quantized weights on a GPU: which stored forms are multiplied as they are, and by which kernel.

Codes with scales by groups of columns, E4M3 numbers, and signed bytes whose inputs are not to be rounded multiply rows
of 16 bits (`group_gemm`). Signed bytes by row that were made for rounded inputs (W8A8) multiply these (`byte_gemm`).
All others are left to be restored: tables of sixteen values, E5M2, groups that share a part of a word. A matrix is
always multiplied by one kernel, whatever the number of rows, so that a token's result does not depend on its batch by
more than the order of a sum; in deterministic mode, not at all.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.cuda.products import Product, SplitWorkspace
from engine.kernels.triton.quantized.byte_gemm import byte_gemm
from engine.kernels.triton.quantized.group_gemm import group_gemm
from engine.kernels.triton.quantized.group_weights import GroupWeights, can_pack, pack_groups
from engine.kernels.triton.quantized.round_rows import round_rows
from engine.kernels.triton.tuning import LaunchTable, QuantizedLaunch
from engine.model.checkpoints.stored_matrix import Int8Matrix, StoredMatrix
from engine.quantize import rounding

_ROUNDED_GROUP = 32
"""Columns of a group of four bits that are made at load: as on CPUs, whose codes these are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """A launch for one matrix."""

    tiles: QuantizedLaunch
    num_splits: int


class QuantizedProducts:
    """Makes products of stored matrices. Rows must be in half precision or bfloat16."""

    def __init__(
        self,
        table: LaunchTable,
        workspace: SplitWorkspace,
        *,
        device: torch.device,
        num_sms: int,
        deterministic: bool,
        pdl: bool,
    ) -> None:
        """`num_sms`: multiprocessors of the device."""
        self.deterministic = deterministic
        self.pdl = pdl
        self.workspace = workspace
        self._device = device
        self._num_sms = num_sms
        self._table = table

    def keeps(self, matrix: StoredMatrix) -> bool:
        """Whether `product` takes a matrix."""
        return can_pack(matrix)

    def product(self, matrix: StoredMatrix) -> Product:
        """Copy a matrix that it keeps to the device. Raises ConfigError when the launch table has no entry for it."""
        if isinstance(matrix, Int8Matrix) and matrix.rounds_inputs:
            # Copied on every device: what is stored may view a file that is unmapped later.
            codes, scale = (part.contiguous().to(self._device, copy=True) for part in (matrix.codes, matrix.scale))
            return ByteProduct(codes, scale, self._launches("bytes", *codes.shape), self)
        weights = pack_groups(matrix, self._device)
        return GroupProduct(weights, self._launches("groups", *weights.shape, step=weights.span), self)

    def rounded(self, weight: Tensor, *, bits: int) -> Product:
        """Quantize a float matrix: to four bits by groups of 32 columns, if these divide its columns, else to eight by
        row. Raises ConfigError for values that are not finite.
        """
        if bits == 4 and weight.shape[1] % _ROUNDED_GROUP == 0:
            return self.product(rounding.round_groups(weight, _ROUNDED_GROUP))
        return self.product(rounding.round_rows(weight))

    def _launches(self, arithmetic: str, features: int, depth: int, *, step: int = 0) -> tuple[_Launch, ...]:
        """The launches of a matrix; memory for the parts of its depth is kept.

        `step`: depth that is multiplied at a time, where launches do not say it.
        """
        launches = []
        for tiles in self._table.quantized(arithmetic, deterministic=self.deterministic):
            num_splits = tiles.num_splits(features, -(-depth // (step or tiles.block_k)), self._num_sms)
            if num_splits > 1:
                num_tiles = -(-features // tiles.block_n)
                num_values = num_tiles * num_splits * tiles.block_n * tiles.block_m
                self.workspace.reserve(num_values, num_tiles, self._device)
            launches.append(_Launch(tiles=tiles, num_splits=num_splits))
        return tuple(launches)


class _QuantizedProduct(ABC):
    """Implements Product but for the kernel: quantized weights, and their launches by the number of rows."""

    __slots__ = ("_launches", "_products", "nbytes", "out_features")

    def __init__(
        self, out_features: int, nbytes: int, launches: tuple[_Launch, ...], products: QuantizedProducts
    ) -> None:
        self.out_features = out_features
        self.nbytes = nbytes
        self._launches = launches
        self._products = products

    def fuses(self, num_rows: int, *, is_gated: bool = False) -> bool:
        """See Product. Two sums of many rows would not find room in registers, and one launch has one result."""
        return not is_gated or (num_rows <= self._launches[0].tiles.rows and not self._products.deterministic)

    @abstractmethod
    def fill(
        self, x: Tensor, bias: Tensor | None, out: Tensor, *, residual: Tensor | None = None, is_gated: bool = False
    ) -> None:
        """See Product."""

    def multiply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        out = x.new_empty(x.shape[0], self.out_features, dtype=out_dtype)
        self.fill(x, bias, out)
        return out

    def _launch(self, num_rows: int) -> _Launch:
        return next(found for found in self._launches if not found.tiles.rows or num_rows <= found.tiles.rows)


class GroupProduct(_QuantizedProduct):
    """Weights with scales by groups, which multiply rows as they are."""

    __slots__ = ("_weights",)

    def __init__(self, weights: GroupWeights, launches: tuple[_Launch, ...], products: QuantizedProducts) -> None:
        super().__init__(weights.shape[0], weights.nbytes, launches, products)
        self._weights = weights

    def fill(
        self, x: Tensor, bias: Tensor | None, out: Tensor, *, residual: Tensor | None = None, is_gated: bool = False
    ) -> None:
        launch = self._launch(len(x))
        if self._weights.order is not None:
            x = x.index_select(1, self._weights.order)
        group_gemm(
            x,
            self._weights,
            bias,
            out,
            launch.tiles,
            residual=residual,
            workspace=self._products.workspace.memory,
            num_splits=1 if is_gated else launch.num_splits,
            is_gated=is_gated,
            pdl=self._products.pdl,
        )


class ByteProduct(_QuantizedProduct):
    """Signed bytes by row, which multiply rows that are rounded to bytes first."""

    __slots__ = ("_codes", "_scale")

    def __init__(
        self, codes: Tensor, scale: Tensor, launches: tuple[_Launch, ...], products: QuantizedProducts
    ) -> None:
        super().__init__(codes.shape[0], codes.nbytes + scale.nbytes, launches, products)
        self._codes = codes  # int8 [out_features, in_features]
        self._scale = scale  # float32 [out_features]

    def fill(
        self, x: Tensor, bias: Tensor | None, out: Tensor, *, residual: Tensor | None = None, is_gated: bool = False
    ) -> None:
        launch, pdl = self._launch(len(x)), self._products.pdl
        codes, row_scale = x.new_empty(x.shape, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)
        round_rows(x, codes, row_scale, pdl=pdl)
        byte_gemm(
            codes,
            row_scale,
            self._codes,
            self._scale,
            bias,
            out,
            launch.tiles,
            residual=residual,
            workspace=self._products.workspace.memory,
            num_splits=1 if is_gated else launch.num_splits,
            is_gated=is_gated,
            pdl=pdl,
        )
