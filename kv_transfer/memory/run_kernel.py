"""Copies and sums runs of a pool in one launch of one Triton kernel, whatever the runs are.

The kernel reads what it shall do from a table of numbers in pinned memory (`move_table`), and its last program writes
the sum there. So the host issues one operation per chunk, and waits once. Copying the table first would cost it a
second one, and the device some microseconds from the end of the copy to the kernel's beginning.

This module needs triton. `torch_pool` imports it where the pool is on a GPU, and does the same with plain torch where
triton is missing.
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kv_transfer.memory.move_table import ALIGNMENTS, HEADER, PLANE, ROW, MoveTable, Numbers

SUM_MASK = 0xFFFFFFFF
BLOCK_WORDS = 4096
"""Words that a program moves at once, 32 in each of its threads."""
_MAX_PROGRAMS = 1024
"""Number of programs beyond which runs are not split further: several for each multiprocessor of a large GPU."""
_NUM_TABLES, _TABLE_NUMBERS = 32, 4096
"""Made in advance, because pinned memory may have to wait for the device: enough for 8 streams with 4 launches each."""
_HEADER, _ROW, _PLANE = tl.constexpr(HEADER), tl.constexpr(ROW), tl.constexpr(PLANE)
_WEIGHT_STEP = tl.constexpr(0x9E3779B2 - (1 << 32))
"""See `sum32` in torch_pool."""


@triton.jit(do_not_specialize=["planes_per_layer", "layer_bytes"])
def move_runs_kernel(source_ptr, target_ptr, table_ptr, count_ptr, planes_per_layer, layer_bytes,
                     COPIES: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum one part of one run of one layer and, if COPIES, copy it. The grid is (rows, parts of each, layers).

    source, target: bytes, at multiples of 16. table: int64, as `MoveTable.write` writes it; the low 32 bits of its
    first number become the sum32 of all runs. count: int64 [1], zero before and after.
    """
    row, part, layer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_rows, num_parts = tl.num_programs(0), tl.num_programs(1)
    run = table_ptr + _HEADER + row * _ROW
    span = tl.load(run + 2)
    plane = table_ptr + _HEADER + num_rows * _ROW + (layer * planes_per_layer + tl.load(run + 3)) * _PLANE
    # Multiplied last, so that the compiler knows the alignment and moves 16 bytes at a time.
    here = (tl.load(plane) + tl.load(run)) // ALIGNMENT * (ALIGNMENT // 4)
    there = (tl.load(plane + 1) + tl.load(run + 1)) // ALIGNMENT * (ALIGNMENT // 4)
    size = ((span & 0xFFFFFFFF) // ALIGNMENT * (ALIGNMENT // 4)).to(tl.int32)
    first = ((layer.to(tl.int64) * layer_bytes + (span >> 32)) // 4).to(tl.int32)
    source = source_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + here
    target = target_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + there
    sums = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(part * BLOCK, size, num_parts * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        inside = at < size
        words = tl.load(source + at, mask=inside, other=0)
        if COPIES:
            tl.store(target + at, words, mask=inside)
        sums += words * ((first + at) * _WEIGHT_STEP + 1)
    total = tl.sum(sums, 0).to(tl.int64)
    # The low half counts the programs that have finished; the high half is the sum of theirs, and wraps at its top.
    before = tl.atomic_add(count_ptr, (total << 32) + 1, sem="relaxed")
    is_last = (before & 0xFFFFFFFF) == num_rows * num_parts * tl.num_programs(2) - 1
    tl.store(table_ptr, (before >> 32) + total, mask=is_last)
    tl.store(count_ptr, 0, mask=is_last)


class RunKernel:
    """Launches the kernel on one device. Used from any thread."""

    def __init__(self, device: torch.device) -> None:
        """Compiles and loads the kernel's variants, so that no later call does."""
        self._device = device
        self._compiled: dict[tuple[bool, int], Any] = {}
        self._tables: deque[_Table] = deque()
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tables.extend(_Table(device, _TABLE_NUMBERS, stream) for _ in range(_NUM_TABLES))
        none: dict[str, Any] = {"planes": np.zeros(PLANE, np.int64), "rows": [0] * ROW, "num_layers": 1}
        with _current(stream):
            some = torch.empty(16, dtype=torch.uint8, device=device)
            totals = [
                self.launch(MoveTable(**none, layer_bytes=0, longest=0, alignment=alignment), some, target, stream)
                for alignment in ALIGNMENTS
                for target in (None, some)
            ]
            if stream is not None:
                stream.synchronize()
        for total in totals:
            total()

    def launch(self, moves: MoveTable, source: Tensor, target: Tensor | None, stream: Any) -> Callable[[], int]:
        """Copy and sum `moves`, or sum only where `target` is None.

        source, target: uint8, on this device, contiguous and at addresses that are multiples of 16. stream: of this
        device; None for what has none. Returns a function that, called once after the stream was synchronised, returns
        the `sum32` of the bytes read.
        """
        table = self._table(moves.num_numbers, stream)
        moves.write(table.numbers)
        runs = moves.num_rows * moves.num_layers
        num_parts = max(1, min(-(-moves.longest // (4 * BLOCK_WORDS)), _MAX_PROGRAMS // runs))
        grid = (moves.num_rows, num_parts, moves.num_layers)
        variant = (target is not None, moves.alignment)
        ends = (source, source if target is None else target)
        shape = (moves.planes_per_layer, moves.layer_bytes)
        compiled = self._compiled.get(variant)
        if compiled is None:
            compiled = move_runs_kernel[grid](*ends, table.pinned, table.count, *shape, *variant, BLOCK_WORDS)
            self._compiled[variant] = compiled
        else:
            # To find the compiled kernel anew would be half of the work of a launch.
            compiled[grid](*ends, table.pinned, table.count, *shape, *variant, BLOCK_WORDS, stream=stream.cuda_stream)

        def total() -> int:
            found = int(table.numbers[0]) & SUM_MASK
            self._tables.append(table)
            return found

        return total

    def _table(self, size: int, stream: Any) -> "_Table":
        try:
            table = self._tables.pop()
        except IndexError:
            table = None
        if table is not None and table.numbers.size >= size:
            return table
        return _Table(self._device, max(_TABLE_NUMBERS, 1 << (size - 1).bit_length()), stream)


class _Table:
    """Memory of one launch."""

    def __init__(self, device: torch.device, size: int, stream: Any) -> None:
        self.pinned = torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.numbers: Numbers = self.pinned.numpy()
        with _current(stream):  # on which the kernel follows
            self.count = torch.zeros(1, dtype=torch.int64, device=device)


def _current(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
