"""The shell around a pure sender: runs its actions against the link, the transport and the owner."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kv_transfer.layout.pairing import Pairing
from kv_transfer.protocol.actions import (
    AbortPrefill,
    Action,
    Actions,
    CancelWrites,
    ReleaseSources,
    SendMessage,
    StartWrite,
    SubmitPrefill,
)
from kv_transfer.protocol.events import (
    HandoffCancelled,
    SenderEvent,
    SubmitRefused,
    Submitted,
    WriteFailed,
    WritesEnding,
    WritesQuiet,
    Written,
)
from kv_transfer.protocol.messages import Abort, Body, CommitAck, Failure, PrefillJob, Reject, TransferKey
from kv_transfer.protocol.sender import Sender
from kv_transfer.protocol.states import HandoffState
from kv_transfer.session.attempt import Attempt
from kv_transfer.session.attempt_trace import AttemptTrace
from kv_transfer.session.stats import AttemptOutcome, AttemptTally, TransferStats
from kv_transfer.transports.interface import PeerWriter, WriteOrder, WriteResult
from tandem.errors import ServingError, TransferError, Unavailable
from tandem.values.ids import TransferId


class SenderOwner(Protocol):
    """The prefill worker's callbacks for its hand-offs.

    After a `submit` that did not raise, `release` comes exactly once; until then every block reported by
    `SenderHub.progress` stays unchanged, preempted or not. `abort` comes at most once, before `release`.
    """

    async def submit(self, job: PrefillJob) -> None:
        """Queue the job in the engine. Raises ServingError to refuse."""

    def abort(self, transfer_id: TransferId) -> None: ...

    def release(self, transfer_id: TransferId) -> None:
        """Free the request's blocks: nothing reads them any more."""


class SenderPeer(Protocol):
    """The link that an attempt belongs to, as the attempt sees it."""

    @property
    def writers(self) -> tuple[PeerWriter, ...]:
        """The connection that KV bytes are written through, of each lane."""

    @property
    def transports(self) -> tuple[str, ...]:
        """The transport of each lane."""

    @property
    def transport(self) -> str:
        """Their name in counts."""

    @property
    def pairings(self) -> tuple[Pairing, ...]:
        """The layouts and wire dtype agreed with the peer, for each lane."""

    def send(self, key: TransferKey | None, body: Body) -> None:
        """Send, or drop when the link is down."""

    def close(self) -> None:
        """End the link, because its byte connection is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderContext:
    """State that all attempts of one hub share."""

    owner: SenderOwner
    pool_blocks: int
    """Number of blocks of this worker's pool."""
    stats: TransferStats
    now: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    closed: Callable[["SenderAttempt"], None]
    on_unwanted: Callable[[TransferId], None]
    """Called with the hand-off of an attempt that was given up while the owner's `submit` was still running."""


class SenderAttempt(Attempt[Sender, SenderEvent]):
    """One attempt on one link."""

    def __init__(
        self, machine: Sender, peer: SenderPeer, context: SenderContext, trace: AttemptTrace | None = None
    ) -> None:
        tally = AttemptTally(context.stats, is_fetch=machine.plan.job.fetch)
        super().__init__(machine, now=context.now, tally=tally, trace=trace)
        self.peer = peer
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._submission: asyncio.Task[None] | None = None

    def abandon(self) -> None:
        """Stop waiting for the engine's answer, because the process ends."""
        if self._submission is not None:
            self._submission.cancel()

    def _begin(self) -> Actions:
        return self.machine.start()

    def _on_closed(self) -> None:
        self._context.closed(self)

    def _on_given_up(self) -> None:
        if self._submission is not None and not self._submission.done():
            self._context.on_unwanted(self.key.transfer_id)

    def _transport_name(self) -> str:
        return self.peer.transport

    def _outcome(self, cause: Body | SenderEvent | None) -> AttemptOutcome:
        if isinstance(cause, CommitAck) and self.machine.state is HandoffState.CLOSED:
            return AttemptOutcome.COMMITTED
        if cause is None:
            return AttemptOutcome.EXPIRED
        return (
            AttemptOutcome.CANCELLED if isinstance(cause, Abort | Reject | HandoffCancelled) else AttemptOutcome.FAILED
        )

    def _execute(self, action: Action) -> SenderEvent | None:
        owner, transfer_id = self._context.owner, self.key.transfer_id
        match action:
            case SendMessage():
                self.peer.send(self.key, action.body)
            case SubmitPrefill():
                self._submission = self._context.spawn(self._submit(action.job))
                self._submission.add_done_callback(self._submission_ended)
            case StartWrite():
                return self._start_write(action)
            case AbortPrefill():
                owner.abort(transfer_id)
            case CancelWrites():
                return WritesQuiet() if self._cancel_writes() else WritesEnding()
            case ReleaseSources():
                owner.release(transfer_id)
        return None

    def _cancel_writes(self) -> bool:
        """Stop the writes of every lane. True: none of them reads its sources any more."""
        return all([writer.cancel(replace(self.key, lane=lane)) for lane, writer in enumerate(self.peer.writers)])

    async def _submit(self, job: PrefillJob) -> None:
        try:
            if not self._live:  # given up before this task's first step: the owner was not told
                raise Unavailable("it was cancelled")
            await self._context.owner.submit(job)
        except ServingError as error:
            self.on_event(SubmitRefused(failure=Failure.from_error(error)))
        else:
            self.on_event(Submitted())

    def _submission_ended(self, task: "asyncio.Task[None]") -> None:
        # A callback, because a task may be cancelled before the coroutine's first step.
        if task.cancelled():
            self.on_event(SubmitRefused(failure=Failure(kind=Unavailable, message="prefill worker stops")))

    def _start_write(self, action: StartWrite) -> SenderEvent | None:
        reserve = self.machine.reserve
        if reserve is None or reserve.transport != self.peer.transports[0]:
            reason = f"granted through another transport than {self.peer.transports[0]}"
            return WriteFailed(seq=action.seq, rewrite=action.rewrite, reason=reason)
        held_tokens = self.machine.plan.job.held_tokens
        pairing = self.peer.pairings[action.lane]
        source = pairing.at_source(held_tokens, action.first_block, action.sources, self._context.pool_blocks)
        key = replace(self.key, lane=action.lane)
        order = WriteOrder(key=key, grant=reserve.grants[action.lane], cells=action.cells, source=source)
        if action.rewrite > 0:
            self._tally.nack()
            if self._trace is not None:
                self._trace.damaged(action.seq)
        future = self.peer.writers[action.lane].write(order)
        future.add_done_callback(
            lambda done: self._loop.call_soon_threadsafe(self._written, action.seq, action.rewrite, done)
        )
        return None

    def _written(self, seq: int, rewrite: int, future: "Future[WriteResult]") -> None:
        error = future.exception()
        if error is None:
            result = future.result()
            self._tally.chunk(result.num_bytes, result.seconds)
            if self._trace is not None:
                self._trace.chunk(seq, result.num_bytes, write_s=result.seconds)
            written = Written(seq=seq, rewrite=rewrite, checksum=result.checksum, seconds=result.seconds)
            self.on_event(written)
        elif isinstance(error, TransferError):
            self.on_event(WriteFailed(seq=seq, rewrite=rewrite, reason=error.message))
            if any(writer.closed for writer in self.peer.writers):
                self.peer.close()
        else:
            raise error
