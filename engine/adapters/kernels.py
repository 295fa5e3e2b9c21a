"""The interface between a decoder's projections and what adds adapters to them, and its reference in plain torch.

Every row of a step has an adapter or none (Chen et al., Punica, 2023), so that requests of many adapters share a batch.
A row's result depends on that row and its adapter alone.
"""

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.adapters.packing import RankAdapter, SiteMatrices
from engine.types.step_inputs import IntArray

MOST_ADAPTERS = 128
"""Number of slots: adapters that a worker holds at once."""


class AdaptedRows(NamedTuple):
    """The rows of a step that have an adapter."""

    rows: IntArray
    slots: IntArray


class AdapterKernels(Protocol):
    """Adapters in slots, and the product of each row with its own. Used by one thread."""

    def put(self, slot: int, adapter: RankAdapter) -> None:
        """Hold an adapter in a slot that no row of a step under way has."""
        ...

    def drop(self, slot: int) -> None:
        """Empty a slot that no row of a step under way has."""
        ...

    def begin(self, slots: IntArray, wanted: IntArray | None) -> None:
        """Begin a step: the slot of every row, -1 for none; empty where no row has one.

        `wanted`: the rows that are left after the last layer's attention; None: all.
        """
        ...

    def narrow(self) -> None:
        """From now on in this step, rows are those that are wanted."""
        ...

    def add_(self, site: int, x: Tensor, out: Tensor) -> None:
        """Add each row's product to `out` `[num_rows, out_features]`; `x`: `[num_rows, in_features]`."""
        ...


def adapted_rows(slots: IntArray, wanted: IntArray | None = None) -> AdaptedRows:
    """The rows that have an adapter, of all or of the `wanted` ones, which are numbered anew."""
    own = slots if wanted is None or not len(slots) else slots[wanted]
    rows = np.flatnonzero(own >= 0)
    return AdaptedRows(rows, own[rows])


class TorchAdapters:
    """Implements AdapterKernels in plain torch, on any device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[int, tuple[Tensor, dict[int, SiteMatrices]]] = {}
        self._wanted: dict[int, Tensor] = {}
        self._rows: dict[int, Tensor] = {}

    def put(self, slot: int, adapter: RankAdapter) -> None:
        self._held[slot] = adapter.values.to(self._device), {each.site: each for each in adapter.sites}

    def drop(self, slot: int) -> None:
        self._held.pop(slot, None)

    def begin(self, slots: IntArray, wanted: IntArray | None) -> None:
        self._rows = self._by_slot(adapted_rows(slots))
        self._wanted = self._rows if wanted is None else self._by_slot(adapted_rows(slots, wanted))

    def narrow(self) -> None:
        self._rows = self._wanted

    def add_(self, site: int, x: Tensor, out: Tensor) -> None:
        for slot, rows in self._rows.items():
            values, sites = self._held[slot]
            if (found := sites.get(site)) is None:
                continue
            down = values[found.begin :][: found.num_values * found.depth].view(found.num_values, found.depth)
            made = x.index_select(0, rows) @ down.T
            for first, columns, first_value, rank, begin in found.parts:
                up = values[begin:][: rank * columns].view(rank, columns)
                added = made[:, first_value : first_value + rank] @ up
                out[:, first : first + columns].index_add_(0, rows, added)

    def _by_slot(self, found: AdaptedRows) -> dict[int, Tensor]:
        return {
            slot: torch.from_numpy(found.rows[found.slots == slot]).to(self._device)
            for slot in np.unique(found.slots).tolist()
        }
