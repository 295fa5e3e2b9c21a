"""Moves whole blocks between the pool and host memory, and within the pool: executes `engine.types.block_moves`.

On a GPU the host's part is pinned, and every move is queued on the stream that computes: a block is saved before the
step that overwrites it, loaded before the step that reads it, and nobody waits for either.
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
        """The host memory is taken, and touched, now: nothing here allocates later."""
        self._cache = cache
        # Bytes, whatever the numbers are: [num_layers, num_blocks, layer_block_bytes].
        self._pool = cache.blocks
        # Steps with copies are rare, so these wait their turn apart from what every step uploads.
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
        """Of this rank. A device moves blocks while nobody waits: there the seconds follow from the measured rates."""

    @property
    def host_bytes(self) -> int:
        """Host memory held for saved blocks."""
        return self._host.nbytes

    def place(self, slot: int) -> memoryview:
        """The bytes of one place, writable; what the device is still copying there or from there is not awaited."""
        return self._host[slot].view(-1).numpy().data

    def move(self, inputs: StepInputs) -> None:
        """Everything that the step wants moved before it computes: offloads, then loads, then copies."""
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
            seconds = self._took_s(started_s, num_bytes, self._rates.offload_bytes_per_s)
            was = replace(was, saved_bytes=was.saved_bytes + num_bytes, save_s=was.save_s + seconds)
        if len(loads):
            num_bytes, started_s = len(loads) * self._place_bytes, perf_counter()
            self._load(loads)
            seconds = self._took_s(started_s, num_bytes, self._rates.load_bytes_per_s)
            was = replace(was, loaded_bytes=was.loaded_bytes + num_bytes, load_s=was.load_s + seconds)
        self.traffic = was

    def _took_s(self, started_s: float, num_bytes: int, rate: float) -> float:
        if self._is_on_host:
            return perf_counter() - started_s
        return num_bytes / rate if rate > 0.0 else 0.0

    def _copy(self, moves: IntArray) -> None:
        """Of each `[source, target]`, within the pool; what says which is read by the device when it comes to it."""
        with self._staging.step():
            sources, targets = self._staging.upload(moves.T).unbind(0)
            self._cache.copy_blocks(sources, targets)

    def _save(self, moves: IntArray) -> None:
        """Of each `[block, place]` the block's content; block by block, so that no second copy of all is ever made."""
        for block, slot in moves.tolist():
            self._host[slot].copy_(self._pool[:, block], non_blocking=True)

    def _load(self, moves: IntArray) -> None:
        """Into each block of `[place, block]` the place's content."""
        for slot, block in moves.tolist():
            self._pool[:, block].copy_(self._host[slot], non_blocking=True)

    def measure(self) -> CopyRates:
        """How fast blocks are saved and brought back: once, before the first step. The pool keeps its content."""
        num_blocks = min(_SAMPLE_BLOCKS, self._host.shape[0], self._pool.shape[1])
        if not num_blocks:
            return CopyRates()
        places = np.arange(num_blocks, dtype=np.int64)
        moves = np.stack((places, places), axis=1)
        num_bytes = num_blocks * self._place_bytes
        self._rates = CopyRates(
            offload_bytes_per_s=num_bytes / self._least_s(lambda: self._save(moves)),
            load_bytes_per_s=num_bytes / self._least_s(lambda: self._load(moves)),
        )
        return self._rates

    def _least_s(self, move: Callable[[], None]) -> float:
        return min(self._time_s(move) for _ in range(_SAMPLE_TRIES))

    def _time_s(self, move: Callable[[], None]) -> float:
        started_s = perf_counter()
        move()
        self._wait()
        return perf_counter() - started_s

    def _wait(self) -> None:
        if not self._is_on_host:
            torch.cuda.synchronize(self._pool.device)
