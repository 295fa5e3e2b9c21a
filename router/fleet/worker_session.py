"""One session with one worker, from HELLO to the end of the stream.

Every event is delivered to its recipient at once and nothing waits: what a slow client does not read accumulates in
that request's own bounded mailbox. A worker that is silent longer than `silence_s` counts as dead, as does one whose
stream ends; every attempt that it was running then gets a WorkerLost.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc
import grpc.aio
from msgspec import Struct

from router.fleet.native_streams import NativeStreams
from router.fleet.session_carriers import Connect, DirectCarrier, DirectFailed, GrpcCarrier, SessionCarrier
from router.fleet.session_wire import (
    ProtocolError,
    cache_offer_from_pb,
    cancel_to_pb,
    end_earlier_sessions_to_pb,
    fetch_cache_to_pb,
    handoff_from_pb,
    hello_from_pb,
    hello_to_pb,
    load_from_pb,
    migration_ended_to_pb,
    migration_source_from_pb,
    pin_to_pb,
    prefix_change_from_pb,
    refused_from_pb,
    reroute_to_pb,
    resync_to_pb,
    score_prompt_to_pb,
    scores_part_from_pb,
    submit_to_pb,
    take_over_to_pb,
    tokens_from_pb,
    transfer_failed_from_pb,
    unpin_to_pb,
)
from router.types.session_events import (
    CLOSED_HERE,
    AttemptReader,
    CacheOffer,
    CommittedHandoff,
    DeliverScores,
    MigrationPlan,
    PrefillRoute,
    PromptScoringOrder,
    SubmitOrder,
    WorkerLost,
    WorkerPort,
)
from router.types.worker_view import PrefixChange, WorkerInfo, WorkerKey, WorkerLoad
from tandem.errors import Unavailable
from tandem.process.silence import SilenceWatch
from tandem.protocol.pin_wire import result_from_pb
from tandem.protocol.session_versions import LOAD_PERIOD_S, MOST_LOAD_PERIOD_S, router_dialect
from tandem.rpc.hosts import join
from tandem.v1 import session_pb2 as pb
from tandem.v1.session_pb2_grpc import WorkerStub
from tandem.values.ids import Incarnation, RequestId
from tandem.values.prefix_pin import PinKey, PinOrder, PinResult

logger = logging.getLogger(__name__)

_LOOKS_PER_SILENCE = 8
_MOST_REPORTS_PER_S = 2000
"""Load reports that a router with up to a thousand workers wants to handle: each takes it some 50 us."""
_REPORTS_PER_SILENCE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Bounds of one session."""

    metadata: Sequence[tuple[str, str]]
    """gRPC metadata that proves that the router belongs to the cluster."""
    incarnation: Incarnation
    """Incarnation of the router's process."""
    reads_redis: bool = False
    """Whether cache events of workers that publish them in Redis are read there."""
    hello_timeout_s: float = 5.0
    silence_s: float = 1.5
    """Silence after which a worker counts as dead: at least twice the period of load reports."""
    max_queued_submits: int = 4096
    """Submits that may wait for a slow connection."""
    max_queued_pins: int = 4096
    """Pins whose newest order may wait for a slow connection."""
    new_native_streams: Callable[[], NativeStreams] | None = None
    """None: all tokens are written by Python."""


def choose_load_period(num_workers: int, silence_s: float) -> float:
    """Return the period of load reports that suffices for a router with so many workers."""
    most_s = min(MOST_LOAD_PERIOD_S, silence_s / _REPORTS_PER_SILENCE)
    return max(LOAD_PERIOD_S, min(num_workers / _MOST_REPORTS_PER_S, most_s))


