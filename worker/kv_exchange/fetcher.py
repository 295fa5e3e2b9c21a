"""Fetches prefixes from peers into this worker's cache, when that costs less than computing them.

Life of a fetch: hint → looked up here → priced → reservation → hand-off of what the peer holds → blocks in the prefix
index, where the scheduler finds them. If a fetch fails, what has landed is kept and the rest is computed: a fetch never
fails a request. It continues while a request waits for it, but no longer than computing would take.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from itertools import count
from typing import Any

from engine.scheduler.scheduler import Scheduler
from engine.types.request import Request
from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.events import BlocksBound
from kv_transfer.protocol.messages import FirstToken
from kv_transfer.session.receiver_hub import ReceiverHub
from tandem.errors import ServingError, TransferError
from tandem.telemetry.tracing import NoTracer, TraceContext, Tracer
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash, BlockId, RequestId, TransferId
from tandem.values.prefix_holder import PrefixHolder
from worker.decisions.destinations import Destinations
from worker.decisions.fetch_cost import FetchRates, compute_s, fetch_s, worth_fetching
from worker.engine_host import EngineHost
from worker.kv_exchange.fetch import Declined, FetchOrder, FetchStats, PrefixFetch, job_of, probe_of, route_to

_log = logging.getLogger(__name__)

_SHORTEST_WAIT_S = 0.5
"""Minimum time limit of a fetch: the peer may be in the middle of a step."""
_PATIENCE = 4.0
"""Time limit of a fetch, as a multiple of its expected time."""
_MAX_FETCHES = 8
"""Maximum number of concurrent fetches: each holds a reservation, for which hand-offs and prompts compete."""


class Fetcher:
    """The receiving side of fetches (a ReceiverOwner for them alone). On the event loop's thread."""

    def __init__(
        self,
        host: EngineHost,
        *,
        name: str,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        tracer: Tracer | None = None,
    ) -> None:
        """`name`: unique to this process; part of the ids of its fetches."""
        self.hub: ReceiverHub | None = None
        self.stats = FetchStats()
        """Counts of prompts' fetches; those of `prefetch` are counted by its caller."""
        self._host = host
        self._name = name
        self._spawn = spawn
        self._tracer = tracer or NoTracer()
        self._serial = count(1)
        self._fetches: dict[TransferId, PrefixFetch] = {}
        self._waiting: dict[RequestId, asyncio.Future[None]] = {}
        self._destinations = Destinations()

    def owns(self, transfer_id: TransferId) -> bool:
        """Whether this is the id of one of this worker's fetches, ended or not."""
        return transfer_id.startswith(f"fetch/{self._name}/")

    async def fetch(self, request: Request, holder: PrefixHolder, trace: TraceContext | None = None) -> int:
        """Fetch the part of the request's prefix that `holder` has and this worker lacks; returns the tokens gained.

        Never raises for a peer. The request is neither queued nor changed, except for the names of its blocks. `trace`:
        of the span that waits.
        """
        cancelled = self._waiting[request.request_id] = asyncio.get_running_loop().create_future()
        span = self._tracer.span("tandem.fetch", trace)
        try:
            gained = await self._fetch(request, holder, None if span is None else span.context, cancelled)
            if span is not None:
                span.set_attributes({"tandem.fetch.holder": holder.worker_id, "tandem.fetch.tokens": gained})
        finally:
            self._waiting.pop(request.request_id, None)
            if span is not None:
                span.end()
        return gained

    def abandon(self, request_id: RequestId) -> None:
        """Cancel a request's `fetch`; the transfer ends too, if no other request waits for it."""
        cancelled = self._waiting.get(request_id)
        if cancelled is not None and not cancelled.done():
            cancelled.set_result(None)

    async def prefetch(
        self,
        hash_root: BlockHash,
        names: Sequence[BlockHash],
        holder: PrefixHolder,
        *,
        prefill_tokens_per_s: float,
        spare_blocks: int,
    ) -> int | Declined:
        """Fetch a prefix for which no prompt waits; returns the blocks gained, or why it was not begun.

        Priced at `prefill_tokens_per_s`; leaves `spare_blocks` available. Never raises for a peer.
        """
        if self.hub is None or not names:
            return Declined.HELD
        if self._cannot_fetch:
            return Declined.COMPUTED
        rates = FetchRates(prefill_tokens_per_s=prefill_tokens_per_s, bytes_per_s=self._bytes_per_s(holder))
        order = self._make_order(hash_root, names, holder, rates, spare_blocks=spare_blocks)
        fetch = self._fetch_of_same_prefix(order.probe.block_hashes) or self._begin(order, FetchStats())
        num_tokens = await self._wait(fetch)
        return fetch.declined or num_tokens // self._host.parts.layout.block_size

    async def _fetch(
        self, request: Request, holder: PrefixHolder, trace: TraceContext | None, cancelled: "asyncio.Future[None]"
    ) -> int:
        num_tokens = min(holder.num_tokens, request.num_tokens - 1)
        if self.hub is None or num_tokens <= 0 or self._cannot_fetch:
            return 0
        rates = FetchRates(
            prefill_tokens_per_s=self._host.rates.prefill_tokens_per_s, bytes_per_s=self._bytes_per_s(holder)
        )
        self._host.parts.hasher.extend(request.hash_root, request.block_hashes, request.token_ids)
        names = request.block_hashes[: num_tokens // HASH_BLOCK_TOKENS]
        if (same := self._fetch_of_same_prefix(names)) is not None:
            await self._wait(same, rates, cancelled)  # the prefix is then found here as well
            if same.declined is None or cancelled.done():
                return 0
            same = self._fetch_of_same_prefix(names)  # declined by another request's rates: judge it once by this one's
        order = self._make_order(request.hash_root, names, holder, rates, trace=trace, asker=request.request_id)
        fetch = same or self._begin(order, self.stats)
        gained = await self._wait(fetch, rates, cancelled)
        if fetch.declined is not None:
            self.stats.declined += 1
            details = request.request_id, holder.worker_id, fetch.declined.value
            _log.debug("%s: not fetching from %s: %s", *details, extra=order.about)
        return 0 if fetch is same else gained

    @property
    def _cannot_fetch(self) -> bool:
        """Whether the engine need not be asked: a holder knows which blocks it will send before it knows where their
        windows begin."""
        return bool(self._host.parts.layout.windowed_layers)

    def _bytes_per_s(self, holder: PrefixHolder) -> float:
        return 0.0 if self.hub is None else self.hub.bytes_per_s(holder.address, holder.incarnation)

    def _make_order(
        self,
        hash_root: BlockHash,
        names: Sequence[BlockHash],
        holder: PrefixHolder,
        rates: FetchRates,
        *,
        spare_blocks: int = 0,
        trace: TraceContext | None = None,
        asker: RequestId | None = None,
    ) -> FetchOrder:
        transfer_id = TransferId(f"fetch/{self._name}/{next(self._serial)}")
        return FetchOrder(
            transfer_id=transfer_id,
            probe=probe_of(hash_root, names, transfer_id),
            holder=holder,
            rates=rates,
            spare_blocks=spare_blocks,
            trace=trace,
            asker=asker,
        )

    def _fetch_of_same_prefix(self, names: Sequence[BlockHash]) -> PrefixFetch | None:
        """A running fetch of the same prefix, or one that waits for room."""
        tail = list(names[-1:])
        return next((fetch for fetch in self._fetches.values() if fetch.order.probe.block_hashes[-1:] == tail), None)

    def _begin(self, order: FetchOrder, stats: FetchStats) -> PrefixFetch:
        """Reserve room, then send the job to the holder. The caller must `_wait` in the same turn, or the fetch never
        ends."""
        fetch = PrefixFetch(order=order, stats=stats)
        if (hub := self.hub) is None or len(self._fetches) >= _MAX_FETCHES:
            fetch.decline(Declined.NO_ROOM)
            return fetch
        # Registered before the answer, which may take a whole step.
        self._fetches[order.transfer_id] = fetch
        answer = asyncio.ensure_future(self._host.call(lambda scheduler: self._reserve(scheduler, order)))
        answer.add_done_callback(partial(self._answered, fetch, hub))
        return fetch

    def _answered(self, fetch: PrefixFetch, hub: ReceiverHub, answer: "asyncio.Future[int | Declined]") -> None:
        """Handle the engine's answer: room was reserved, or not."""
        order, transfer_id = fetch.order, fetch.order.transfer_id
        error = None if answer.cancelled() else answer.exception()
        if self._fetches.get(transfer_id) is not fetch:
            return
        held = Declined.NO_ROOM if answer.cancelled() or error is not None else answer.result()
        if isinstance(held, Declined):
            del self._fetches[transfer_id]
            if isinstance(error, ServingError):
                _log.info("%s: no room to fetch a peer's prefix: %s", transfer_id, error.message, extra=order.about)
            elif error is not None:
                fetch.reserved.set_exception(error)  # raised by the waiting caller
            fetch.decline(held)
            return
        fetch.num_held_tokens = held
        fetch.reserved.set_result(None)
        fetch.stats.started += 1
        fetch.ended.add_done_callback(partial(self._record_end, fetch, time.monotonic()))
        try:
            hub.start(job_of(fetch), route_to(order.holder))
        except ServingError as refusal:
            self._fail_unsent(fetch, refusal)

    def _record_end(self, fetch: PrefixFetch, started_s: float, ended: "asyncio.Future[int]") -> None:
        order, gained = fetch.order, ended.result()
        fetch.stats.num_tokens += gained
        _log.info(
            "%s: fetched %d of %d tokens from %s in %.1f ms",
            order.transfer_id, gained, order.probe.num_tokens - 1 - fetch.num_held_tokens, order.holder.worker_id,
            1e3 * (time.monotonic() - started_s), extra=order.about,
        )  # fmt: skip

    async def _wait(
        self, fetch: PrefixFetch, rates: FetchRates | None = None, cancelled: "asyncio.Future[None] | None" = None
    ) -> int:
        """Wait until it ends, `cancelled` is set or, by `rates`, waiting is not worth it; returns the tokens gained.

        The fetch ends with the last caller that waits for it.
        """
        fetch.num_waiting += 1
        ends = () if cancelled is None else (cancelled,)
        try:
            await asyncio.wait((fetch.reserved, *ends), return_when=asyncio.FIRST_COMPLETED)
            if fetch.reserved.done():
                fetch.reserved.result()
            patience_s = None if rates is None else self._patience_s(fetch, rates)
            await asyncio.wait((fetch.ended, *ends), timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            fetch.num_waiting -= 1
            if not fetch.num_waiting:
                self._stop(fetch, "no request waits for it any more")
        if not fetch.ended.done() and (fetch.num_waiting or (cancelled is not None and cancelled.done())):
            return 0
        return await asyncio.shield(fetch.ended)  # soon: what landed is being kept

    def _patience_s(self, fetch: PrefixFetch, rates: FetchRates) -> float:
        """A multiple of the fetch's expected time, and no longer than computing would take."""
        num_tokens = fetch.order.probe.num_tokens - 1 - fetch.num_held_tokens
        expected_s = fetch_s(self._num_bytes(num_tokens), rates)
        return max(_SHORTEST_WAIT_S, min(_PATIENCE * expected_s, compute_s(num_tokens, rates)))

    def _stop(self, fetch: PrefixFetch, reason: str) -> None:
        """End the fetch if it is still running; what has landed is kept."""
        transfer_id = fetch.order.transfer_id
        if self._fetches.get(transfer_id) is not fetch or self.hub is None:
            return
        if not fetch.reserved.done():
            del self._fetches[transfer_id]
            self._host.post(lambda scheduler: scheduler.reservations.cancel(transfer_id))
            fetch.end(0)
            return
        self.hub.give_up(transfer_id, reason)
        if transfer_id in self._fetches:  # otherwise the hub has reported what landed, or that all did
            self._cancel(fetch)

    def _reserve(self, scheduler: Scheduler, order: FetchOrder) -> int | Declined:
        """Reserve room for the part not held, on the engine's thread; returns the tokens held, or why not."""
        block_size = self._host.parts.layout.block_size
        transfer_id, probe = order.transfer_id, order.probe
        num_tokens = probe.num_tokens - 1
        match = scheduler.blocks.match(probe)
        if num_tokens - match.num_blocks * block_size < block_size:
            return Declined.HELD
        if scheduler.blocks.num_available - match.cost < order.spare_blocks:
            return Declined.NO_ROOM
        # The reservation loads blocks of lower tiers: only then is it known what is missing.
        held = scheduler.reservations.reserve(transfer_id, probe).num_held_tokens
        missing = num_tokens - held
        if missing >= block_size and worth_fetching(missing, self._num_bytes(missing), order.rates):
            return held
        scheduler.reservations.cancel(transfer_id)
        return Declined.HELD if missing < block_size else Declined.COMPUTED

    def _num_bytes(self, num_tokens: int) -> int:
        layout = self._host.parts.layout
        return num_tokens * layout.worker_block_bytes // layout.block_size

    def _cancel(self, fetch: PrefixFetch) -> None:
        transfer_id = fetch.order.transfer_id
        del self._fetches[transfer_id]
        fetch.end(0)
        fetch.stats.failed += 1
        self._host.post(lambda scheduler: scheduler.reservations.quarantine(transfer_id))
        if self.hub is not None:
            # A turn later, because this may be inside one of the hub's own callbacks.
            asyncio.get_running_loop().call_soon(self.hub.cancel, transfer_id, "given up")
        if not self._destinations.is_out(transfer_id):
            self._host.post(lambda scheduler: scheduler.reservations.release_quarantine(transfer_id))

    def _fail_unsent(self, fetch: PrefixFetch, error: ServingError) -> None:
        """End a fetch that was not sent to the holder, so that no block can have been written."""
        transfer_id = fetch.order.transfer_id
        del self._fetches[transfer_id]
        _log.info("%s: the fetch was not started: %s", transfer_id, error.message, extra=fetch.order.about)
        fetch.stats.failed += 1
        self._host.post(lambda scheduler: scheduler.reservations.cancel(transfer_id))
        fetch.end(0)

    # ReceiverOwner

    async def bind(self, transfer_id: TransferId, num_blocks: int) -> BlocksBound:
        """Choose destinations for the offered blocks, which may be fewer than were requested."""
        fetch = self._fetches.get(transfer_id)
        if fetch is None:
            raise TransferError("the fetch has ended")
        blocks = await self._host.call(lambda scheduler: scheduler.reservations.bind(transfer_id))
        if self._fetches.get(transfer_id) is not fetch:
            raise TransferError("the fetch has ended")
        chosen = blocks[:num_blocks]
        self._destinations.bind(transfer_id, chosen)
        fetch.num_destinations = len(chosen)
        return BlocksBound(blocks=chosen)

    def first_token(self, transfer_id: TransferId, first_token: FirstToken) -> None:
        """Ignored: a fetch samples no token."""

    async def commit(self, transfer_id: TransferId, info: CommitInfo) -> None:
        """Keep the fetched blocks: everything that was offered is here and verified."""
        fetch = self._fetches.pop(transfer_id, None)
        if fetch is None:
            self.released(transfer_id, info.blocks)
            return
        self._destinations.settle(info.blocks)
        fetch.stats.completed += 1
        await self._finish_keeping(
            fetch, len(info.blocks), self._keep(transfer_id, fetch, len(info.blocks), quiet=True)
        )

    def failed(self, transfer_id: TransferId, landed: tuple[BlockId, ...], error: ServingError) -> None:
        """Keep what landed; the fetch is not retried."""
        fetch = self._fetches.pop(transfer_id, None)
        if fetch is None:
            self.released(transfer_id, landed)
            return
        details = transfer_id, len(landed), error.message
        _log.info("%s failed with %d blocks landed: %s", *details, extra=fetch.order.about)
        fetch.stats.failed += 1
        self._destinations.settle(landed)
        quiet = len(landed) == fetch.num_destinations
        # Posted now: the hub may release the rest before this callback returns.
        keeping = self._keep(transfer_id, fetch, len(landed), quiet=quiet)
        self._spawn(self._finish_keeping(fetch, len(landed), keeping))
        if self.hub is not None:
            asyncio.get_running_loop().call_soon(self.hub.cancel, transfer_id, "computed here")

    def _keep(self, transfer_id: TransferId, fetch: PrefixFetch, num_blocks: int, *, quiet: bool) -> Awaitable[Request]:
        """Post the salvage of landed blocks before returning."""
        landed = fetch.num_held_tokens + num_blocks * self._host.parts.layout.block_size
        return self._host.call(lambda s: s.reservations.salvage(transfer_id, landed, writer_is_quiet=quiet))

    async def _finish_keeping(self, fetch: PrefixFetch, num_blocks: int, keeping: Awaitable[Request]) -> None:
        gained = num_blocks * self._host.parts.layout.block_size
        try:
            await keeping
        except ServingError as error:
            _log.info(
                "%s: nothing that landed was kept: %s",
                fetch.order.transfer_id,
                error.message,
                extra=fetch.order.about,
            )
            gained = 0
        fetch.end(gained)

    def expired(self, transfer_id: TransferId) -> None:
        """Ignored: failed fetches are cancelled at once, and none waits for another route."""

    def quarantine(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        """Log the quarantine, which the engine has begun already."""
        _log.warning("%s: quarantined %d blocks, their writer may still be running", transfer_id, len(blocks))

    def released(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        """Release blocks that nothing writes any more."""
        for key in self._destinations.settle(blocks):
            self._host.post(_release(key))


def _release(key: TransferId) -> Callable[[Scheduler], object]:
    return lambda scheduler: scheduler.reservations.release_quarantine(key)
