"""One prompt being computed for a decode worker, as the prefill worker's shell keeps track of it."""

from dataclasses import dataclass, field

from engine.request import Request
from kv_transfer.messages import PrefillJob
from tandem.ids import BlockHash, BlockId
from tandem.outputs import PhaseTimes


@dataclass(slots=True, kw_only=True, eq=False)
class PrefillTask:
    """Touched by the event loop only; `request` belongs to the engine thread until its prompt is computed."""

    job: PrefillJob
    request: Request
    blocks: list[BlockId] = field(default_factory=list)
    """Source blocks that have their final content, in the order of the request's table."""
    queued_s: float = 0.0
    admitted_s: float = 0.0
    cached_tokens: int = 0

    def times(self, now_s: float) -> PhaseTimes:
        """Where the time went until now."""
        return PhaseTimes(prefill_queue_s=self.queued_s, prefill_s=now_s - self.admitted_s if self.admitted_s else 0.0)

    def tail_hash(self) -> BlockHash | None:
        """Name of the prompt's last full hash block; None when it is shorter than one."""
        return self.request.block_hashes[-1] if self.request.block_hashes else None