class SessionListener(Protocol):
    """Receives what workers report about themselves (`WorkerRegistry`)."""

    def joined(self, info: WorkerInfo, port: WorkerPort) -> None:
        """Add a worker whose session is open. Raises WorkerRejected."""
        ...

    def left(self, key: WorkerKey, reason: str) -> None: ...

    def load_changed(self, key: WorkerKey, load: WorkerLoad) -> None: ...

    def prefix_changed(self, key: WorkerKey, change: PrefixChange) -> None: ...

    def answered(self, key: WorkerKey) -> None: ...

    def handoff_committed(self, key: WorkerKey, handoff: CommittedHandoff) -> None: ...

    def draining(self, key: WorkerKey, reason: str) -> None: ...

    def cache_offered(self, key: WorkerKey, offer: CacheOffer) -> None: ...

    def migration_ended(self, key: WorkerKey, leaving: WorkerKey) -> None: ...

    def pin_reported(self, key: WorkerKey, report: PinResult) -> None: ...


OrderT = TypeVar("OrderT")


class PendingPinOrders(Generic[OrderT]):
    def __init__(self, *, most: int) -> None:
        self._most = most
        # Keys in the order of their newest orders, oldest first.
        self._orders: dict[PinKey, OrderT] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def add(self, key: PinKey, order: OrderT) -> None:
        """Queue an order for a pin, replacing an older one; drops the oldest when full."""
        self._orders.pop(key, None)
        if len(self._orders) >= self._most:
            del self._orders[next(iter(self._orders))]
        self._orders[key] = order

    def pop_first(self) -> OrderT:
        """Remove and return the oldest order, which must exist."""
        return self._orders.pop(next(iter(self._orders)))

    def clear(self) -> None:
        """Drop all orders: the session has ended."""
        self._orders.clear()


class _Attempt(Struct, frozen=True, kw_only=True):
    number: int
    handle: int
    reader: AttemptReader


class _Scoring(Struct, frozen=True, kw_only=True):
    number: int
    deliver: DeliverScores


