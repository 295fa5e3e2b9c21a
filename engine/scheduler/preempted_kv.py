"""What becomes of a preempted request's KV: computed again later, or saved and brought back; whichever costs less.

Who is preempted, `engine.scheduler.planner.choose_preemption_victim` says.
Recomputing n tokens takes n / prefill rate. Saving b bytes takes b / rate out now and b / rate in later. The rate of
computing is measured by the worker while it runs, those of copying once at start. What other requests share stays
where it is and costs nothing either way, and what the prefix index still holds at resumption is not loaded.
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
    """Computed when it was saved."""


class Offloading:
    """Saved KV of preempted requests, and the moves that the next batch must make for it."""

    def __init__(self, blocks: BlockManager, tier: OffloadTier, *, block_bytes: int) -> None:
        """`block_bytes`: of one block over all layers."""
        self.rates = MeasuredRates()
        self._blocks = blocks
        self._tier = tier
        self._block_bytes = block_bytes
        self._saved: dict[RequestId, _Saved] = {}
        self._offloads: list[BlockOffload] = []
        self._loaded: list[OffloadHandle] = []

    def copies_at(self, rates: CopyRates) -> None:
        """What moving blocks was measured to take."""
        self.rates = replace(
            self.rates, offload_bytes_per_s=rates.offload_bytes_per_s, load_bytes_per_s=rates.load_bytes_per_s
        )

    def computes_at(self, prefill_tokens_per_s: float) -> None:
        """What computing was measured to take."""
        if prefill_tokens_per_s != self.rates.prefill_tokens_per_s:
            self.rates = replace(self.rates, prefill_tokens_per_s=prefill_tokens_per_s)

    def save(self, request: Request) -> bool:
        """Called before a preempted request gives up its blocks; whether they will be saved."""
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
        """Fill the blocks after the request's found prefix, which its table has already.

        Only for a request with saved tokens.
        """
        saved = self._saved.pop(request.request_id)
        first = request.num_computed_tokens // self._blocks.block_size
        targets: list[BlockId] = [
            request.block_table[i] for i in range(first, self._blocks.blocks_for(saved.num_tokens))
        ]
        slots = self._tier.load(saved.handle, targets)
        # The places may not be written again before the loads have read them.
        self._loaded.append(saved.handle)
        request.num_computed_tokens = saved.num_tokens
        return list(map(BlockLoad, slots, targets))

    def drop(self, request_id: RequestId) -> None:
        """The request is over, or starts without what was saved."""
        saved = self._saved.pop(request_id, None)
        if saved is None:
            return
        if self._offloads:
            slots = set(saved.handle.slots)
            self._offloads = [move for move in self._offloads if move.slot not in slots]
        self._tier.drop(saved.handle)

    def cancel_offloads(self) -> None:
        """No batch leaves that could save anything, and the blocks may be somebody else's before the next one does."""
        unsaved = {move.slot for move in self._offloads}
        for request_id in [name for name, saved in self._saved.items() if unsaved & {*saved.handle.slots}]:
            self.drop(request_id)

    def take_offloads(self) -> tuple[BlockOffload, ...]:
        """What the batch now leaving must save."""
        offloads = tuple(self._offloads)
        self._offloads.clear()
        return offloads

    def executed(self) -> None:
        """The batch is done: what it loaded needs no place any more."""
        for handle in self._loaded:
            self._tier.drop(handle)
        self._loaded.clear()
