"""The shell around a pure receiver: runs its actions against the link, the transport and the owner."""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from kv_transfer.layout.pairing import Pairing
from kv_transfer.protocol.actions import (
    Action,
    Actions,
    BindBlocks,
    Commit,
    CommitInfo,
    ForwardFirstToken,
    OpenGrant,
    Quarantine,
    ReleaseBlocks,
    ReportFailed,
    Revoke,
    SendMessage,
    Verify,
)
from kv_transfer.protocol.events import (
    BindRefused,
    BlocksBound,
    Committed,
    GrantOpened,
    HandoffCancelled,
    Quiet,
    ReceiverEvent,
    Verified,
)
from kv_transfer.protocol.messages import Body, Failure, FirstToken, Prefill
from kv_transfer.protocol.receiver import Receiver
from kv_transfer.protocol.states import LIVE, HandoffState
from kv_transfer.regions.interface import LaneGrant, OpenedGrant, ReceivingRegion
from kv_transfer.session.attempt import Attempt
from kv_transfer.session.attempt_trace import AttemptTrace
from kv_transfer.session.peer_rates import PeerRates
from kv_transfer.session.receiver_link import ReceiverLink, joined_names
from kv_transfer.session.stats import AttemptOutcome, AttemptTally, TransferStats
from tandem.errors import ServingError
from tandem.values.ids import BlockId, TransferId


