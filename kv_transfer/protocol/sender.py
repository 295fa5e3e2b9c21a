"""The prefill worker's half of one attempt of one hand-off: offer, write what is computed, seal; or stop and drain.

A plain synchronous object like `receiver.py`. Once SubmitPrefill has been answered by Submitted, the engine's blocks
stay until ReleaseSources, which comes exactly once and never while a write reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.chunk_plan import ChunkPlanner, HandoffSize
from kv_transfer.protocol import guards
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
    FirstTokenSampled,
    HandoffCancelled,
    KVComputed,
    LinkLost,
    PeerFaulted,
    PrefillFailed,
    PrefillFinished,
    PrefillScheduled,
    SenderEvent,
    SubmitRefused,
    Submitted,
    WriteFailed,
    WritesEnding,
    WritesQuiet,
    Written,
)
from kv_transfer.protocol.leases import Lease
from kv_transfer.protocol.messages import (
    Abort,
    Chunk,
    CommitAck,
    Drained,
    Failure,
    HandoffEnvelope,
    Nack,
    Offer,
    PrefillJob,
    Reject,
    Reserve,
    Seal,
    TransferKey,
)
from kv_transfer.protocol.states import NEXT, HandoffState
from tandem.errors import DeadlineExceeded, InvariantError, Unavailable
from tandem.values.ids import NO_BLOCK, BlockId, Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderPlan:
    """Parameters fixed when an attempt starts. Times are seconds; see TransferSettings."""

    key: TransferKey
    own: Incarnation
    """This process's incarnation."""
    peer: Incarnation
    job: PrefillJob
    block_size: int
    """Tokens per block of this worker."""
    unit_tokens: int
    """Unit of cells with this peer: the smaller block of the two workers."""
    whole_tokens: int
    """The larger of the two workers' block sizes: the granularity of a fetch."""
    lanes: tuple[HandoffSize, ...]
    """The cells of each lane to this peer."""
    lease_s: float
    stall_s: float
    queue_s: float
    chunk_bytes: int
    """Maximum payload of one chunk."""
    write_window: int
    """Maximum number of concurrent first writes in each lane."""
    max_rewrites: int


@dataclass(slots=True, kw_only=True)
class _Outgoing:
    """One chunk between being planned and being verified."""

    seq: int
    lane: int
    cells: CellRange
    rewrite: int = 0
    announced: bool = False
    """The newest write is complete and its CHUNK was sent."""


class _OutgoingLane:
    """The chunks of one lane."""

    __slots__ = ("next_write", "planner", "seqs")

    def __init__(self, cells: HandoffSize, chunk_bytes: int) -> None:
        self.planner = ChunkPlanner(cells, chunk_bytes=chunk_bytes)
        self.seqs: list[int] = []
        self.next_write = 0
        """Index in `seqs` of the first chunk that was never written."""


