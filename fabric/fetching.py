"""Bringing prefixes from peers into this worker's cache, when that beats computing them.

Life of a fetch: hint → looked up here → priced → reservation → hand-off of what the peer holds → blocks in the prefix
index, found by whoever schedules the request next. Whatever goes wrong, what has landed is kept and the rest is
computed: a fetch never fails a request.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from engine.host import EngineHost
from engine.request import Request
from engine.scheduler import Scheduler
from fabric.cost import FetchRates, compute_s, fetch_s, worth_fetching
from fabric.destinations import Destinations
from kv_transfer.actions import CommitInfo
from kv_transfer.messages import FirstToken, PrefillJob
from kv_transfer.peer import Route
from kv_transfer.receiver_hub import ReceiverHub
from tandem.block_hash import HASH_BLOCK_TOKENS
from tandem.errors import ServingError, TransferError
from tandem.ids import BlockHash, BlockId, RequestId, TransferId
from tandem.prefix_holder import PrefixHolder
from tandem.sampling import SamplingParams
from tandem.tracing import NoTracer, TraceContext, Tracer

_log = logging.getLogger(__name__)

_SHORTEST_WAIT_S = 0.5
"""However fast this worker computes: a peer may be in the middle of a step."""
_PATIENCE = 4.0
"""Times what a fetch should take."""
_MAX_FETCHES = 8
"""Under way at once: each holds a reservation that hand-offs and prompts compete for."""


@dataclass(slots=True, kw_only=True)
class FetchStats:
    """Totals since start."""

    started: int = 0
    completed: int = 0
    failed: int = 0
    declined: int = 0
    """Hints that were not followed: held here already, or cheaper to compute."""
    num_tokens: int = 0
    """Brought here, by those that failed midway too."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Fetch:
    """One fetch under way; `ended` is set with the tokens gained."""

    probe: Request
    num_held_tokens: int
    num_destinations: int = 0
    ended: "asyncio.Future[int]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, num_tokens: int) -> None:
        if not self.ended.done():
            self.ended.set_result(num_tokens)


