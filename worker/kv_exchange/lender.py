"""What a worker lends to its peers: prefixes in its cache, held still while they are read.

What is below the pool comes up first, a little between each two steps: routers name this worker as holder of it, too.
"""

import asyncio
import time
from array import array
from functools import partial

from engine.kv_cache.tiers.promotion import Promotion, promote
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Request
from kv_transfer.protocol.messages import PrefillJob
from kv_transfer.session.sender_hub import SenderHub
from tandem.errors import Unavailable
from tandem.values.ids import RequestId, TransferId
from worker.engine_host import EngineHost

_PROMOTE_BYTES = 32 << 20
"""Brought up at once: some milliseconds between two steps."""
_PROMOTE_S = 1.0
"""Then what has come up is lent: whoever asked would rather compute the rest."""


class Lender:
    """The sending side of fetches (kv_transfer's SenderOwner, for them alone). On the event loop's thread."""

    def __init__(self, host: EngineHost) -> None:
        self.hub: SenderHub | None = None
        self.num_lent_tokens = 0
        """Of all fetches that were answered, held prefixes of the askers included."""
        self._host = host
        self._loans: dict[TransferId, Request] = {}
        self._submitting: dict[TransferId, asyncio.Event] = {}
        """Set when nobody wants it any longer."""

    @property
    def num_loans(self) -> int:
        """Prefixes that are being read."""
        return len(self._loans)

    def owns(self, transfer_id: TransferId) -> bool:
        """Whether this is a fetch."""
        return transfer_id in self._loans

    async def submit(self, job: PrefillJob) -> None:
        """Find the prefix and hold it.

        Raises Unavailable when no more of it is here than the asker has, or it was cancelled.
        """
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
        gone = self._submitting[job.transfer_id] = asyncio.Event()
        try:
            await self._host.call(partial(_take, loan))
            await self._promote(loan, gone)
            # What a step under way brings up for somebody else has its name already, but not its content.
            while not gone.is_set() and await self._host.call(partial(_is_arriving, loan)):
                pass
            if gone.is_set():
                raise Unavailable("it was cancelled")
            if loan.num_computed_tokens <= job.held_tokens:
                raise Unavailable("no more of the prefix is cached here")
            await self._host.bring(tuple(loan.block_table))
        except BaseException:
            del self._loans[job.transfer_id]
            self._host.post(partial(_give_back, loan))
            raise
        finally:
            del self._submitting[job.transfer_id]
        self.num_lent_tokens += loan.num_computed_tokens
        # A turn later: the hub learns first that the job was taken.
        asyncio.get_running_loop().call_soon(self._tell, job.transfer_id, loan)

    def unwanted(self, transfer_id: TransferId) -> None:
        """Whoever asked has given up: bring nothing more up for it."""
        if (gone := self._submitting.get(transfer_id)) is not None:
            gone.set()

    async def _promote(self, loan: Request, gone: asyncio.Event) -> None:
        """Bring up what is below, and hold it like the rest; ends after a while, or with who asked."""
        if self._host.parts.scheduler.tiers is None:
            return
        max_blocks = max(1, _PROMOTE_BYTES // self._host.parts.layout.worker_block_bytes)
        try:
            async with asyncio.timeout(_PROMOTE_S):
                while not gone.is_set():
                    read = self._host.next_read()  # before: what is read meanwhile counts
                    promoted = await self._host.call(partial(_promote, loan, max_blocks))
                    if promoted is Promotion.DONE:
                        return
                    if promoted is Promotion.WAIT:
                        await _either(read, gone)
        except TimeoutError:
            # In its place among the calls: one that lifts may be under way.
            await self._host.call(partial(_stop_waiting, loan))

    def _tell(self, transfer_id: TransferId, loan: Request) -> None:
        if self.hub is not None and self.owns(transfer_id):
            self.hub.lent(transfer_id, loan.block_hashes, tuple(loan.block_table))

    def release(self, transfer_id: TransferId) -> None:
        """Nothing reads it any more."""
        loan = self._loans.pop(transfer_id)
        self._host.post(partial(_give_back, loan))


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _take(loan: Request, scheduler: Scheduler) -> None:
    scheduler.blocks.take_prefix(loan, scheduler.blocks.match(loan))


def _promote(loan: Request, max_blocks: int, scheduler: Scheduler) -> Promotion:
    blocks, tiers = scheduler.blocks, scheduler.tiers
    if tiers is None:
        return Promotion.DONE
    spare_blocks = blocks.pool.num_blocks // 4
    return promote(blocks, tiers, loan, now=time.monotonic(), max_blocks=max_blocks, spare_blocks=spare_blocks)


def _is_arriving(loan: Request, scheduler: Scheduler) -> bool:
    return scheduler.is_arriving(loan.block_table)


def _stop_waiting(loan: Request, scheduler: Scheduler) -> None:
    if scheduler.tiers is not None:
        scheduler.tiers.drop(loan.request_id)


def _give_back(loan: Request, scheduler: Scheduler) -> None:
    _stop_waiting(loan, scheduler)
    scheduler.blocks.surrender(loan.request_id, loan.block_table.clear())
