"""Lends cached prefixes to peers that fetch them, pinned while they are read.

Blocks in lower tiers are promoted first, a few between each two steps, because routers count them as held here.
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
"""Bytes promoted at once, which takes a few milliseconds between two steps."""
_PROMOTE_S = 1.0
"""Time limit of promoting; then the promoted part is lent, and the peer computes the rest."""


class Lender:
    """The sending side of fetches (a SenderOwner for them alone). On the event loop's thread."""

    def __init__(self, host: EngineHost) -> None:
        self.hub: SenderHub | None = None
        self.num_lent_tokens = 0
        """Tokens of all served fetches, including the prefixes that the peers held already."""
        self._host = host
        self._loans: dict[TransferId, Request] = {}
        self._submitting: dict[TransferId, asyncio.Event] = {}
        """Events set when a fetch is cancelled, for fetches in `submit`."""

    @property
    def num_loans(self) -> int:
        """Number of prefixes that are being read."""
        return len(self._loans)

    def owns(self, transfer_id: TransferId) -> bool:
        """Whether this is the id of a fetch that is being served."""
        return transfer_id in self._loans

    async def submit(self, job: PrefillJob) -> None:
        """Find the prefix and pin it.

        Raises Unavailable when this worker has no more of it than the peer, or lends nothing, or the fetch was
        cancelled.
        """
        if self._host.parts.layout.windowed_layers:
            raise Unavailable("prefixes are not lent where windowed layers are kept apart")
        loan = Request(
            request_id=RequestId(f"loan/{job.transfer_id}"),
            # Found by names alone; one token more than they cover, since a match leaves one to compute.
            token_ids=array("i", bytes(4 * (job.num_tokens + 1))),
            num_prompt_tokens=job.num_tokens + 1,
            block_hashes=list(job.names),
            params=job.sampling,
            hash_root=job.hash_root,
            prefill_only=True,
        )
        self._loans[job.transfer_id] = loan
        cancelled = self._submitting[job.transfer_id] = asyncio.Event()
        try:
            await self._host.call(partial(_hold_prefix, loan))
            await self._promote(loan, cancelled)
            # A block that a running step loads for another request has its name already, but not its content.
            while not cancelled.is_set() and await self._host.call(partial(_is_arriving, loan)):
                pass
            if cancelled.is_set():
                raise Unavailable("it was cancelled")
            if loan.num_computed_tokens <= job.held_tokens:
                raise Unavailable("no more of the prefix is cached here")
            await self._host.gather_blocks(tuple(loan.block_table))
        except BaseException:
            del self._loans[job.transfer_id]
            self._host.post(partial(_give_back, loan))
            raise
        finally:
            del self._submitting[job.transfer_id]
        self.num_lent_tokens += loan.num_computed_tokens
        # A turn later, so that the hub first sees that the job was accepted.
        asyncio.get_running_loop().call_soon(self._report_lent, job.transfer_id, loan)

    def on_unwanted(self, transfer_id: TransferId) -> None:
        """Cancel a fetch that the peer has given up, so that nothing more is promoted for it."""
        if (cancelled := self._submitting.get(transfer_id)) is not None:
            cancelled.set()

    async def _promote(self, loan: Request, cancelled: asyncio.Event) -> None:
        """Promote blocks of lower tiers and pin them like the rest, until _PROMOTE_S or a cancel."""
        if self._host.parts.scheduler.tiers is None:
            return
        max_blocks = max(1, _PROMOTE_BYTES // self._host.parts.layout.worker_block_bytes)
        try:
            async with asyncio.timeout(_PROMOTE_S):
                while not cancelled.is_set():
                    read = self._host.next_read()  # taken before the call, so that no read is missed
                    promoted = await self._host.call(partial(_promote, loan, max_blocks))
                    if promoted is Promotion.DONE:
                        return
                    if promoted is Promotion.WAIT:
                        await _either(read, cancelled)
        except TimeoutError:
            # In order with the other calls: a promotion may be queued.
            await self._host.call(partial(_stop_waiting, loan))

    def _report_lent(self, transfer_id: TransferId, loan: Request) -> None:
        if self.hub is not None and self.owns(transfer_id):
            self.hub.answer_fetch(transfer_id, loan.block_hashes, tuple(loan.block_table))

    def release(self, transfer_id: TransferId) -> None:
        """Unpin the prefix, which nothing reads any more."""
        loan = self._loans.pop(transfer_id)
        self._host.post(partial(_give_back, loan))


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    tasks = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _hold_prefix(loan: Request, scheduler: Scheduler) -> None:
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
    scheduler.blocks.release_after_use(loan.request_id, scheduler.blocks.take_table(loan))
