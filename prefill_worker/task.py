"""One prompt being computed for a decode worker, as the prefill worker's shell keeps track of it."""

from dataclasses import dataclass, field

from engine.types.request import Request
from kv_transfer.protocol.messages import PrefillJob
from tandem.values.ids import BlockHash, BlockId
from tandem.values.outputs import NO_CACHED_TOKENS, CachedTokens, PhaseTimes


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillTask:
    """Touched by the event loop only; `request` belongs to the engine thread until its prompt is computed."""

    job: PrefillJob
    request: Request
    blocks: list[BlockId] = field(default_factory=list)
    """Source blocks that have their final content, in the order of the request's table."""
    queued_s: float = 0.0
    admitted_s: float = 0.0
    fetched_tokens: int = 0
    """Brought from a peer before it was queued."""
    fetch_s: float = 0.0
    """What that took."""
    cached: CachedTokens = NO_CACHED_TOKENS

    def times(self, now_s: float, *, block_bytes: int) -> PhaseTimes:
        """Where the time went until now, and what was held."""
        return PhaseTimes(
            prefill_queue_s=self.queued_s,
            prefill_s=now_s - self.admitted_s if self.admitted_s else 0.0,
            transfer_s=self.fetch_s,
            kv_byte_s=self.request.held.until(now_s) * block_bytes,
            cached=self.cached,
        )

    def tail_hash(self) -> BlockHash | None:
        """Name of the prompt's last full hash block; None when it is shorter than one."""
        return self.request.block_hashes[-1] if self.request.block_hashes else None
