"""The decode worker's half of one attempt of one hand-off: reserve, verify, commit; or fail and prove quiet.

A plain synchronous object: messages, events and the time go in, actions come out. Its shell executes the actions in
order and feeds the answers back. Every block that it is given leaves exactly once: in a Commit, as
`landed` in ReportFailed, or in ReleaseBlocks (perhaps after a Quarantine).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.layout.lanes import Lane, whole_lane
from kv_transfer.protocol import guards
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
from kv_transfer.protocol.coverage import Coverage
from kv_transfer.protocol.events import (
    BindRefused,
    BlocksBound,
    Committed,
    GrantOpened,
    HandoffCancelled,
    LinkLost,
    PeerFaulted,
    Quiet,
    ReceiverEvent,
    Verified,
)
from kv_transfer.protocol.leases import Lease
from kv_transfer.protocol.messages import (
    Abort,
    Chunk,
    CommitAck,
    Drained,
    Failure,
    FirstToken,
    HandoffEnvelope,
    Nack,
    Offer,
    Prefill,
    PrefillJob,
    Reject,
    Reserve,
    Seal,
    TransferKey,
)
from kv_transfer.protocol.states import NEXT, HandoffState
from tandem.errors import InvariantError, TransferError
from tandem.values.ids import NO_BLOCK, BlockHash, BlockId, Incarnation
from tandem.values.kv_layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverPlan:
    """Parameters fixed when an attempt starts. Times are seconds; see TransferSettings."""

    key: TransferKey
    own: Incarnation
    """This process's incarnation."""
    peer: Incarnation
    job: PrefillJob
    layout: KVLayout
    lease_s: float
    stall_s: float
    queue_s: float
    drain_s: float
    max_rewrites: int


@dataclass(slots=True, kw_only=True)
class _Landing:
    """One chunk on its way to being verified."""

    chunk: Chunk
    nacked: bool = False
    verified: bool = False