class Sender:
    """State machine of one attempt on the prefill worker; its shell executes the returned actions in order."""

    def __init__(self, plan: SenderPlan, now: float) -> None:
        self.plan = plan
        self.state = HandoffState.NEW
        self._end_tokens = plan.job.num_tokens
        """Number of leading tokens that the peer will hold at the end."""
        self._num_units = plan.job.num_blocks(plan.unit_tokens)
        self._num_blocks = plan.job.num_blocks(plan.block_size)
        self._held_blocks = plan.job.held_tokens // plan.block_size
        self._lanes = [_OutgoingLane(cells, plan.chunk_bytes) for cells in plan.lanes]
        self._lease = Lease(plan.lease_s, now)
        self._progress = Lease(plan.queue_s, now)
        self._deadline = Lease(plan.job.timeout_s, now) if plan.job.timeout_s is not None else None
        self._submitting = True
        self._submitted = False
        num_groups = 1 + max(lane.group for lane in plan.lanes)
        self._sources: list[list[BlockId]] = [[] for _ in range(num_groups)]
        """Blocks that hold the tokens after the held prefix, by group of layers, as far as the engine has reported
        them."""
        self._num_ready = 0
        """Units whose content is final in all layers."""
        self._finished: PrefillFinished | None = None
        self._reserve: Reserve | None = None
        self._chunks: list[_Outgoing] = []
        self._writes_under_way: set[tuple[int, int]] = set()
        self._cancelling_writes = False

    @property
    def reserve(self) -> Reserve | None:
        """The receiver's grant, once it has come."""
        return self._reserve

    @property
    def num_pinned_blocks(self) -> int:
        """Number of known source blocks that are kept for the peer."""
        if self.state is HandoffState.CLOSED:
            return 0
        return sum(len(known) - known.count(NO_BLOCK) for known in self._sources)

    def start(self) -> Actions:
        """Hand the job to the engine."""
        return (SubmitPrefill(job=self.plan.job),)

    def renew(self, now: float) -> None:
        """Renew the lease: the peer reports the hand-off alive on its side."""
        self._lease.renew(now)

    def on_message(self, envelope: HandoffEnvelope, now: float) -> Actions:
        """Process a message from the peer; stale, repeated and late ones do nothing."""
        if guards.stale_incarnation(envelope, self.plan.peer) or guards.misdirected(envelope, self.plan.own):
            return ()
        if guards.stale_attempt(envelope, self.plan.key):
            return ()
        if not guards.still_live(self.state):
            return ()
        self._lease.renew(now)
        self._progress.renew(now)
        body = envelope.body
        match body:
            case Reserve():
                return self._on_reserve(body)
            case Nack():
                return self._on_nack(body)
            case CommitAck():
                return self._on_commit_ack()
            case Reject():
                return self._fail(None)
            case Abort():
                return self._fail(None)
            case _:
                return self._fail(f"{type(body).__name__} is not for a prefill worker")

    def on_event(self, event: SenderEvent, now: float) -> Actions:
        """Process a local event."""
        match event:
            case Submitted():
                return self._on_submitted()
            case SubmitRefused():
                return self._on_submit_refused(event.failure)
            case WritesQuiet():
                self._writes_under_way.clear()
                self._cancelling_writes = False
                return self._close_if_quiet()
            case WritesEnding():
                self._cancelling_writes = False
                return self._close_if_quiet()
            case Written() | WriteFailed() if not guards.still_live(self.state):
                self._writes_under_way.discard((event.seq, event.rewrite))
                return self._close_if_quiet()
        if not guards.still_live(self.state):
            return ()
        if not isinstance(event, HandoffCancelled | LinkLost | PeerFaulted):
            self._progress.renew(now)
        return self._on_engine_event(event, now)

    def _on_engine_event(self, event: SenderEvent, now: float) -> Actions:
        match event:
            case PrefillScheduled():
                return self._on_scheduled(event, now)
            case KVComputed():
                return self._on_progress(event)
            case FirstTokenSampled():
                return () if self.plan.job.resume else (SendMessage(body=event.first_token),)
            case PrefillFinished():
                return self._on_finished(event)
            case Written():
                return self._on_written(event)
            case WriteFailed():
                self._writes_under_way.discard((event.seq, event.rewrite))
                return self._fail(event.reason)
            case PrefillFailed():
                # The engine has already ended the request: there is nothing to abort.
                return self._give_up(event.failure, stop_engine=False)
            case LinkLost():
                return self._fail(None)
            case HandoffCancelled() | PeerFaulted():
                return self._fail(event.reason)
            case _:
                raise InvariantError(f"sender {self.plan.key}: unexpected {type(event).__name__}")

    def on_timer(self, now: float) -> Actions:
        """Expire what has run out of time; called by the reaper."""
        if not guards.still_live(self.state):
            return ()
        if self._lease.expired(now):
            return self._fail("decode worker is silent")
        if self._progress.expired(now):
            return self._fail("no progress")
        if guards.out_of_time(self._deadline, now):
            return self._give_up(Failure(kind=DeadlineExceeded, message="the prefill took too long"))
        return ()

    def _move(self, state: HandoffState) -> None:
        if state not in NEXT[self.state]:
            raise InvariantError(f"sender {self.plan.key}: {self.state} -> {state}")
        self.state = state

    # Towards a commit

    def _on_submitted(self) -> Actions:
        self._submitting = False
        self._submitted = True
        if self.state is HandoffState.ABORTING:
            return (AbortPrefill(), *self._close_if_quiet())
        return ()

    def _on_submit_refused(self, failure: Failure) -> Actions:
        self._submitting = False
        if self.state is HandoffState.ABORTING:
            return self._close_if_quiet()
        self._move(HandoffState.ABORTING)
        self._move(HandoffState.DRAINED)
        self._move(HandoffState.CLOSED)
        return (SendMessage(body=Reject(failure=failure)),)

    def _on_scheduled(self, event: PrefillScheduled, now: float) -> Actions:
        if self.state is not HandoffState.NEW:
            return ()
        if self.plan.job.fetch and not self._narrow(event.num_tokens or 0):
            return self._give_up(Failure(kind=Unavailable, message="nothing more of the prefix is held here"))
        self._move(HandoffState.OFFERED)
        self._progress = Lease(self.plan.stall_s, now)
        return (SendMessage(body=Offer(num_units=self._num_units, queue_s=event.queue_s, tail_hash=event.tail_hash)),)

    def _narrow(self, num_tokens: int) -> bool:
        """Send no more than these tokens, in whole blocks of both workers; False when nothing is left to send."""
        plan = self.plan
        self._end_tokens = num_tokens // plan.whole_tokens * plan.whole_tokens
        self._num_units = (self._end_tokens - plan.job.held_tokens) // plan.unit_tokens
        self._num_blocks = self._end_tokens // plan.block_size - self._held_blocks
        return self._num_units > 0

    def _on_reserve(self, reserve: Reserve) -> Actions:
        if self.state is not HandoffState.OFFERED:
            return ()
        if guards.unexpected_size(reserve, self._num_units):
            return self._fail(f"{reserve.num_units} units reserved, expected {self._num_units}")
        if guards.wrong_grants(len(reserve.grants), len(self._lanes)):
            return self._fail(f"{len(reserve.grants)} lanes granted, expected {len(self._lanes)}")
        self._reserve = reserve
        self._move(HandoffState.RESERVED)
        return self._advance()

    def _on_progress(self, event: KVComputed) -> Actions:
        # A preempted prompt is recomputed into other blocks: those reported first stay pinned, with the same content.
        ready = self._note_sources(event.num_computed_tokens, event.blocks)
        coming = max(ready, self._note_sources(event.coming_tokens, event.blocks))
        for known, reported in zip(self._sources, (event.blocks, *event.windows), strict=True):
            known.extend(reported[self._held_blocks + len(known) : coming])
        self._num_ready = max(self._num_ready, self._units_in(ready))
        return self._advance(coming=self._units_in(coming), num_layers=event.num_layers)

    def _note_sources(self, num_tokens: int, blocks: Sequence[BlockId]) -> int:
        """Number of leading blocks of the table that these tokens fill; includes the last, partial one at the end."""
        if num_tokens >= self._end_tokens:
            return min(self._held_blocks + self._num_blocks, len(blocks))
        return min(num_tokens // self.plan.block_size, len(blocks))

    def _units_in(self, num_blocks: int) -> int:
        """Number of units after the held prefix in the table's first `num_blocks` blocks."""
        held_units = self.plan.job.held_tokens // self.plan.unit_tokens
        return min(self._num_units, max(0, num_blocks * self.plan.block_size // self.plan.unit_tokens - held_units))

    def _on_finished(self, event: PrefillFinished) -> Actions:
        if found := {len(known) for known in self._sources} - {self._num_blocks}:
            return self._fail(f"{found.pop()} blocks computed, expected {self._num_blocks}")
        self._finished = event
        return self._advance()

    def _advance(self, *, coming: int = 0, num_layers: int = 0) -> Actions:
        """Write what is computed as far as the grant and the window allow; seal once all is planned."""
        if guards.not_granted(self._reserve.grant if self._reserve else None) or self.state is HandoffState.SEALED:
            return self._fill_window()
        for number, lane in enumerate(self._lanes):
            for cells in lane.planner.plan(self._num_ready, coming=coming, num_layers=num_layers):
                lane.seqs.append(len(self._chunks))
                self._chunks.append(_Outgoing(seq=len(self._chunks), lane=number, cells=cells))
        actions = self._fill_window()
        if self._finished is None:
            return actions
        self._move(HandoffState.SEALED)
        seal = Seal(
            num_chunks=len(self._chunks),
            cached_tokens=self._finished.cached_tokens,
            times=self._finished.times,
            tail_hash=self._finished.tail_hash,
        )
        return (*actions, SendMessage(body=seal))

    def _fill_window(self) -> Actions:
        actions: list[Action] = []
        under_way = [0] * len(self._lanes)
        for seq, _rewrite in self._writes_under_way:
            under_way[self._chunks[seq].lane] += 1
        for number, lane in enumerate(self._lanes):
            room = max(0, self.plan.write_window - under_way[number])
            for seq in lane.seqs[lane.next_write : lane.next_write + room]:
                actions.append(self._write(self._chunks[seq]))
                lane.next_write += 1
        if actions and self.state is HandoffState.RESERVED:
            self._move(HandoffState.STREAMING)
        return tuple(actions)

    def _write(self, chunk: _Outgoing) -> StartWrite:
        chunk.announced = False
        self._writes_under_way.add((chunk.seq, chunk.rewrite))
        first_token = self.plan.job.held_tokens + chunk.cells.first_unit * self.plan.unit_tokens
        end_token = first_token + chunk.cells.num_units * self.plan.unit_tokens
        first, end = first_token // self.plan.block_size, -(-end_token // self.plan.block_size)
        known = self._sources[self.plan.lanes[chunk.lane].group]
        sources = tuple(known[first - self._held_blocks : end - self._held_blocks])
        return StartWrite(
            seq=chunk.seq,
            rewrite=chunk.rewrite,
            cells=chunk.cells,
            first_block=first,
            sources=sources,
            lane=chunk.lane,
        )

    def _on_written(self, event: Written) -> Actions:
        self._writes_under_way.discard((event.seq, event.rewrite))
        chunk = self._chunks[event.seq]
        chunk.announced = True
        done = Chunk(
            seq=event.seq,
            rewrite=event.rewrite,
            cells=chunk.cells,
            checksum=event.checksum,
            write_s=event.seconds,
            lane=chunk.lane,
        )
        return (SendMessage(body=done), *self._fill_window())

    def _on_nack(self, nack: Nack) -> Actions:
        if not 0 <= nack.seq < len(self._chunks):
            return self._fail(f"NACK of unknown chunk {nack.seq}")
        chunk = self._chunks[nack.seq]
        if guards.stale_nack(nack, chunk.rewrite, chunk.announced):
            return ()
        if guards.rewrites_exhausted(chunk.rewrite, self.plan.max_rewrites):
            return self._fail(f"chunk {nack.seq} arrived damaged {chunk.rewrite + 1} times")
        chunk.rewrite += 1
        return (self._write(chunk),)

    def _on_commit_ack(self) -> Actions:
        if guards.unsealed_commit(self.state):
            return self._fail("commit of an unsealed hand-off")
        if guards.reads_pending(len(self._writes_under_way)):
            return self._fail("commit while writes are under way")
        self._move(HandoffState.COMMITTED)
        self._move(HandoffState.CLOSED)
        return (ReleaseSources(),)

    # Towards the end of a failed attempt

    def _give_up(self, failure: Failure, *, stop_engine: bool = True) -> Actions:
        # A REJECT promises that nothing was written.
        if self._reserve is not None:
            return self._fail(failure.message, stop_engine=stop_engine)
        return (SendMessage(body=Reject(failure=failure)), *self._fail(None, stop_engine=stop_engine))

    def _fail(self, reason: str | None, *, stop_engine: bool = True) -> Actions:
        """Stop everything. `reason` is sent to the peer; None when the peer knows already or cannot be reached."""
        self._move(HandoffState.ABORTING)
        actions: list[Action] = []
        if reason is not None:
            actions.append(SendMessage(body=Abort(reason=reason)))
        if self._submitted and self._finished is None and stop_engine:
            actions.append(AbortPrefill())
        if self._reserve is not None:
            self._cancelling_writes = True
            actions.append(CancelWrites())
        return (*actions, *self._close_if_quiet())

    def _close_if_quiet(self) -> Actions:
        if self.state is not HandoffState.ABORTING or self._submitting or self._cancelling_writes:
            return ()
        if guards.reads_pending(len(self._writes_under_way)):
            return ()
        self._move(HandoffState.DRAINED)
        self._move(HandoffState.CLOSED)
        drained = SendMessage(body=Drained())
        return (drained, ReleaseSources()) if self._submitted else (drained,)