class WorkerSession:
    """The live stream with one worker; a WorkerPort for dispatch."""

    def __init__(self, carrier: SessionCarrier, info: WorkerInfo, settings: SessionSettings) -> None:
        self.info = info
        self._carrier = carrier
        self._settings = settings
        self._attempts: dict[RequestId, _Attempt] = {}
        self._readers: dict[int, AttemptReader] = {}
        """Those of `_attempts`, by handle."""
        self._native: NativeStreams | None = None
        self._num_handles = 0
        self._scorings: dict[RequestId, _Scoring] = {}
        # Bounded: submits by `max_queued_submits`, reroutes and cancels by the attempts that they concern. Migrations
        # and their ends by the workers that drain: each is handled once, and names this worker once. Resyncs by time.
        self._outgoing: deque[pb.RouterMessage] = deque()
        self._pins: PendingPinOrders[pb.RouterMessage] = PendingPinOrders(most=settings.max_queued_pins)
        self._ended = False
        self._drain_reason: str | None = None
        self._dialect = router_dialect(info.protocol_version)
        self._silence = SilenceWatch(silence_s=settings.silence_s, period_s=self._look_s, now_s=time.monotonic())

    @property
    def _look_s(self) -> float:
        return self._settings.silence_s / _LOOKS_PER_SILENCE

    @classmethod
    async def open(
        cls,
        channel: grpc.aio.Channel,
        settings: SessionSettings,
        address: str = "",
        connect: Connect | None = None,
        *,
        num_workers: int = 1,
    ) -> "WorkerSession":
        """Exchange HELLOs. Raises ProtocolError, grpc.aio.AioRpcError, TimeoutError or DirectFailed.

        `address`, `connect`: the worker's, and how to open a connection to its direct port; None: stay with gRPC.
        `num_workers`: that this router knows now, by which it asks for load reports.
        """
        call = WorkerStub(channel).Session(metadata=tuple(settings.metadata))  # type: ignore[no-untyped-call]  # generated
        can_move = connect is not None
        async with asyncio.timeout(settings.hello_timeout_s):
            period_s = choose_load_period(num_workers, settings.silence_s)
            await call.write(
                hello_to_pb(
                    settings.incarnation, reads_redis=settings.reads_redis, direct=can_move, load_period_s=period_s
                )
            )
            first = await call.read()
        if first is grpc.aio.EOF:
            raise ProtocolError(f"the stream ended before hello: {await call.details()}")
        info = hello_from_pb(first)
        if connect is None or not info.is_direct:
            return cls(GrpcCarrier(call), info, settings)
        host = address.rpartition(":")[0].strip("[]")
        target = join(host, first.hello.direct_port)
        ticket, timeout_s = first.hello.direct_ticket, settings.hello_timeout_s
        try:
            carrier = await DirectCarrier.open(connect, target, ticket, call, timeout_s=timeout_s)
        except DirectFailed:
            call.cancel()
            raise
        return cls(carrier, info, settings)

    def close(self) -> None:
        """End a session that no one conversed in."""
        self._carrier.close()

    async def converse(self, listener: SessionListener) -> str:
        """Carry messages both ways until the stream ends; returns why it did.

        Raises WorkerRejected at once when the listener rejects the worker.
        """
        reason = CLOSED_HERE
        try:
            listener.joined(self.info, self)
        except BaseException:
            self.close()
            raise
        try:
            self._send(end_earlier_sessions_to_pb())
            if self._settings.new_native_streams is not None:
                self._native = self._settings.new_native_streams()
            async with asyncio.TaskGroup() as tasks:
                ends = (tasks.create_task(self._carry(listener)), tasks.create_task(self._watch()))
                done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                reason = done.pop().result()
                for task in ends:
                    task.cancel()
        finally:
            self._end(listener, reason)
        return reason

    def submit(self, order: SubmitOrder, reader: AttemptReader) -> None:
        self._require_room()
        handle = self._new_handle()
        message = submit_to_pb(order, handle, self.info.protocol_version)
        former = self._begin(order.request_id, order.attempt, handle, reader)
        self._queue(message)
        self._cancel_former(order.request_id, former)

    def score_prompt(self, order: PromptScoringOrder, deliver: DeliverScores) -> None:
        self._require_room()
        message = score_prompt_to_pb(order)
        self._scorings[order.request_id] = _Scoring(number=order.attempt, deliver=deliver)
        self._send(message)

    def adopt(self, request_id: RequestId, attempt: int, *, num_shown: int, reader: AttemptReader) -> None:
        self._require_room()
        handle = self._new_handle()
        message = take_over_to_pb(request_id, attempt, num_shown, handle)
        former = self._begin(request_id, attempt, handle, reader)
        self._send(message)
        self._cancel_former(request_id, former)

    def reroute(self, request_id: RequestId, attempt: int, prefill: PrefillRoute | None) -> None:
        if self._attempt(request_id, attempt) is not None:
            self._send(reroute_to_pb(request_id, attempt, prefill))

    def cancel(self, request_id: RequestId, attempt: int) -> None:
        if self._attempt(request_id, attempt) is not None:
            self._forget(request_id)
        elif self._scoring_of(request_id, attempt) is not None:
            del self._scorings[request_id]
        else:
            return
        self._queue(cancel_to_pb(request_id, attempt))

    def migrate(self, share: MigrationPlan, *, within_s: float, prefill_tokens_per_s: float) -> None:
        self._send(fetch_cache_to_pb(share, within_s=within_s, prefill_tokens_per_s=prefill_tokens_per_s))

    def end_migration(self) -> None:
        self._send(migration_ended_to_pb())

    def pin(self, order: PinOrder) -> None:
        self._send_pin(order.key, pin_to_pb(order))

    def unpin(self, key: PinKey) -> None:
        self._send_pin(key, unpin_to_pb(key))

    def resync(self) -> None:
        self._send(resync_to_pb())

    def _require_room(self) -> None:
        if self._ended:
            raise Unavailable(f"worker {self.info.key.worker_id} has left")
        if len(self._outgoing) >= self._settings.max_queued_submits:
            raise Unavailable(f"the connection to worker {self.info.key.worker_id} is too slow")

    def _new_handle(self) -> int:
        self._num_handles += 1
        return self._num_handles

    def _begin(self, request_id: RequestId, number: int, handle: int, reader: AttemptReader) -> int | None:
        """Register an attempt; return the number of the earlier one at the same choice whose place it takes, if any."""
        former = self._attempts.get(request_id)
        self._forget(request_id)
        self._attempts[request_id] = _Attempt(number=number, handle=handle, reader=reader)
        self._readers[handle] = reader
        return None if former is None else former.number

    def _cancel_former(self, request_id: RequestId, number: int | None) -> None:
        """Cancel the attempt that another has taken the place of. One that the worker has passed on to the other no
        longer has this number there.
        """
        if number is not None:
            self._queue(cancel_to_pb(request_id, number))

    def _forget(self, request_id: RequestId) -> None:
        if (attempt := self._attempts.pop(request_id, None)) is not None:
            # First: what hears of the tokens may end the attempt as well.
            del self._readers[attempt.handle]
            self._take_back(attempt.handle)

    def _take_back(self, handle: int) -> None:
        """Have the attempt's reader know of all tokens so far, and get the next one."""
        if self._native is not None:
            self._native.close(handle)

    def _attempt(self, request_id: str, number: int) -> _Attempt | None:
        """Return the live attempt; None for one that has ended or been superseded."""
        attempt = self._attempts.get(RequestId(request_id))
        return attempt if attempt is not None and attempt.number == number else None

    def _scoring_of(self, request_id: str, number: int) -> _Scoring | None:
        """Return a live prompt scoring, as `_attempt` does."""
        scoring = self._scorings.get(RequestId(request_id))
        return scoring if scoring is not None and scoring.number == number else None

    def _send(self, message: pb.RouterMessage) -> None:
        """Queue a message unless the worker is too old for it."""
        if self._dialect.has(message.WhichOneof("kind")):
            self._queue(message)

    def _queue(self, message: pb.RouterMessage) -> None:
        self._outgoing.append(message)
        self._carrier.wake()

    def _send_pin(self, key: PinKey, message: pb.RouterMessage) -> None:
        if not self._ended and self._dialect.has(message.WhichOneof("kind")):
            self._pins.add(key, message)
            self._carrier.wake()

    def _next_order(self) -> pb.RouterMessage | None:
        """Return the next message to send: submits that arrive meanwhile go before the pins that wait."""
        if self._outgoing:
            return self._outgoing.popleft()
        return self._pins.pop_first() if self._pins else None

    async def _carry(self, listener: SessionListener) -> str:
        def on_message(message: pb.WorkerMessage) -> None:
            self._silence.on_message(time.monotonic())
            self._on_message(message, listener)

        if reason := await self._carrier.run(self._next_order, on_message):
            return reason
        if self._drain_reason is not None:
            return f"the worker has drained: {self._drain_reason}"
        return "the worker closed the session without announcing a drain"

    async def _watch(self) -> str:
        while True:
            await asyncio.sleep(self._look_s)
            if self._silence.is_silent(time.monotonic()):
                return f"silent for {self._settings.silence_s:g} s"

    def _on_message(self, message: pb.WorkerMessage, listener: SessionListener) -> None:
        key = self.info.key
        match message.WhichOneof("kind"):
            case "tokens":
                self._on_step(message.tokens, listener)
            case "load":
                listener.load_changed(key, load_from_pb(message.load))
            case "kv_events":
                listener.prefix_changed(key, prefix_change_from_pb(message.kv_events))
            case "refused":
                self._on_refusal(message.refused)
            case "prompt_scores":
                self._on_scores(message.prompt_scores)
            case "transfer_failed":
                failed = message.transfer_failed
                if (attempt := self._attempt(failed.request_id, failed.attempt)) is not None:
                    self._take_back(attempt.handle)
                    attempt.reader.on_event(transfer_failed_from_pb(failed))
            case "draining":
                self._drain_reason = message.draining.reason
                listener.draining(key, message.draining.reason)
            case "cache_offer":
                listener.cache_offered(key, cache_offer_from_pb(message.cache_offer))
            case "cache_fetched":
                listener.migration_ended(key, migration_source_from_pb(message.cache_fetched))
            case "pin_result":
                listener.pin_reported(key, result_from_pb(message.pin_result))
            case other:
                raise ProtocolError(f"unexpected {other or 'unknown message'}")

    def _on_step(self, step: pb.StepTokens, listener: SessionListener) -> None:
        deltas, handles = step.deltas, step.handles
        has_tokens = bool(handles)
        for delta in deltas:
            has_tokens = has_tokens or bool(delta.token_ids)
        if has_tokens:
            listener.answered(self.info.key)
        if handles:
            self._on_columns(handles, step.indexes, step.token_ids)
        for delta in deltas:
            self._on_tokens(delta)
        for handoff in step.handoffs:
            listener.handoff_committed(self.info.key, handoff_from_pb(handoff))

    def _on_columns(self, handles: Sequence[int], indexes: Sequence[int], token_ids: Sequence[int]) -> None:
        if not len(handles) == len(indexes) == len(token_ids):
            raise ProtocolError(f"columns of {len(handles)} handles, {len(indexes)} indexes, {len(token_ids)} tokens")
        if self._native is not None:
            self._write_columns(self._native, handles, indexes, token_ids)
            return
        reader_of = self._readers.get
        for handle, index, token_id in zip(handles, indexes, token_ids, strict=True):
            if (reader := reader_of(handle)) is not None:
                reader.on_token(index, token_id)

    def _write_columns(
        self, native: NativeStreams, handles: Sequence[int], indexes: Sequence[int], token_ids: Sequence[int]
    ) -> None:
        """Write tokens natively where their readers have offered that, and let readers have the others."""
        for position in native.write(handles, indexes, token_ids) if native else range(len(handles)):
            handle, index = handles[position], indexes[position]
            if (reader := self._readers.get(handle)) is None:
                continue
            native.close(handle)
            reader.on_token(index, token_ids[position])
            # It may have ended its attempt.
            if native.has_room and handle in self._readers and (offer := reader.offer(index + 1)) is not None:
                native.open(handle, offer)

    def _on_tokens(self, delta: pb.TokenDelta) -> None:
        attempt = self._attempts.get(RequestId(delta.request_id))
        if attempt is None or attempt.number != delta.attempt:
            return
        self._take_back(attempt.handle)
        arrived = tokens_from_pb(delta)
        if arrived.finished is not None:
            self._forget(RequestId(delta.request_id))
        attempt.reader.on_event(arrived)

    def _on_refusal(self, refused: pb.Refused) -> None:
        request_id = RequestId(refused.request_id)
        if (attempt := self._attempt(request_id, refused.attempt)) is not None:
            self._forget(request_id)
            attempt.reader.on_event(refused_from_pb(refused))
        elif (scoring := self._scoring_of(request_id, refused.attempt)) is not None:
            del self._scorings[request_id]
            scoring.deliver(refused_from_pb(refused))

    def _on_scores(self, message: pb.PromptScores) -> None:
        if (scoring := self._scoring_of(message.request_id, message.attempt)) is None:
            return
        part = scores_part_from_pb(message)
        if part.times is not None:
            del self._scorings[RequestId(message.request_id)]
        scoring.deliver(part)

    def _end(self, listener: SessionListener, reason: str) -> None:
        self._ended = True
        self._outgoing.clear()
        self._pins.clear()
        self._carrier.close()
        # The registry first, so that attempts that learn of the loss do not choose the same worker again.
        listener.left(self.info.key, reason)
        try:
            if self._native is not None:
                self._native.close_all()
        finally:
            attempts, self._attempts = self._attempts, {}
            self._readers.clear()
            for attempt in attempts.values():
                attempt.reader.on_event(WorkerLost(reason=reason))
            scorings, self._scorings = self._scorings, {}
            for scoring in scorings.values():
                scoring.deliver(WorkerLost(reason=reason))
