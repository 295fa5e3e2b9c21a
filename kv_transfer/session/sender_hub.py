"""The prefill worker's hand-offs: serves the links of decode workers and runs the pure senders.

Life of a hand-off: PREFILL → owner.submit → `scheduled` → OFFER → RESERVE → each `progress` is written while the next
chunk computes → `first_token` → `finished` → SEAL → COMMIT_ACK → owner.release. All methods are for the event loop's
thread, and the owner is called on it. News about hand-offs that have ended is ignored.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from kv_transfer.layout.chunk_plan import HandoffSize
from kv_transfer.protocol import guards
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
)
from kv_transfer.protocol.messages import (
    Abort,
    Drained,
    Failure,
    FirstToken,
    HandoffEnvelope,
    Prefill,
    Reject,
    Renew,
    TransferKey,
)
from kv_transfer.protocol.sender import Sender, SenderPlan
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.states import LIVE
from kv_transfer.regions.interface import SendingRegion
from kv_transfer.session.attempt_trace import begin_trace
from kv_transfer.session.link import renewals
from kv_transfer.session.peer import LocalWorker
from kv_transfer.session.reaper import Reaper
from kv_transfer.session.sender_attempt import SenderAttempt, SenderContext, SenderOwner
from kv_transfer.session.sender_link import SenderLink
from kv_transfer.session.stats import TransferStats
from kv_transfer.transports.catalogue import chunk_bytes_over
from tandem.errors import InvalidRequest, InvariantError, Overloaded, ServingError, Unavailable
from tandem.telemetry.tracing import NoTracer, Tracer
from tandem.v1.handoff_pb2_grpc import HandoffServicer, add_HandoffServicer_to_server
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash, BlockId, TransferId
from tandem.values.outputs import NO_CACHED_TOKENS, CachedTokens, PhaseTimes, SampledToken


class NewestAttempts:
    """The newest attempt of each recent hand-off, so that a replayed PREFILL starts nothing.

    A hand-off is remembered for at least `REMEMBERED_S`, or until `LEAST_REMEMBERED` more have begun if that is sooner.
    Forgets in two generations, which need no order among their members. Pure.
    """

    REMEMBERED_S = 300.0
    """A decode worker gives a hand-off up within seconds of silence, so that no message of it is as late as this. A
    later one would cost a prompt's computation, but no block: the receiver refuses what it did not ask for."""
    LEAST_REMEMBERED = 8192

    def __init__(self) -> None:
        self._recent: dict[TransferId, int] = {}
        self._older: dict[TransferId, int] = {}
        self._since_s = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._older)

    def get(self, transfer_id: TransferId) -> int | None:
        """Return the newest attempt of a hand-off; None for one that is not remembered."""
        return self._recent.get(transfer_id, self._older.get(transfer_id))

    def add(self, key: TransferKey, now_s: float) -> None:
        """Remember an attempt newer than those before it."""
        if now_s - self._since_s >= self.REMEMBERED_S or len(self._recent) >= self.LEAST_REMEMBERED:
            self._older, self._recent, self._since_s = self._recent, {}, now_s
        self._recent[key.transfer_id] = key.attempt


