"""What a worker lends to its peers: prefixes in its cache, held still while they are read."""

import asyncio
from array import array

from engine.host import EngineHost
from engine.request import Request
from engine.scheduler import Scheduler
from kv_transfer.messages import PrefillJob
from kv_transfer.sender_hub import SenderHub
from tandem.errors import Unavailable
from tandem.ids import RequestId, TransferId


class Lender:
    """The sending side of fetches (kv_transfer's SenderOwner, for them alone). On the event loop's thread."""

    def __init__(self, host: EngineHost) -> None:
        self.hub: SenderHub | None = None
        self.num_lent_tokens = 0
        """Of all fetches that were answered, held prefixes of the askers included."""
        self._host = host
        self._loans: dict[TransferId, Request] = {}

    @property
    def num_loans(self) -> int:
        """Prefixes that are being read."""
        return len(self._loans)

    def owns(self, transfer_id: TransferId) -> bool:
        """Whether this is a fetch."""
        return transfer_id in self._loans

    async def submit(self, job: PrefillJob) -> None:
        """Find the prefix and hold it. Raises Unavailable when no more of it is here than the asker has."""
        loan = Request(
            request_id=RequestId(f"loan/{job.transfer_id}"),
            # Found by names alone; one token more than they name, since a match leaves one to compute.
            token_ids=array("i", bytes(4 * (job.num_tokens + 1))),
            num_prompt_tokens=job.num_tokens + 1,
            block_hashes=list(job.names),
            params=job.sampling,
            hash_root=job.hash_root,
            prefill_only=True,
        )
        self._loans[job.transfer_id] = loan
        try:
            await self._host.call(lambda scheduler: _take(scheduler, loan, job.held_tokens))
        except BaseException:
            del self._loans[job.transfer_id]
            raise
        self.num_lent_tokens += loan.num_computed_tokens
        # A turn later: the hub learns first that the job was taken.
        asyncio.get_running_loop().call_soon(self._tell, job.transfer_id, loan)

    def _tell(self, transfer_id: TransferId, loan: Request) -> None:
        if self.hub is not None and self.owns(transfer_id):
            self.hub.lent(transfer_id, loan.block_hashes, tuple(loan.block_table))

    def release(self, transfer_id: TransferId) -> None:
        """Nothing reads it any more."""
        loan = self._loans.pop(transfer_id)
        self._host.post(lambda scheduler: _give_back(scheduler, loan))


def _take(scheduler: Scheduler, loan: Request, held_tokens: int) -> None:
    match = scheduler.blocks.match(loan)
    if match.num_blocks * scheduler.blocks.block_size <= held_tokens:
        raise Unavailable("no more of the prefix is held here")
    scheduler.blocks.take_prefix(loan, match)


def _give_back(scheduler: Scheduler, loan: Request) -> None:
    scheduler.blocks.surrender(loan.request_id, loan.block_table.clear())
