"""The decode worker's hand-offs: runs the pure receivers, their links and their timers.

Life of a hand-off: `start` → link up → PREFILL → OFFER → owner.bind → RESERVE → chunks verified → owner.commit. When an
attempt fails, `owner.failed` hands over what has landed; then `reroute` starts the next attempt or `cancel` ends
everything. All methods are for the event loop's thread, and the owner is called on it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self

from kv_transfer.protocol.events import HandoffCancelled, LinkLost, PeerFaulted, Quiet
from kv_transfer.protocol.handoff_retry import HandoffRetry
from kv_transfer.protocol.messages import (
    Abort,
    Chunk,
    Failure,
    FirstToken,
    HandoffEnvelope,
    Hello,
    Offer,
    PrefillJob,
    Renew,
    Seal,
    TransferKey,
)
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.states import LIVE
from kv_transfer.regions.interface import ReceivingRegion
from kv_transfer.session.attempt_trace import begin_trace
from kv_transfer.session.link import renewals
from kv_transfer.session.peer import LocalWorker, Route
from kv_transfer.session.peer_rates import PeerRates
from kv_transfer.session.reaper import Reaper
from kv_transfer.session.receiver_attempt import ReceiverAttempt, ReceiverContext, ReceiverOwner
from kv_transfer.session.receiver_link import Dialer, ReceiverLink, make_hello
from kv_transfer.session.stats import TransferStats
from tandem.errors import InvariantError, Overloaded, TransferError
from tandem.telemetry.tracing import NoTracer, Tracer
from tandem.values.ids import BlockId, Incarnation, TransferId
from tandem.values.prefix_holder import PrefixHolder


class ReceiverHub:
    """All hand-offs of a decode worker; an async context manager, entered before `start`, left after `drain`."""

    def __init__(
        self,
        local: LocalWorker,
        *,
        owner: ReceiverOwner,
        regions: Sequence[ReceivingRegion],
        dialer: Dialer,
        settings: TransferSettings,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self.stats = TransferStats()
        self._rates = PeerRates()
        self._tracer = tracer or NoTracer()
        self._local = local
        self._owner = owner
        self._regions = regions
        self._dialer = dialer
        self._settings = settings
        self._reaper = Reaper(self._sweep, period_s=settings.sweep_s, clock=clock)
        self._group = asyncio.TaskGroup()
        self._stack = AsyncExitStack()
        self._links: dict[str, ReceiverLink] = {}
        self._link_tasks: set[asyncio.Task[None]] = set()
        self._retries: dict[TransferId, HandoffRetry] = {}
        self._attempts: dict[TransferKey, ReceiverAttempt] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._renewed_s = 0.0
        self._context = ReceiverContext(
            owner=owner,
            regions=regions,
            stats=self.stats,
            rates=self._rates,
            now=self._reaper.now,
            spawn=self._spawn,
        )

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for region in self._regions:
            region.listen_quiet(partial(self._listen_quiet, loop))
        self._stack.callback(self._close_ends)
        await self._stack.enter_async_context(self._group)
        self._stack.push_async_exit(self._leave)
        self._spawn(self._reaper.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is left, and close every link and every receiving end."""
        await self._stack.__aexit__(kind, error, trace)

    async def _leave(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        try:
            for transfer_id in list(self._retries):
                self.cancel(transfer_id, "decode worker stops")
            for link in self._links.values():
                link.close()
            # A frozen peer does not read what a link still has queued, so the wait is bounded. After an error the group
            # cancels the links itself.
            if error is None and self._link_tasks:
                _done, late = await asyncio.wait(self._link_tasks, timeout=self._settings.lease_s)
                for task in late:
                    task.cancel()
        finally:
            self._reaper.stop()

    def _close_ends(self) -> None:
        for region in self._regions:
            region.close()

    def start(self, job: PrefillJob, route: Route) -> None:
        """Request a prompt's KV from the route's prefill worker. Raises Overloaded, or TransferError for a known id."""
        if len(self._retries) >= self._settings.max_transfers:
            raise Overloaded(f"{len(self._retries)} hand-offs are under way", retry_after_s=1.0)
        if job.transfer_id in self._retries or job.held_tokens % self._local.layout.block_size:
            raise TransferError("transfer_id must be new and held_tokens a multiple of the block size")
        own, layout = self._local.incarnation, self._local.layout
        retry = HandoffRetry(job, own=own, layout=layout, settings=self._settings)
        self._begin(retry, route)
        self._retries[job.transfer_id] = retry

    def reroute(self, transfer_id: TransferId, route: Route, holder: PrefixHolder | None = None) -> None:
        """Start another attempt, which keeps what has landed. Raises TransferError when the hand-off is over, or still
        has one.

        `holder`: a worker believed to hold more of the prefix than the route's.
        """
        retry = self._retries.get(transfer_id)
        if retry is None:
            raise TransferError("hand-off is over")
        retry.job = replace(retry.job, holder=holder)
        self._begin(retry, route)

    def give_up(self, transfer_id: TransferId, reason: str) -> None:
        """Fail the current attempt, if there is one, as if the peer had failed: the owner gets what has landed."""
        retry = self._retries.get(transfer_id)
        attempt = None if retry is None else self._current(retry)
        if attempt is not None:
            attempt.on_event(PeerFaulted(reason=reason))

    def cancel(self, transfer_id: TransferId, reason: str = "cancelled") -> None:
        """End a hand-off, known or not; the prefill worker is told at once."""
        retry = self._retries.pop(transfer_id, None)
        if retry is None:
            return
        attempt = self._current(retry)
        retry.end()
        if attempt is not None:
            attempt.on_event(HandoffCancelled(reason=reason))

    async def drain(self) -> None:
        """Wait until no hand-off is left, quarantined ones included."""
        await self._empty.wait()

    @property
    def num_transfers(self) -> int:
        """Hand-offs that may still commit."""
        return len(self._retries)

    @property
    def num_leased_blocks(self) -> int:
        """Destinations that peers may write, quarantined ones included."""
        return sum(attempt.machine.num_leased_blocks for attempt in self._attempts.values())

    def bytes_per_s(self, address: str, incarnation: Incarnation) -> float:
        """Expected rate of the peer, as measured for it or for its link's transport; 0 when unknown."""
        link = self._links.get(address)
        transport = "" if link is None else link.transport
        return self._rates.bytes_per_s(address, incarnation, transport, now=self._reaper.now())

    def _begin(self, retry: HandoffRetry, route: Route) -> None:
        now = self._reaper.now()
        self._rates.on_request(route.address, route.incarnation, now)
        machine = retry.begin(route.attempt, route.incarnation, now)
        trace = begin_trace(self._tracer, "tandem.handoff", machine.plan.key, machine.plan.job)
        attempt = ReceiverAttempt(machine, self._link(route.address), self._context, self, trace)
        self._attempts[attempt.key] = attempt
        self.stats.live = len(self._attempts)
        self._empty.clear()
        if attempt.link.peer is None:
            attempt.link.dial_now()
        else:
            asyncio.get_running_loop().call_soon(self._start, attempt)

    def _start(self, attempt: ReceiverAttempt) -> None:
        if attempt.link.peer is None:
            return
        if attempt.link.peer != attempt.machine.plan.peer:
            attempt.on_event(LinkLost(reason="the prefill worker has restarted"))
        elif not attempt.link.can_carry(attempt.machine.plan.job):
            attempt.on_event(PeerFaulted(reason="the prefill worker is too old for adapters"))
        elif attempt.machine.state in LIVE:
            attempt.start()

    def _link(self, address: str) -> ReceiverLink:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = ReceiverLink(
                address,
                local=self._local,
                make_hello=self._hello,
                dialer=self._dialer,
                user=self,
                settings=self._settings,
            )
            task = self._spawn(self._run_link(link))
            self._link_tasks.add(task)
            task.add_done_callback(self._link_tasks.discard)
        return link

    async def _hello(self) -> Hello:
        offers, *more = [await region.offers() for region in self._regions]
        return make_hello(self._local, offers, wire_dtype=self._settings.wire_dtype, more_regions=more)

    async def _run_link(self, link: ReceiverLink) -> None:
        await link.run()
        if self._links.get(link.address) is link:
            del self._links[link.address]
        self.link_down(link, "closed")

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        return self._group.create_task(coroutine)

    def _on(self, link: ReceiverLink) -> list[ReceiverAttempt]:
        return [attempt for attempt in self._attempts.values() if attempt.link is link]

    def _current(self, retry: HandoffRetry) -> ReceiverAttempt | None:
        if retry.newest_attempt is None:
            return None
        key = TransferKey(transfer_id=retry.job.transfer_id, attempt=retry.newest_attempt)
        return self._attempts.get(key)

    # LinkUser

    def link_up(self, link: ReceiverLink) -> None:
        """Start the hand-offs that waited for the link."""
        for attempt in self._on(link):
            self._start(attempt)

    def link_down(self, link: ReceiverLink, reason: str) -> None:
        """Fail every hand-off on the link; those that failed earlier keep waiting for proof of a quiet writer."""
        for attempt in self._on(link):
            attempt.on_event(LinkLost(reason=reason))

    def link_needed(self, link: ReceiverLink) -> bool:
        """Whether an attempt, failed or not, still uses this link."""
        return bool(self._on(link))

    def deliver(self, link: ReceiverLink, envelope: HandoffEnvelope) -> None:
        """Deliver a message to its attempt, or tell the peer that there is none."""
        body = envelope.body
        if envelope.incarnation != link.peer or envelope.addressee != self._local.incarnation:
            self.stats.bad_messages += 1
        elif isinstance(body, Renew):
            renewed, now = frozenset(body.transfer_ids), self._reaper.now()
            for attempt in self._on(link):
                if attempt.key.transfer_id in renewed:
                    attempt.machine.renew(now)
        elif envelope.key is not None:
            attempt_of = self._attempts.get(envelope.key)
            if attempt_of is not None and attempt_of.link is link:
                attempt_of.on_message(envelope)
            elif isinstance(body, Offer | Chunk | Seal):
                link.send(envelope.key, Abort(reason="no such hand-off here"))

    def on_malformed(self, link: ReceiverLink, key: TransferKey | None, reason: str) -> None:
        """Fail the hand-off that a malformed message belongs to, and no other."""
        self.stats.bad_messages += 1
        attempt = self._attempts.get(key) if key is not None else None
        if attempt is not None and attempt.link is link:
            attempt.on_event(PeerFaulted(reason=reason))

    # AttemptUser

    def first_token(self, attempt: ReceiverAttempt, first_token: FirstToken) -> None:
        """Forward the first token, and make sure that no later attempt samples it again."""
        self._retry_of(attempt).first_token_known()
        self._owner.first_token(attempt.key.transfer_id, first_token)

    def failed(self, attempt: ReceiverAttempt, landed: tuple[BlockId, ...], failure: Failure) -> None:
        """Keep what landed under a lease and notify the owner."""
        self._retry_of(attempt).failed(len(landed), self._reaper.now())
        self._owner.failed(attempt.key.transfer_id, landed, failure.to_error())

    def committing(self, attempt: ReceiverAttempt) -> bool:
        """Rule out further attempts; False when a cancel came first."""
        retry = self._retries.pop(attempt.key.transfer_id, None)
        if retry is None:
            return False
        retry.end()
        return True

    def closed(self, attempt: ReceiverAttempt) -> None:
        del self._attempts[attempt.key]
        self.stats.live = len(self._attempts)
        if not self._attempts:
            self._empty.set()

    def _retry_of(self, attempt: ReceiverAttempt) -> HandoffRetry:
        retry = self._retries.get(attempt.key.transfer_id)
        if retry is None or retry.newest_attempt != attempt.key.attempt:
            raise InvariantError(f"{attempt.key} reported after its hand-off had moved on")
        return retry

    # Timers and proofs

    def _listen_quiet(self, loop: asyncio.AbstractEventLoop, key: TransferKey) -> None:
        loop.call_soon_threadsafe(self._on_quiet, key)

    def _on_quiet(self, key: TransferKey) -> None:
        attempt = self._attempts.get(replace(key, lane=0))
        if attempt is not None:
            attempt.on_event(Quiet(lane=key.lane))

    def _sweep(self, now: float) -> None:
        for attempt in list(self._attempts.values()):
            attempt.on_timer(now)
        for transfer_id, retry in list(self._retries.items()):
            if retry.expired(now):
                del self._retries[transfer_id]
                retry.end()
                self._owner.expired(transfer_id)
        if now - self._renewed_s >= self._settings.renew_s:
            self._renewed_s = now
            for link in self._links.values():
                for renewal in renewals(a.key for a in self._on(link) if a.machine.state in LIVE):
                    link.send(None, renewal)