class SenderHub:
    """All hand-offs of a prefill worker; an async context manager, entered before its gRPC server starts and left after
    it stopped."""

    def __init__(
        self,
        local: LocalWorker,
        *,
        owner: SenderOwner,
        regions: Sequence[SendingRegion],
        settings: TransferSettings,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self.stats = TransferStats()
        self.on_unwanted: Callable[[TransferId], None] = lambda _: None
        """Called with each hand-off that is given up before `owner.submit` has returned."""
        self._tracer = tracer or NoTracer()
        self._local = local
        self._regions = regions
        self._settings = settings
        self._reaper = Reaper(self._sweep, period_s=settings.sweep_s, clock=clock)
        self._group = asyncio.TaskGroup()
        self._stack = AsyncExitStack()
        self._closing_writers: set[asyncio.Future[None]] = set()
        self._links: dict[SenderLink, asyncio.Task[Any] | None] = {}
        self._exited = False
        self._attempts: dict[TransferId, SenderAttempt] = {}
        self._newest = NewestAttempts()
        self._empty = asyncio.Event()
        self._empty.set()
        self._no_prompts = asyncio.Event()
        self._no_prompts.set()
        self._num_prompts = 0
        self._draining, self._lends = False, True
        self._renewed_s = 0.0
        self._context = SenderContext(
            owner=owner,
            pool_blocks=local.num_blocks,
            stats=self.stats,
            now=self._reaper.now,
            spawn=self._spawn,
            closed=self._closed,
            on_unwanted=lambda transfer_id: self.on_unwanted(transfer_id),  # noqa: PLW0108 - set later
        )

    def register(self, server: Any) -> None:
        """Add the hand-off service to a grpc.aio server (see tandem.rpc.cluster_grpc.make_server)."""
        add_HandoffServicer_to_server(_Servicer(self), server)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self._close_writers)
        await self._stack.enter_async_context(self._group)
        self._stack.push_async_exit(self._leave)
        self._spawn(self._reaper.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort what is left and close every link; takes at most a few leases."""
        await self._stack.__aexit__(kind, error, trace)

    async def _leave(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._draining, self._lends = True, False
        try:
            for attempt in list(self._attempts.values()):
                attempt.on_event(HandoffCancelled(reason="prefill worker stops"))
            for link in list(self._links):
                link.close()
            # After an error the group cancels the remaining tasks: there is nothing to wait for.
            if error is None:
                await self._settle()
        finally:
            self._exited = True
            self._reaper.stop()

    async def _settle(self) -> None:
        """Wait up to one lease for attempts to end; abandon the rest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.lease_s):
                await self._empty.wait()
        self._exited = True
        for attempt in list(self._attempts.values()):
            attempt.abandon()
        if serving := [task for task in self._links.values() if task is not None]:
            await asyncio.wait(serving, timeout=self._settings.lease_s)

    async def _close_writers(self) -> None:
        if self._closing_writers:
            await asyncio.wait(self._closing_writers)

    async def finish_prompts(self) -> None:
        """Accept no new prompts and wait until the current ones have ended; fetches are still answered."""
        self._draining = True
        await self._no_prompts.wait()

    async def drain(self) -> None:
        """Accept no new work, lend nothing more, and wait until every hand-off has ended."""
        self._draining, self._lends = True, False
        await self._empty.wait()

    @property
    def num_transfers(self) -> int:
        return len(self._attempts)

    @property
    def num_pinned_blocks(self) -> int:
        """Number of source blocks kept for peers."""
        return sum(attempt.machine.num_pinned_blocks for attempt in self._attempts.values())

    # News from the engine

    def scheduled(self, transfer_id: TransferId, queue_s: float, tail_hash: BlockHash | None = None) -> None:
        """Report that the prompt has left the queue; `tail_hash` names its last full hash block."""
        self._post_event(transfer_id, PrefillScheduled(queue_s=queue_s, tail_hash=tail_hash))

    def answer_fetch(self, transfer_id: TransferId, names: Sequence[BlockHash], block_ids: Sequence[BlockId]) -> None:
        """Answer a fetch with the prefix's full blocks that are held here, and the names of their hash blocks.

        The blocks stay until `owner.release`, as computed ones do.
        """
        attempt = self._attempts.get(transfer_id)
        if attempt is None:
            return
        whole = attempt.machine.plan.whole_tokens
        num_tokens = len(block_ids) * self._local.layout.block_size // whole * whole
        tail_hash = names[num_tokens // HASH_BLOCK_TOKENS - 1] if num_tokens else None
        attempt.on_event(PrefillScheduled(queue_s=0.0, tail_hash=tail_hash, num_tokens=num_tokens))
        attempt.on_event(KVComputed(num_computed_tokens=num_tokens, blocks=tuple(block_ids)))
        attempt.on_event(PrefillFinished(cached_tokens=num_tokens, times=PhaseTimes(), tail_hash=tail_hash))

    def progress(
        self,
        transfer_id: TransferId,
        num_computed_tokens: int,
        block_ids: Sequence[BlockId],
        *,
        windows: Sequence[Sequence[BlockId]] = (),
        coming_tokens: int = 0,
        num_layers: int = 0,
    ) -> None:
        """Report that the request's blocks (the whole table) hold KV of that many tokens; they stay until
        `owner.release`. `windows`: see KVComputed.

        While a step is running that brings this to `coming_tokens`, the additional tokens are there in the first
        `num_layers` layers.
        """
        progress = KVComputed(
            num_computed_tokens=num_computed_tokens,
            blocks=tuple(block_ids),
            windows=tuple(map(tuple, windows)),
            coming_tokens=coming_tokens,
            num_layers=num_layers,
        )
        self._post_event(transfer_id, progress)

    def first_token(
        self, transfer_id: TransferId, token: SampledToken, cached_tokens: int, cached: CachedTokens = NO_CACHED_TOKENS
    ) -> None:
        """Send the sampled first token at once. `cached`: the cached tokens by source."""
        first_token = FirstToken(token=token, cached_tokens=cached_tokens, cached=cached)
        self._post_event(transfer_id, FirstTokenSampled(first_token=first_token))

    def finished(
        self,
        transfer_id: TransferId,
        block_ids: Sequence[BlockId],
        *,
        windows: Sequence[Sequence[BlockId]] = (),
        cached_tokens: int,
        times: PhaseTimes,
        tail_hash: BlockHash | None = None,
    ) -> None:
        """Report that the request's blocks hold all its KV; `tail_hash` names the last full hash block, as computed
        here."""
        attempt = self._attempts.get(transfer_id)
        if attempt is not None:
            self.progress(transfer_id, len(attempt.machine.plan.job.token_ids), block_ids, windows=windows)
            attempt.on_event(PrefillFinished(cached_tokens=cached_tokens, times=times, tail_hash=tail_hash))

    def failed(self, transfer_id: TransferId, error: ServingError) -> None:
        """Report that the engine gave the request up."""
        self._post_event(transfer_id, PrefillFailed(failure=Failure.from_error(error)))

    def _post_event(self, transfer_id: TransferId, event: SenderEvent) -> None:
        attempt = self._attempts.get(transfer_id)
        if attempt is not None:
            attempt.on_event(event)

    # Links

    async def serve(self, stream: Any) -> None:
        """Run one link from start to end; called by the servicer."""
        link = SenderLink(stream, local=self._local, regions=self._regions, settings=self._settings)
        if self._exited:
            return
        self._links[link] = asyncio.current_task()
        try:
            await link.run(
                deliver=lambda envelope: self._deliver(link, envelope),
                on_malformed=lambda key, reason: self._on_malformed(link, key, reason),
            )
        except InvariantError as error:
            # gRPC would only log it; the group ends the process.
            self._spawn(_fail(error))
        finally:
            # The client may be gone, which cancels this task: nothing here may wait.
            del self._links[link]
            for attempt in list(self._attempts.values()):
                if attempt.peer is link:
                    attempt.on_event(LinkLost(reason="link lost"))
            if link.writers:
                # Not in the group, which accepts no more tasks once one of them has failed.
                closing = asyncio.get_running_loop().run_in_executor(None, link.close_writers)
                self._closing_writers.add(closing)
                closing.add_done_callback(self._closing_writers.discard)

    def _deliver(self, link: SenderLink, envelope: HandoffEnvelope) -> None:
        body, key = envelope.body, envelope.key
        if guards.stale_incarnation(envelope, link.peer) or guards.misdirected(envelope, self._local.incarnation):
            self.stats.bad_messages += 1
        elif isinstance(body, Renew):
            for transfer_id in body.transfer_ids:
                attempt = self._attempts.get(transfer_id)
                if attempt is not None and attempt.peer is link:
                    attempt.machine.renew(self._reaper.now())
        elif key is not None and isinstance(body, Prefill):
            self._prefill(link, key, body)
        elif key is not None:
            attempt = self._attempts.get(key.transfer_id)
            if attempt is not None and attempt.key == key:
                attempt.on_message(envelope)
            elif isinstance(body, Abort):
                # This process has no such attempt, so nothing of it is in flight from here.
                link.send(key, Drained())

    def _on_malformed(self, link: SenderLink, key: TransferKey | None, reason: str) -> None:
        self.stats.bad_messages += 1
        attempt = self._attempts.get(key.transfer_id) if key is not None else None
        if attempt is not None and attempt.key == key and attempt.peer is link:
            attempt.on_event(PeerFaulted(reason=reason))
        elif key is not None:
            failure = Failure(kind=InvalidRequest, message=reason)
            link.send(key, Reject(failure=failure))

    def _prefill(self, link: SenderLink, key: TransferKey, body: Prefill) -> None:
        if guards.superseded(key.attempt, self._newest.get(key.transfer_id)):
            return
        older = self._attempts.get(key.transfer_id)
        if older is not None:
            # It may have waited in the queue for longer than it is remembered.
            if guards.superseded(key.attempt, older.key.attempt):
                return
            older.on_event(HandoffCancelled(reason="superseded by a newer attempt"))
        if refusal := self._refusal(link, key, body):
            link.send(key, Reject(failure=Failure.from_error(refusal)))
            return
        now = self._reaper.now()
        self._newest.add(key, now)
        if (trace := begin_trace(self._tracer, "tandem.send", key, body.job)) is not None:
            body = replace(body, job=replace(body.job, trace=trace.context))
        attempt = SenderAttempt(Sender(self._plan(link, key, body), now), link, self._context, trace)
        self._attempts[key.transfer_id] = attempt
        self.stats.live = len(self._attempts)
        self._empty.clear()
        if not body.job.fetch:
            self._num_prompts += 1
            self._no_prompts.clear()
        attempt.start()

    def _refusal(self, link: SenderLink, key: TransferKey, body: Prefill) -> ServingError | None:
        if self._draining and not (body.job.fetch and self._lends):
            return Unavailable("prefill worker is draining")
        if key.transfer_id in self._attempts:
            return Unavailable("an earlier attempt is still draining", retry_after_s=0.1)
        if len(self._attempts) >= self._settings.max_transfers:
            return Overloaded(f"{len(self._attempts)} hand-offs are under way", retry_after_s=1.0)
        if body.job.held_tokens % link.pairings[0].destination.block_size:
            return InvalidRequest("held_tokens must be a multiple of the block size", param="held_tokens")
        return None

    def _plan(self, link: SenderLink, key: TransferKey, body: Prefill) -> SenderPlan:
        pairings, layout, job = link.pairings, self._local.layout, body.job
        return SenderPlan(
            key=key,
            own=self._local.incarnation,
            peer=link.peer,
            job=job,
            block_size=layout.block_size,
            unit_tokens=pairings[0].mapping.unit_tokens,
            whole_tokens=max(layout.block_size, pairings[0].destination.block_size),
            lanes=tuple(
                HandoffSize.of_lane(
                    pairing.mapping.lane,
                    layout,
                    num_tokens=job.num_tokens,
                    held_tokens=job.held_tokens,
                    unit_tokens=pairing.mapping.unit_tokens,
                    unit_layer_bytes=pairing.unit_layer_bytes,
                )
                for pairing in pairings
            ),
            lease_s=min(body.lease_s, self._settings.lease_s),
            stall_s=self._settings.stall_s,
            queue_s=self._settings.queue_s,
            chunk_bytes=self._settings.chunk_bytes or chunk_bytes_over(link.transports, to_device=link.to_device),
            write_window=self._settings.write_window,
            max_rewrites=self._settings.max_rewrites,
        )

    def _closed(self, attempt: SenderAttempt) -> None:
        del self._attempts[attempt.key.transfer_id]
        self.stats.live = len(self._attempts)
        self._num_prompts -= not attempt.machine.plan.job.fetch
        if not self._num_prompts:
            self._no_prompts.set()
        if not self._attempts:
            self._empty.set()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return self._group.create_task(coroutine)

    def _sweep(self, now: float) -> None:
        for attempt in list(self._attempts.values()):
            attempt.on_timer(now)
        if now - self._renewed_s >= self._settings.renew_s:
            self._renewed_s = now
            for link in self._links:
                live = [a.key for a in self._attempts.values() if a.peer is link and a.machine.state in LIVE]
                for renewal in renewals(live):
                    link.send(None, renewal)


async def _fail(error: InvariantError) -> None:
    raise error


class _Servicer(HandoffServicer):
    def __init__(self, hub: SenderHub) -> None:
        self._hub = hub

    async def Connect(self, _requests: Any, context: Any) -> None:
        """Serve one link for as long as it lasts."""
        await self._hub.serve(context)
