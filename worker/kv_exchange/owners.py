"""Routes a hub's callbacks by kind of transfer: prompts that are handed off, and prefixes that are fetched."""

from typing import Protocol

from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.events import BlocksBound
from kv_transfer.protocol.messages import FirstToken, PrefillJob
from kv_transfer.session.receiver_attempt import ReceiverOwner
from kv_transfer.session.sender_attempt import SenderOwner
from tandem.errors import InvalidRequest, ServingError
from tandem.values.ids import BlockId, RequestId, TransferId
from worker.kv_exchange.fetcher import Fetcher
from worker.kv_exchange.lender import Lender


class IncomingTransfers:
    """ReceiverOwner of all incoming transfers of a worker."""

    def __init__(self, fetcher: Fetcher, handoffs: ReceiverOwner | None = None) -> None:
        """`handoffs`: owner of handed-off prompts; None on a worker that receives none."""
        self._fetcher = fetcher
        self._handoffs = handoffs or fetcher

    def _owner(self, transfer_id: TransferId) -> ReceiverOwner:
        return self._fetcher if self._fetcher.owns(transfer_id) else self._handoffs

    async def bind(self, transfer_id: TransferId, num_blocks: int) -> BlocksBound:
        return await self._owner(transfer_id).bind(transfer_id, num_blocks)

    def first_token(self, transfer_id: TransferId, first_token: FirstToken) -> None:
        self._owner(transfer_id).first_token(transfer_id, first_token)

    async def commit(self, transfer_id: TransferId, info: CommitInfo) -> None:
        await self._owner(transfer_id).commit(transfer_id, info)

    def failed(self, transfer_id: TransferId, landed: tuple[BlockId, ...], error: ServingError) -> None:
        self._owner(transfer_id).failed(transfer_id, landed, error)

    def expired(self, transfer_id: TransferId) -> None:
        self._owner(transfer_id).expired(transfer_id)

    def quarantine(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        self._owner(transfer_id).quarantine(transfer_id, blocks)

    def released(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        self._owner(transfer_id).released(transfer_id, blocks)


class PromptOwner(SenderOwner, Protocol):
    """Computes prompts for other workers."""

    def abandon(self, transfer_id: TransferId) -> None:
        """Cut short a `submit` that waits, if it is one of a prompt that waits."""
        ...


class OutgoingTransfers:
    """SenderOwner of all outgoing transfers of a worker."""

    def __init__(self, lender: Lender, prompts: PromptOwner | None = None, fetcher: Fetcher | None = None) -> None:
        """`prompts`: None on a worker that computes none for others; `fetcher` fetches their prefixes."""
        self._lender = lender
        self._prompts = prompts
        self._fetcher = fetcher

    async def submit(self, job: PrefillJob) -> None:
        if job.fetch:
            await self._lender.submit(job)
        elif self._prompts is not None:
            await self._prompts.submit(job)
        else:
            raise InvalidRequest("this worker computes no prompts for others: it only serves fetches from its cache")

    def on_unwanted(self, transfer_id: TransferId) -> None:
        """Cut short a `submit` that is no longer wanted and waits: for its adapter, or a prefix that comes."""
        self._lender.on_unwanted(transfer_id)
        if self._fetcher is not None:
            self._fetcher.abandon(RequestId(transfer_id))
        if self._prompts is not None:
            self._prompts.abandon(transfer_id)

    def abort(self, transfer_id: TransferId) -> None:
        """See SenderOwner; a fetch from here computes nothing that could be stopped."""
        if self._prompts is not None and not self._lender.owns(transfer_id):
            self._prompts.abort(transfer_id)

    def release(self, transfer_id: TransferId) -> None:
        if self._lender.owns(transfer_id):
            self._lender.release(transfer_id)
        elif self._prompts is not None:
            self._prompts.release(transfer_id)
