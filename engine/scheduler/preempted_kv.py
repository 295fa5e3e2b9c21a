"""Decides how a preempted request gets its KV back: recomputed, or saved and loaded; whichever costs less.

`engine.scheduler.planner.choose_preemption_victim` chooses the request.
Recomputing n tokens takes n / prefill rate. Saving b bytes takes b / rate out now and b / rate in later. The prefill
rate is measured while the worker runs, copy rates once at start. Blocks that other requests share stay in the pool and
cost nothing either way; blocks that the prefix index still holds at resumption are not loaded.
"""

from dataclasses import dataclass, replace

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.lower_tiers import OffloadHandle, OffloadTier
from engine.kv_cache.tiers.costs import CopyRates, MeasuredRates, prefers_offload
from engine.types.block_moves import BlockLoad, BlockOffload
from engine.types.request import Request
from tandem.values.ids import BlockId, RequestId


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    handle: OffloadHandle
    first_block: int
    """Index in the request's table of the first saved block; those before it were shared."""
    num_tokens: int
    """Computed tokens of the sequence when it was saved."""


class Offloading:
    """Saved KV of preempted requests, and the block moves that the next batch must make for it."""

    def __init__(self, blocks: BlockManager, tier: OffloadTier, *, block_bytes: int) -> None:
        """`block_bytes`: size of one block over all layers."""
        self.rates = MeasuredRates()
        self._blocks = blocks
        self._tier = tier
        self._block_bytes = block_bytes
        self._saved: dict[RequestId, _Saved] = {}
        self._offloads: list[BlockOffload] = []
        self._loaded: list[OffloadHandle] = []

    def set_copy_rates(self, rates: CopyRates) -> None:
        """Set the measured rates of copying blocks."""
        self.rates = replace(
            self.rates, offload_bytes_per_s=rates.offload_bytes_per_s, load_bytes_per_s=rates.load_bytes_per_s
        )

    def set_prefill_rate(self, prefill_tokens_per_s: float) -> None:
        """Set the measured prefill rate."""
        if prefill_tokens_per_s != self.rates.prefill_tokens_per_s:
            self.rates = replace(self.rates, prefill_tokens_per_s=prefill_tokens_per_s)

    def save(self, request: Request) -> bool:
        """Save a preempted request's blocks before it gives them up. Returns False when they are not worth saving, or
        the tier has no room.
        """
        size, pool, table = self._blocks.block_size, self._blocks.pool, request.block_table
        end = first = self._blocks.blocks_for(request.num_computed_tokens)
        while first and pool.num_refs(table[first - 1]) == 1:
            first -= 1
        num_tokens, num_blocks = request.num_computed_tokens - first * size, end - first
        if num_tokens <= 0 or not prefers_offload(num_tokens, num_blocks * self._block_bytes, self.rates):
            return False
        sources = [table[i] for i in range(first, end)]
        handle = self._tier.store(sources)
        if handle is None:
            return False
        self._offloads += map(BlockOffload, sources, handle.slots)
        self._saved[request.request_id] = _Saved(
            handle=handle, first_block=first, num_tokens=request.num_computed_tokens
        )
        return True

    def num_saved_tokens(self, request: Request, num_found_blocks: int) -> int:
        """Tokens of the sequence that need not be computed; 0 unless saved blocks continue the prefix found here."""
        saved = self._saved.get(request.request_id)
        if saved is None or saved.first_block > num_found_blocks:
            return 0
        return saved.num_tokens if saved.num_tokens > num_found_blocks * self._blocks.block_size else 0

    def resume(self, request: Request) -> list[BlockLoad]:
        """Plan the loads into the blocks that follow the request's found prefix; its table must have them already.

        Only for a request with saved tokens.
        """
        saved = self._saved.pop(request.request_id)
        first = request.num_computed_tokens // self._blocks.block_size
        targets: list[BlockId] = [
            request.block_table[i] for i in range(first, self._blocks.blocks_for(saved.num_tokens))
        ]
        slots = self._tier.load(saved.handle, targets)
        # The slots must not be overwritten before the loads have read them.
        self._loaded.append(saved.handle)
        request.num_computed_tokens = saved.num_tokens
        return list(map(BlockLoad, slots, targets))

    def drop(self, request_id: RequestId) -> None:
        """Discard saved KV, if any: the request is over, or starts without it."""
        saved = self._saved.pop(request_id, None)
        if saved is None:
            return
        if self._offloads:
            slots = set(saved.handle.slots)
            self._offloads = [move for move in self._offloads if move.slot not in slots]
        self._tier.drop(saved.handle)

    def cancel_offloads(self) -> None:
        """Discard KV that no batch will save: its blocks may belong to other requests by the time of the next batch."""
        unsaved = {move.slot for move in self._offloads}
        for request_id in [name for name, saved in self._saved.items() if unsaved & {*saved.handle.slots}]:
            self.drop(request_id)

    def take_offloads(self) -> tuple[BlockOffload, ...]:
        """Return the offloads for the batch that is being planned, once."""
        offloads = tuple(self._offloads)
        self._offloads.clear()
        return offloads

    def on_step_done(self) -> None:
        """Free the slots that the executed batch has loaded from."""
        for handle in self._loaded:
            self._tier.drop(handle)
        self._loaded.clear()
