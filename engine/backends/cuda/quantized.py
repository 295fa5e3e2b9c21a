"""Quantized weights on a GPU: which stored forms are multiplied as they are, and by which kernel.

Codes with scales by groups of columns, and signed bytes or E4M3 numbers whose inputs are not to be rounded, multiply
rows of 16 bits (`group_gemm`). All others are left to be restored: tables of sixteen values, E5M2, groups that share a
part of a word. A matrix is always multiplied by one kernel, whatever the number of rows, so that a token's result does
not depend on its batch by more than the order of a sum; in deterministic mode, not at all.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.backends.cuda.products import Product, SplitWorkspace
from engine.kernels.triton.quantized.group_gemm import group_gemm
from engine.kernels.triton.quantized.group_weights import GroupWeights, can_pack, pack_groups
from engine.kernels.triton.tuning import LaunchTable, QuantizedLaunch
from engine.model.checkpoints.stored_matrix import StoredMatrix
from engine.quantize.rounding import round_groups, round_rows

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
        weights = pack_groups(matrix, self._device)
        num_steps = -(-weights.num_columns // weights.span)
        return GroupProduct(weights, self._launches("groups", weights.shape[0], num_steps), self)

    def rounded(self, weight: Tensor, *, bits: int) -> Product:
        """Quantize a float matrix: to four bits by groups of 32 columns, if these divide its columns, else to eight by
        row. Raises ConfigError for values that are not finite.
        """
        if bits == 4 and weight.shape[1] % _ROUNDED_GROUP == 0:
            return self.product(round_groups(weight, _ROUNDED_GROUP))
        return self.product(round_rows(weight))

    def _launches(self, arithmetic: str, features: int, num_steps: int) -> tuple[_Launch, ...]:
        """The launches of a matrix; memory for the parts of its depth is kept."""
        launches = []
        for tiles in self._table.quantized(arithmetic, deterministic=self.deterministic):
            num_splits = tiles.num_splits(features, num_steps, self._num_sms)
            if num_splits > 1:
                num_tiles = -(-features // tiles.block_n)
                num_values = num_tiles * num_splits * tiles.block_n * tiles.block_m
                self.workspace.reserve(num_values, num_tiles, self._device)
            launches.append(_Launch(tiles=tiles, num_splits=num_splits))
        return tuple(launches)


class GroupProduct:
    """Implements Product for weights with scales by groups, which multiply rows as they are."""

    __slots__ = ("_launches", "_products", "_weights")

    def __init__(self, weights: GroupWeights, launches: tuple[_Launch, ...], products: QuantizedProducts) -> None:
        self._weights = weights
        self._launches = launches
        self._products = products

    @property
    def out_features(self) -> int:
        return self._weights.shape[0]

    @property
    def nbytes(self) -> int:
        return self._weights.nbytes

    def fuses(self, num_rows: int, *, is_gated: bool = False) -> bool:
        """See Product. Two sums of many rows would not find room in registers, and one launch has one result."""
        return not is_gated or (num_rows <= self._launches[0].tiles.rows and not self._products.deterministic)

    def fill(
        self, x: Tensor, bias: Tensor | None, out: Tensor, *, residual: Tensor | None = None, is_gated: bool = False
    ) -> None:
        launch = next(found for found in self._launches if not found.tiles.rows or len(x) <= found.tiles.rows)
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

    def multiply(self, x: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        out = x.new_empty(x.shape[0], self.out_features, dtype=out_dtype)
        self.fill(x, bias, out)
        return out