class Receiver:
    """State machine of one attempt on the decode worker; its shell executes the returned actions in order."""

    def __init__(self, plan: ReceiverPlan, now: float) -> None:
        self.plan = plan
        self.state = HandoffState.NEW
        self._num_blocks = plan.job.num_blocks(plan.layout.block_size)
        self._units_per_block = 1
        self._lanes: tuple[Lane, ...] = (whole_lane(plan.layout),)
        self._num_units = self._num_blocks
        self._coverages = self._nothing_covered()
        self._lease = Lease(plan.lease_s, now)
        self._progress = Lease(plan.queue_s, now)
        self._drain = Lease(plan.drain_s, now)
        self._blocks: tuple[BlockId, ...] = ()
        self._windows: tuple[tuple[BlockId, ...], ...] = ()
        """Blocks of each group of windowed layers, for the same token blocks as `_blocks`; see BlocksBound."""
        self._binding = False
        self._granted = False
        self._opened: dict[int, GrantOpened] = {}
        """Lanes that the peer may write through; it is told when all are."""
        self._quiet_lanes: set[int] = set()
        self._landings: dict[int, _Landing] = {}
        self._num_verified = 0
        self._first_token: FirstToken | None = None
        self._seal: Seal | None = None
        self._sealed_at = now

    def _nothing_covered(self) -> list[Coverage]:
        job, layout = self.plan.job, self.plan.layout
        from_held = layout.first_window_block(job.num_tokens) - job.held_tokens // layout.block_size
        first = max(0, from_held) * self._units_per_block
        return [
            Coverage(num_units=self._num_units, lane=lane, first_unit=first if lane.group else 0)
            for lane in self._lanes
        ]

    @property
    def _num_cells(self) -> int:
        """Number of cells of all lanes, which bounds the number of chunks."""
        return sum(coverage.num_cells for coverage in self._coverages)

    def start(self, unit_tokens: int, lanes: Sequence[Lane] = ()) -> Actions:
        """Request the prefill.

        `unit_tokens`: the unit of cells with this peer; divides the block size. `lanes`: those from this peer; without
        any there is one, which carries everything.
        """
        self._units_per_block = self.plan.layout.block_size // unit_tokens
        self._lanes = tuple(lanes) or self._lanes
        self._num_units = self.plan.job.num_blocks(unit_tokens)
        self._coverages = self._nothing_covered()
        return (SendMessage(body=Prefill(job=self.plan.job, lease_s=self.plan.lease_s)),)

    @property
    def num_leased_blocks(self) -> int:
        """Destinations that the peer may write, or may still be writing."""
        over = self.state in (HandoffState.COMMITTED, HandoffState.CLOSED)
        if over or not self._granted:
            return 0
        return len(self._blocks) + sum(len(blocks) - blocks.count(NO_BLOCK) for blocks in self._windows)

    def renew(self, now: float) -> None:
        """Renew the lease: the peer reports the hand-off alive on its side."""
        self._lease.renew(now)

    def on_message(self, envelope: HandoffEnvelope, now: float) -> Actions:
        """Process a message from the peer; stale, repeated and late ones do nothing."""
        if guards.stale_incarnation(envelope, self.plan.peer) or guards.misdirected(envelope, self.plan.own):
            return ()
        if guards.stale_attempt(envelope, self.plan.key):
            return ()
        body = envelope.body
        if isinstance(body, Drained):
            return self._on_drained()
        if not guards.still_live(self.state):
            return ()
        self._lease.renew(now)
        self._progress.renew(now)
        match body:
            case Offer():
                return self._on_offer(body, now)
            case Chunk():
                return self._on_chunk(body, now)
            case FirstToken():
                return self._on_first_token(body, now)
            case Seal():
                return self._on_seal(body, now)
            case Reject():
                return self._fail(body.failure, now)
            case Abort():
                return self._fail(_transfer_failure(f"prefill worker: {body.reason}"), now)
            case _:
                return self._violation(f"{type(body).__name__} is not for a decode worker", now)

    def on_event(self, event: ReceiverEvent, now: float) -> Actions:
        """Process a local event."""
        match event:
            case BlocksBound():
                return self._on_bound(event, now)
            case BindRefused():
                return self._on_bind_refused(event.failure, now)
            case GrantOpened():
                return self._on_grant_opened(event)
            case Verified():
                return self._on_verified(event, now)
            case Quiet():
                return self._on_quiet({event.lane})
            case Committed():
                self._move(HandoffState.CLOSED)
                return (SendMessage(body=CommitAck()), Revoke())
            case HandoffCancelled() | LinkLost() | PeerFaulted():
                return self._on_end(event, now)

    def on_timer(self, now: float) -> Actions:
        """Expire what has run out of time; called by the reaper."""
        if guards.still_live(self.state):
            if self._lease.expired(now):
                return self._fail(_transfer_failure("prefill worker is silent"), now, expired=True)
            if self._progress.expired(now):
                return self._fail(_transfer_failure("no progress"), now, expired=True)
        elif self.state is HandoffState.ABORTING and self._granted and self._drain.expired(now):
            self._drain.renew(now)
            self._move(HandoffState.QUARANTINED)
            return (Quarantine(blocks=self._blocks),)
        elif self.state is HandoffState.QUARANTINED and self._drain.expired(now):
            # The peer's proof may have been lost with a link; a repeated Abort makes it answer again.
            self._drain.renew(now)
            return (SendMessage(body=Abort(reason="still waiting for proof that the writer is quiet")),)
        return ()

    def _move(self, state: HandoffState) -> None:
        if state not in NEXT[self.state]:
            raise InvariantError(f"receiver {self.plan.key}: {self.state} -> {state}")
        self.state = state

    # Towards a commit

    def _on_offer(self, offer: Offer, now: float) -> Actions:
        if self.state is not HandoffState.NEW:
            return ()
        job, most = self.plan.job, self._num_units
        if job.fetch:
            if guards.impossible_fetch(offer, most, self._units_per_block):
                return self._violation(f"offers {offer.num_units} units, at most {most} were requested", now)
            self._num_blocks = offer.num_units // self._units_per_block
            self._num_units = offer.num_units
            self._coverages = self._nothing_covered()
        elif guards.unexpected_size(offer, most):
            return self._violation(f"offers {offer.num_units} units, expected {most}", now)
        # Checked before anything is bound: what lands in an attempt that fails later is kept under these tokens' names.
        if guards.wrong_identity(offer.tail_hash, self._expected_tail()):
            return self._violation("computes other tokens than requested", now)
        self._move(HandoffState.OFFERED)
        self._progress = Lease(self.plan.stall_s, now)
        self._binding = True
        return (BindBlocks(num_blocks=self._num_blocks),)

    def _on_bound(self, event: BlocksBound, now: float) -> Actions:
        blocks = event.blocks
        if not self._binding:
            raise InvariantError(f"receiver {self.plan.key}: bound twice")
        self._binding = False
        self._blocks, self._windows = blocks, event.windows
        if self.state is not HandoffState.OFFERED:
            return self._close()
        if guards.wrong_binding(len(blocks), self._num_blocks):
            return self._violation(f"{len(blocks)} blocks bound, expected {self._num_blocks}", now)
        self._granted = True
        self._move(HandoffState.RESERVED)
        return (OpenGrant(blocks=blocks, windows=event.windows),)

    def _on_bind_refused(self, failure: Failure, now: float) -> Actions:
        self._binding = False
        if self.state is not HandoffState.OFFERED:
            return self._close()
        return (SendMessage(body=Reject(failure=failure)), *self._fail(failure, now))

    def _on_grant_opened(self, event: GrantOpened) -> Actions:
        self._opened[event.lane] = event
        if not guards.still_live(self.state) or not self._reserved:
            return ()
        first, *others = (self._opened[lane] for lane in range(len(self._lanes)))
        reserve = Reserve(
            num_units=self._num_units,
            transport=first.transport,
            grant=first.grant,
            more_grants=tuple(opened.grant for opened in others),
        )
        return (SendMessage(body=reserve),)

    @property
    def _reserved(self) -> bool:
        """Whether every lane is open, so that the peer may have been told."""
        return len(self._opened) == len(self._lanes)

    def _on_chunk(self, chunk: Chunk, now: float) -> Actions:
        if not self._reserved:
            return self._violation("chunk before a reservation", now)
        if guards.unknown_lane(chunk.lane, len(self._lanes)):
            return self._violation(f"chunk {chunk.seq} of lane {chunk.lane}, there are {len(self._lanes)}", now)
        coverage = self._coverages[chunk.lane]
        if guards.out_of_range(chunk.cells, coverage):
            return self._violation(f"chunk {chunk.seq} lies outside the reservation", now)
        if guards.beyond_seal(chunk.seq, self._seal, self._num_cells):
            return self._violation(f"chunk {chunk.seq} is beyond the stated count", now)
        landing = self._landings.get(chunk.seq)
        if landing is None:
            if chunk.rewrite > 0:
                return ()
            if guards.overlapping(chunk.cells, coverage):
                return self._violation(f"chunk {chunk.seq} overlaps another", now)
            coverage.claim(chunk.cells)
            self._landings[chunk.seq] = _Landing(chunk=chunk)
        else:
            if guards.repeated_chunk(chunk, landing.chunk, landing.nacked):
                return ()
            if guards.altered_chunk(chunk, landing.chunk):
                return self._violation(f"chunk {chunk.seq} changed its range", now)
            landing.chunk, landing.nacked = chunk, False
        if self.state is HandoffState.RESERVED:
            self._move(HandoffState.STREAMING)
        return (Verify(chunk=chunk),)

    def _on_verified(self, event: Verified, now: float) -> Actions:
        landing = self._landings[event.seq]
        if not guards.still_live(self.state) or landing.verified or landing.nacked:
            return ()
        if guards.stale_verdict(event.rewrite, landing.chunk):
            return ()
        if event.intact:
            landing.verified = True
            self._num_verified += 1
            self._coverages[landing.chunk.lane].land(landing.chunk.cells)
            return self._commit_if_complete(now)
        if guards.rewrites_exhausted(event.rewrite, self.plan.max_rewrites):
            failure = _transfer_failure(f"chunk {event.seq} arrived damaged {event.rewrite + 1} times")
            return (SendMessage(body=Abort(reason=failure.message)), *self._fail(failure, now))
        landing.nacked = True
        return (SendMessage(body=Nack(seq=event.seq, rewrite=event.rewrite)),)

    def _on_first_token(self, first_token: FirstToken, now: float) -> Actions:
        if guards.repeated_first_token(self._first_token, self.plan.job.resume):
            return ()
        self._first_token = first_token
        return (ForwardFirstToken(first_token=first_token), *self._commit_if_complete(now))

    def _on_seal(self, seal: Seal, now: float) -> Actions:
        if self._seal is not None:
            if guards.contradicting_seal(seal, self._seal):
                return self._violation("sealed twice with different content", now)
            return ()
        if not self._reserved:
            return self._violation("seal before a reservation", now)
        if not 0 < seal.num_chunks <= self._num_cells or max(self._landings, default=-1) >= seal.num_chunks:
            return self._violation(f"seal of {seal.num_chunks} chunks contradicts those announced", now)
        if guards.wrong_identity(seal.tail_hash, self._expected_tail()):
            return self._violation("computed other tokens than requested", now, keep=False)
        self._seal = seal
        self._sealed_at = now
        self._move(HandoffState.SEALED)
        return self._commit_if_complete(now)

    def _expected_tail(self) -> BlockHash | None:
        """Name of the last full hash block once everything has landed."""
        job = self.plan.job
        return job.expected_tail(job.held_tokens + self._num_blocks * self.plan.layout.block_size)

    def _commit_if_complete(self, now: float) -> Actions:
        if not guards.complete(self._seal, self._num_verified, self._coverages):
            return ()
        if not guards.continuable(self._first_token, self.plan.job.resume):
            return ()
        if self._seal is None:
            raise InvariantError(f"receiver {self.plan.key}: complete without a seal")
        self._move(HandoffState.COMMITTED)
        exposed_s = now - self._sealed_at
        info = CommitInfo(
            blocks=self._blocks,
            first_token=self._first_token,
            cached_tokens=self._seal.cached_tokens,
            # The transfers that the prefill worker reports are its own fetches.
            times=self._seal.times._replace(transfer_s=self._seal.times.transfer_s + exposed_s),
            exposed_s=exposed_s,
        )
        return (Commit(info=info),)

    # Towards the end of a failed attempt

    def _on_end(self, event: HandoffCancelled | LinkLost | PeerFaulted, now: float) -> Actions:
        if not guards.still_live(self.state):
            return ()
        if isinstance(event, LinkLost):
            return self._fail(_transfer_failure(event.reason), now)
        abort = SendMessage(body=Abort(reason=event.reason))
        if isinstance(event, HandoffCancelled):
            return (abort, *self._enter_aborting((), now))
        return (abort, *self._fail(_transfer_failure(event.reason), now))

    def _violation(self, reason: str, now: float, *, keep: bool = True) -> Actions:
        failure = _transfer_failure(f"protocol: {reason}")
        return (SendMessage(body=Abort(reason=reason)), *self._fail(failure, now, keep=keep))

    def _fail(self, failure: Failure, now: float, *, expired: bool = False, keep: bool = True) -> Actions:
        """Give up the attempt; `keep`: what has landed is valid, and the next attempt continues from there."""
        keepable = self.plan.job.num_keepable_blocks(self.plan.layout.block_size) if keep else 0
        num_units = min(coverage.num_landed_leading_units() for coverage in self._coverages)
        complete = num_units // self._units_per_block
        num_landed = min(complete, keepable, len(self._blocks))
        landed, self._blocks = self._blocks[:num_landed], self._blocks[num_landed:]
        self._windows = tuple(blocks[num_landed:] for blocks in self._windows)
        report: list[Action] = [ReportFailed(landed=landed, failure=failure, expired=expired)]
        if expired:
            report.insert(0, SendMessage(body=Abort(reason=failure.message)))
        return self._enter_aborting(tuple(report), now)

    def _enter_aborting(self, report: Actions, now: float) -> Actions:
        self._move(HandoffState.ABORTING)
        self._drain = Lease(self.plan.drain_s, now)
        revoke = (Revoke(),) if self._granted else ()
        return (*report, *revoke, *self._close())

    def _on_drained(self) -> Actions:
        return self._on_quiet(
            {lane for lane, opened in self._opened.items() if guards.drain_is_proof(opened.drain_proves_quiet)}
        )

    def _on_quiet(self, lanes: set[int]) -> Actions:
        """Close once no byte can land through any lane; earlier than at the end of the attempt this proves nothing."""
        if self._is_failing:
            self._quiet_lanes |= lanes
        return self._close()

    @property
    def _is_failing(self) -> bool:
        return self.state in (HandoffState.ABORTING, HandoffState.QUARANTINED)

    def _close(self) -> Actions:
        proven_quiet = len(self._quiet_lanes) == len(self._lanes)
        if not self._is_failing or self._binding or not guards.quiet(self._granted, proven_quiet):
            return ()
        self._move(HandoffState.DRAINED)
        self._move(HandoffState.CLOSED)
        blocks, self._blocks = self._blocks, ()
        return (ReleaseBlocks(blocks=blocks),) if blocks else ()


def _transfer_failure(message: str) -> Failure:
    return Failure(kind=TransferError, message=message)