class ReceiverOwner(Protocol):
    """The decode worker's callbacks for its hand-offs.

    Every block that `bind` returned comes back exactly once: in `commit`, as landed in `failed`, or in `released`.
    After a cancel only `quarantine` and `released` are called.
    """

    async def bind(self, transfer_id: TransferId, num_blocks: int) -> BlocksBound:
        """Destinations for the blocks beyond the held prefix. Raises ServingError to refuse."""

    def first_token(self, transfer_id: TransferId, first_token: FirstToken) -> None:
        """Forward the first token now; it is never sampled again."""

    async def commit(self, transfer_id: TransferId, info: CommitInfo) -> None:
        """Add the sequence to the batch: its KV is here and verified. Must not raise."""

    def failed(self, transfer_id: TransferId, landed: tuple[BlockId, ...], error: ServingError) -> None:
        """Called when an attempt ended. `landed` continue the held prefix and belong to the owner, which reroutes or
        cancels."""

    def expired(self, transfer_id: TransferId) -> None:
        """Called when a failed hand-off was not rerouted in time; it has ended, as after a cancel."""

    def quarantine(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        """Count and report these blocks until they are released: their writer may still be running."""

    def released(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        """Free these blocks: they are neither written to nor needed any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverContext:
    """State that all attempts of one hub share."""

    owner: ReceiverOwner
    regions: Sequence[ReceivingRegion]
    """The regions of the pool, in order of ranks."""
    stats: TransferStats
    rates: PeerRates
    now: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], object]


class AttemptUser(Protocol):
    """Called with the outcome of an attempt."""

    def first_token(self, attempt: "ReceiverAttempt", first_token: FirstToken) -> None:
        """Forward the first token that has arrived."""

    def failed(self, attempt: "ReceiverAttempt", landed: tuple[BlockId, ...], failure: Failure) -> None:
        """Called when an attempt failed, possibly before its writer is proven quiet."""

    def committing(self, attempt: "ReceiverAttempt") -> bool:
        """Called before a commit; returns False when the hand-off was cancelled meanwhile."""

    def closed(self, attempt: "ReceiverAttempt") -> None:
        """Called when nothing of an attempt is left."""


class ReceiverAttempt(Attempt[Receiver, ReceiverEvent]):
    """One attempt on one link."""

    def __init__(
        self,
        machine: Receiver,
        link: ReceiverLink,
        context: ReceiverContext,
        user: AttemptUser,
        trace: AttemptTrace | None = None,
    ) -> None:
        tally = AttemptTally(context.stats, is_fetch=machine.plan.job.fetch)
        super().__init__(machine, now=context.now, tally=tally, trace=trace)
        self.link = link
        self._context = context
        self._user = user
        self._transports: tuple[str, ...] = ()
        self._pairings: tuple[Pairing, ...] = ()
        """Terms of the lanes that were granted; the link's may be another process's by now."""
        self._num_quarantined = 0

    def _begin(self) -> Actions:
        mappings = [pairing.mapping for pairing in self.link.pairings]
        return self.machine.start(mappings[0].unit_tokens, [mapping.lane for mapping in mappings])

    def _on_closed(self) -> None:
        self._user.closed(self)

    def _transport_name(self) -> str:
        return joined_names(self._transports) or self.link.transport

    def _outcome(self, cause: Body | ReceiverEvent | None) -> AttemptOutcome | None:
        if self.machine.state is HandoffState.COMMITTED:
            if self._trace is not None:
                self._trace.complete()
            return None  # a cancel may have come first
        if cause is None:
            return AttemptOutcome.EXPIRED
        return AttemptOutcome.CANCELLED if isinstance(cause, HandoffCancelled) else AttemptOutcome.FAILED

    def _traced(self, body: Body) -> Body:
        """Add the trace context to PREFILL, as the parent of the peer's spans."""
        if self._trace is None or not isinstance(body, Prefill):
            return body
        return replace(body, job=replace(body.job, trace=self._trace.context))

    def _execute(self, action: Action) -> ReceiverEvent | None:
        owner, transfer_id = self._context.owner, self.key.transfer_id
        match action:
            case SendMessage():
                self.link.send(self.key, self._traced(action.body))
            case BindBlocks():
                self._context.spawn(self._bind(action.num_blocks))
            case OpenGrant():
                self._open_grants(action)
            case Verify():
                self._context.spawn(self._verify(action))
            case ForwardFirstToken():
                self._user.first_token(self, action.first_token)
            case Commit():
                self._context.spawn(self._commit(action.info))
            case Revoke():
                self._revoke()
            case ReportFailed():
                self._user.failed(self, action.landed, action.failure)
            case Quarantine():
                self._count_quarantined(self.machine.num_leased_blocks)
                owner.quarantine(transfer_id, action.blocks)
            case ReleaseBlocks():
                self._count_quarantined(0)
                owner.released(transfer_id, action.blocks)
        return None

    def _open_grants(self, action: OpenGrant) -> None:
        self._transports, self._pairings = self.link.transports, self.link.pairings
        for lane, (transport, pairing) in enumerate(zip(self._transports, self._pairings, strict=True)):
            group = pairing.mapping.lane.group
            grant = LaneGrant(
                key=replace(self.key, lane=lane),
                transport=transport,
                pairing=pairing,
                held_tokens=self.machine.plan.job.held_tokens,
                blocks=action.windows[group - 1] if group else action.blocks,
            )
            self._region_of(lane).open_grant(grant, partial(self._opened, grant))

    def _opened(self, grant: LaneGrant, opened: OpenedGrant) -> None:
        self.on_event(
            GrantOpened(
                transport=grant.transport,
                grant=opened.token,
                drain_proves_quiet=opened.drain_proves_quiet,
                lane=grant.key.lane,
            )
        )

    def _revoke(self) -> None:
        """End the grants of all lanes, each of which is proven by itself."""
        keys = [replace(self.key, lane=lane) for lane in range(len(self._transports))]
        # All are revoked before the machine hears of the first: it may be the last that it needs.
        proven = [key.lane for key in keys if self._region_of(key.lane).revoke(self._transports[key.lane], key)]
        for lane in proven:
            self.on_event(Quiet(lane=lane))

    def _region_of(self, lane: int) -> ReceivingRegion:
        return self._context.regions[self._pairings[lane].mapping.lane.destination]

    def _count_quarantined(self, num_blocks: int) -> None:
        self._context.stats.quarantined_blocks += num_blocks - self._num_quarantined
        self._num_quarantined = num_blocks

    async def _bind(self, num_blocks: int) -> None:
        try:
            bound = await self._context.owner.bind(self.key.transfer_id, num_blocks)
        except ServingError as error:
            self.on_event(BindRefused(failure=Failure.from_error(error)))
        else:
            self.on_event(bound)

    async def _verify(self, action: Verify) -> None:
        chunk = action.chunk
        region, key = self._region_of(chunk.lane), replace(self.key, lane=chunk.lane)
        started_s = self._now()
        intact = await region.verify(self._transports[chunk.lane], key, chunk.cells, chunk.checksum)
        if intact:
            pairing, now = self._pairings[chunk.lane], self._now()
            num_bytes = pairing.mapping.payload(chunk.cells).num_bytes(pairing.wire_dtype)
            self._tally.chunk(num_bytes, chunk.write_s)
            self._context.rates.observe(
                self.link.address,
                self.machine.plan.peer,
                self._transport_name(),
                num_bytes=num_bytes,
                # Lanes move at once, and about as much each.
                seconds=chunk.write_s / len(self._pairings),
                now=now,
            )
            if self._trace is not None:
                self._trace.chunk(chunk.seq, num_bytes, write_s=chunk.write_s, verify_s=now - started_s)
        elif self.machine.state in LIVE:  # otherwise its grant has ended and nothing was damaged
            self._tally.nack()
            if self._trace is not None:
                self._trace.damaged(chunk.seq)
        self.on_event(Verified(seq=chunk.seq, rewrite=chunk.rewrite, intact=intact))

    async def _commit(self, info: CommitInfo) -> None:
        committing = self._user.committing(self)
        if committing:
            await self._context.owner.commit(self.key.transfer_id, info)
        else:
            self._context.owner.released(self.key.transfer_id, info.blocks)
        self.on_event(Committed())
        self._end(AttemptOutcome.COMMITTED if committing else AttemptOutcome.CANCELLED)
