"""Moves whole blocks between the pool and host memory, and within the pool: executes `engine.types.block_moves`.

On a GPU the host memory is pinned, and every move is queued on the stream that computes: a block is saved before the
step that overwrites it and loaded before the step that reads it, without the host waiting.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from engine.kv_cache.tiers.costs import CopyRates
from engine.kv_storage.paged_cache import PagedKVCache
from engine.runner.device_queue import Staging, device_queue
from engine.types.block_moves import BlockLoad, BlockOffload
from engine.types.step_inputs import IntArray, StepInputs
from engine.types.tier_counts import Traffic

_SAMPLE_BLOCKS = 64
_SAMPLE_TRIES = 3


class BlockMover:
    """One rank's blocks and its share of the host tier's places. Used by one thread."""

    def __init__(self, cache: PagedKVCache, *, num_host_slots: int = 0) -> None:
        """Allocates and touches the host memory, `num_host_slots` places; nothing is allocated later."""
        self._cache = cache
        # Bytes, whatever the dtype: [num_layers, num_blocks, layer_block_bytes].
        self._pool = cache.blocks
        # A staging of its own: steps with copies are rare, and every step uploads through the runner's.
        self._staging = Staging(device_queue(self._pool.device))
        self._is_on_host = self._pool.device.type == "cpu"
        num_layers, _, layer_block_bytes = self._pool.shape
        self._place_bytes = num_layers * layer_block_bytes
        # A place is contiguous, so that between host and device it is one transfer.
        self._host = torch.zeros(
            (num_host_slots, num_layers, layer_block_bytes),
            dtype=torch.uint8,
            pin_memory=num_host_slots > 0 and not self._is_on_host,
        )
        self._rates = CopyRates()
        self.traffic = Traffic()
        """Blocks moved on this rank. On a GPU, where moves are not timed, seconds follow from the measured rates."""

    @property
    def host_bytes(self) -> int:
        """Host memory held for saved blocks."""
        return self._host.nbytes

    def place(self, slot: int) -> memoryview:
        """Writable bytes of one place. Copies that the device is still making there are not awaited."""
        return self._host[slot].view(-1).numpy().data

    def move(self, inputs: StepInputs) -> None:
        """Make the moves of a step, before it computes: offloads, then loads, then copies."""
        self._save_and_load(inputs.offloads, inputs.loads)
        if len(inputs.copies):
            self._copy(inputs.copies)

    def move_now(self, offloads: Sequence[BlockOffload], loads: Sequence[BlockLoad]) -> None:
        with torch.inference_mode():
            self._save_and_load(*(np.array(moves, dtype=np.int64).reshape(-1, 2) for moves in (offloads, loads)))
        self._wait()

    def _save_and_load(self, offloads: IntArray, loads: IntArray) -> None:
        was = self.traffic
        if len(offloads):
            num_bytes, started_s = len(offloads) * self._place_bytes, perf_counter()
            self._save(offloads)
            seconds = self._duration_s(started_s, num_bytes, self._rates.offload_bytes_per_s)
            was = replace(was, saved_bytes=was.saved_bytes + num_bytes, save_s=was.save_s + seconds)
        if len(loads):
            num_bytes, started_s = len(loads) * self._place_bytes, perf_counter()
            self._load(loads)
            seconds = self._duration_s(started_s, num_bytes, self._rates.load_bytes_per_s)
            was = replace(was, loaded_bytes=was.loaded_bytes + num_bytes, load_s=was.load_s + seconds)
        self.traffic = was

    def _duration_s(self, started_s: float, num_bytes: int, rate: float) -> float:
        if self._is_on_host:
            return perf_counter() - started_s
        return num_bytes / rate if rate > 0.0 else 0.0

    def _copy(self, moves: IntArray) -> None:
        """Copy blocks within the pool, `[num_moves, 2]` pairs of source and target."""
        with self._staging.step():
            sources, targets = self._staging.upload(moves.T).unbind(0)
            self._cache.copy_blocks(sources, targets)

    def _save(self, moves: IntArray) -> None:
        """Save blocks, `[num_moves, 2]` pairs of block and place; one at a time, which needs no second copy of them
        all.
        """
        for block, slot in moves.tolist():
            self._host[slot].copy_(self._pool[:, block], non_blocking=True)

    def _load(self, moves: IntArray) -> None:
        """Load blocks, `[num_moves, 2]` pairs of place and block."""
        for slot, block in moves.tolist():
            self._pool[:, block].copy_(self._host[slot], non_blocking=True)

    def measure(self) -> CopyRates:
        """Measure how fast blocks are saved and loaded. Call it before the first step; the pool keeps its content."""
        num_blocks = min(_SAMPLE_BLOCKS, self._host.shape[0], self._pool.shape[1])
        if not num_blocks:
            return CopyRates()
        places = np.arange(num_blocks, dtype=np.int64)
        moves = np.stack((places, places), axis=1)
        num_bytes = num_blocks * self._place_bytes
        self._rates = CopyRates(
            offload_bytes_per_s=num_bytes / self._best_time_s(lambda: self._save(moves)),
            load_bytes_per_s=num_bytes / self._best_time_s(lambda: self._load(moves)),
        )
        return self._rates

    def _best_time_s(self, move: Callable[[], None]) -> float:
        return min(self._time_s(move) for _ in range(_SAMPLE_TRIES))

    def _time_s(self, move: Callable[[], None]) -> float:
        started_s = perf_counter()
        move()
        self._wait()
        return perf_counter() - started_s

    def _wait(self) -> None:
        if not self._is_on_host:
            torch.cuda.synchronize(self._pool.device)