class Fetcher:
    """The receiving side of fetches (kv_transfer's ReceiverOwner, for them alone). On the event loop's thread."""

    def __init__(
        self,
        host: EngineHost,
        *,
        name: str,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        tracer: Tracer | None = None,
    ) -> None:
        """`name`: unlike any other process's, for the names of its fetches."""
        self.hub: ReceiverHub | None = None
        self.stats = FetchStats()
        self._host = host
        self._name = name
        self._spawn = spawn
        self._tracer = tracer or NoTracer()
        self._serial = count(1)
        self._fetches: dict[TransferId, _Fetch] = {}
        self._destinations = Destinations()

    def owns(self, transfer_id: TransferId) -> bool:
        """Whether this is one of this worker's fetches, over or not."""
        return transfer_id.startswith(f"fetch/{self._name}/")

    async def bring(self, request: Request, holder: PrefixHolder, trace: TraceContext | None = None) -> int:
        """Bring what `holder` has of the request's prefix and is not here; the tokens gained. Never raises for a peer.

        The request is neither queued nor changed, but for the names of its blocks. `trace`: of the span that waits.
        """
        span = self._tracer.span("tandem.fetch", trace, time.monotonic())
        if span is None:
            return await self._bring(request, holder, None)
        try:
            gained = await self._bring(request, holder, span.context)
            span.attributes.update({"tandem.fetch.holder": holder.worker_id, "tandem.fetch.tokens": gained})
        finally:
            span.end()
        return gained

    async def _bring(self, request: Request, holder: PrefixHolder, trace: TraceContext | None) -> int:
        hub = self.hub
        num_tokens = min(holder.num_tokens, request.num_tokens - 1)
        if hub is None or num_tokens <= 0:
            return 0
        transfer_id = TransferId(f"fetch/{self._name}/{next(self._serial)}")
        rates = FetchRates(
            prefill_tokens_per_s=self._host.rates.prefill_tokens_per_s, bytes_per_s=hub.stats.bytes_per_s
        )
        self._host.parts.hasher.extend(request.hash_root, request.block_hashes, request.token_ids)
        probe = _probe(request.hash_root, request.block_hashes[: num_tokens // HASH_BLOCK_TOKENS], transfer_id)
        if (same := self._same(probe)) is not None:
            await asyncio.shield(same.ended)  # what others bring is found here all the same
            return 0
        try:
            held = None
            if len(self._fetches) < _MAX_FETCHES:
                held = await self._host.call(lambda s: self._reserve(s, transfer_id, probe, rates))
        except ServingError as error:
            _log.info("%s: no room for what a peer holds: %s", request.request_id, error.message)
            held = None
        if held is None:
            self.stats.declined += 1
            _log.debug("%s: what %s holds is computed here, at %s", request.request_id, holder.worker_id, rates)
            return 0
        fetch = self._fetches[transfer_id] = _Fetch(probe=probe, num_held_tokens=held)
        self.stats.started += 1
        try:
            hub.start(_job(transfer_id, probe, held, trace), _route(holder))
        except ServingError as error:
            self._give_up(transfer_id, error)
        started_s = time.monotonic()
        gained = await self._outcome(transfer_id, fetch, self._patience_s(num_tokens - held, rates))
        self.stats.num_tokens += gained
        _log.info(
            "%s: %d of %d tokens came from %s in %.1f ms",
            transfer_id, gained, num_tokens - held, holder.worker_id, 1e3 * (time.monotonic() - started_s),
        )  # fmt: skip
        return gained

    def _same(self, probe: Request) -> _Fetch | None:
        """A fetch under way of the same prefix."""
        tail = probe.block_hashes[-1:]
        return next((fetch for fetch in self._fetches.values() if fetch.probe.block_hashes[-1:] == tail), None)

    def _patience_s(self, num_tokens: int, rates: FetchRates) -> float:
        """Some times what the fetch should take, and no longer than computing would."""
        expected_s = fetch_s(self._num_bytes(num_tokens), rates)
        return max(_SHORTEST_WAIT_S, min(_PATIENCE * expected_s, compute_s(num_tokens, rates)))

    async def _outcome(self, transfer_id: TransferId, fetch: _Fetch, patience_s: float) -> int:
        """Wait so long; then what has landed is kept, and computing goes on alone."""
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.shield(fetch.ended)
        except TimeoutError:
            if self.hub is not None:
                self.hub.give_up(transfer_id, "a fetch takes too long")
            if transfer_id not in self._fetches:  # it has failed, or committed this moment
                return await fetch.ended
            self._cancel(transfer_id)
            return 0
        except asyncio.CancelledError:
            self._cancel(transfer_id)
            raise

    def _reserve(self, scheduler: Scheduler, transfer_id: TransferId, probe: Request, rates: FetchRates) -> int | None:
        """On the engine's thread: tokens held here, with room for the rest reserved; None when it is not worth it."""
        block_size = self._host.parts.layout.block_size
        wanted = probe.num_tokens - 1
        if wanted - scheduler.blocks.match(probe).num_blocks * block_size < block_size:
            return None
        # What lies below the pool comes up with the reservation: only then is it known what is missing.
        held = scheduler.reservations.reserve(transfer_id, probe).num_held_tokens
        missing = wanted - held
        if missing < block_size or not worth_fetching(missing, self._num_bytes(missing), rates):
            scheduler.reservations.cancel(transfer_id)
            return None
        return held

    def _num_bytes(self, num_tokens: int) -> int:
        layout = self._host.parts.layout
        return num_tokens * layout.worker_block_bytes // layout.block_size

    def _cancel(self, transfer_id: TransferId) -> None:
        fetch = self._fetches.pop(transfer_id, None)
        if fetch is None:
            return
        fetch.end(0)
        self.stats.failed += 1
        self._host.post(lambda scheduler: scheduler.reservations.quarantine(transfer_id))
        if self.hub is not None:
            # A turn later: this may be inside one of the hub's own callbacks.
            asyncio.get_running_loop().call_soon(self.hub.cancel, transfer_id, "takes longer than computing")
        if not self._destinations.is_out(transfer_id):
            self._host.post(lambda scheduler: scheduler.reservations.release_quarantine(transfer_id))

    def _give_up(self, transfer_id: TransferId, error: ServingError) -> None:
        """It never began: nobody was let in."""
        fetch = self._fetches.pop(transfer_id)
        _log.info("%s: not begun: %s", transfer_id, error.message)
        self.stats.failed += 1
        self._host.post(lambda scheduler: scheduler.reservations.cancel(transfer_id))
        fetch.end(0)

    # ReceiverOwner

    async def bind(self, transfer_id: TransferId, num_blocks: int) -> tuple[BlockId, ...]:
        """Choose destinations for what is offered, which may be less than was asked for."""
        fetch = self._fetches.get(transfer_id)
        if fetch is None:
            raise TransferError("the fetch is over")
        blocks = await self._host.call(lambda scheduler: scheduler.reservations.bind(transfer_id))
        if self._fetches.get(transfer_id) is not fetch:
            raise TransferError("the fetch is over")
        chosen = blocks[:num_blocks]
        self._destinations.bind(transfer_id, chosen)
        fetch.num_destinations = len(chosen)
        return chosen

    def first_token(self, transfer_id: TransferId, first_token: FirstToken) -> None:
        """A fetch samples nothing."""

    async def commit(self, transfer_id: TransferId, info: CommitInfo) -> None:
        """Everything that was offered is here and verified."""
        fetch = self._fetches.pop(transfer_id, None)
        if fetch is None:
            self.released(transfer_id, info.blocks)
            return
        self._destinations.settle(info.blocks)
        self.stats.completed += 1
        await self._kept(fetch, len(info.blocks), self._keep(transfer_id, fetch, len(info.blocks), quiet=True))

    def failed(self, transfer_id: TransferId, landed: tuple[BlockId, ...], error: ServingError) -> None:
        """Keep what landed; nobody is asked again."""
        fetch = self._fetches.pop(transfer_id, None)
        if fetch is None:
            self.released(transfer_id, landed)
            return
        _log.info("%s failed with %d blocks landed: %s", transfer_id, len(landed), error.message)
        self.stats.failed += 1
        self._destinations.settle(landed)
        quiet = len(landed) == fetch.num_destinations
        # Posted now: the hub may release the rest before this callback is over.
        keeping = self._keep(transfer_id, fetch, len(landed), quiet=quiet)
        self._spawn(self._kept(fetch, len(landed), keeping))
        if self.hub is not None:
            asyncio.get_running_loop().call_soon(self.hub.cancel, transfer_id, "computed here")

    def _keep(self, transfer_id: TransferId, fetch: _Fetch, num_blocks: int, *, quiet: bool) -> Awaitable[Request]:
        """Posted before this returns."""
        landed = fetch.num_held_tokens + num_blocks * self._host.parts.layout.block_size
        return self._host.call(lambda s: s.reservations.salvage(transfer_id, landed, writer_is_quiet=quiet))

    async def _kept(self, fetch: _Fetch, num_blocks: int, keeping: Awaitable[Request]) -> None:
        gained = num_blocks * self._host.parts.layout.block_size
        try:
            await keeping
        except ServingError as error:
            _log.info("%s: nothing kept: %s", fetch.probe.request_id, error.message)
            gained = 0
        fetch.end(gained)

    def expired(self, transfer_id: TransferId) -> None:
        """Failed fetches are cancelled at once; none waits for another route."""

    def quarantine(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        """The engine keeps them out of circulation already; say so."""
        _log.warning("%s: %d blocks quarantined, their writer may be alive", transfer_id, len(blocks))

    def released(self, transfer_id: TransferId, blocks: tuple[BlockId, ...]) -> None:
        """Nothing writes there any more."""
        for key in self._destinations.settle(blocks):
            self._host.post(_release(key))


def _release(key: TransferId) -> Callable[[Scheduler], object]:
    return lambda scheduler: scheduler.reservations.release_quarantine(key)


def _probe(hash_root: BlockHash, names: list[BlockHash], transfer_id: TransferId) -> Request:
    """A prefix that is known by its names alone, and one token more, since a reservation leaves one to compute."""
    num_tokens = len(names) * HASH_BLOCK_TOKENS + 1
    return Request(
        request_id=RequestId(transfer_id),
        token_ids=array("i", bytes(4 * num_tokens)),
        num_prompt_tokens=num_tokens,
        params=SamplingParams(max_tokens=1),
        hash_root=hash_root,
        prefill_only=True,
        block_hashes=names,
    )


def _job(transfer_id: TransferId, probe: Request, held_tokens: int, trace: TraceContext | None) -> PrefillJob:
    return PrefillJob(
        transfer_id=transfer_id,
        request_id=probe.request_id,
        token_ids=(),
        num_prompt_tokens=0,
        held_tokens=held_tokens,
        sampling=probe.params,
        hash_root=probe.hash_root,
        resume=True,
        fetch=True,
        names=tuple(probe.block_hashes),
        trace=trace,
    )


def _route(holder: PrefixHolder) -> Route:
    return Route(worker_id=holder.worker_id, incarnation=holder.incarnation, address=holder.address, attempt=1)
