"""Schedules requests: they catch up with their tokens, within budgets, in rank order.

One step is `schedule` → a runner executes the batch → `commit`, and the next may be scheduled before that. There is no
prefill and no decode phase: a request's `num_computed_tokens` trails its tokens by a prompt, by one, or by everything
after a preemption, and each step closes some of the gap. Blocks for all known tokens are taken when a request is
admitted, so only sampling makes a request grow, and a `prefill_only` request, which samples once, is never preempted
under a running hand-off.

`engine.scheduler.planner` decides which requests share a step and which lose blocks; this module admits and accounts.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.eviction import eviction_policy
from engine.kv_cache.lower_tiers import OffloadTier
from engine.kv_cache.pins import PinBounds, PrefixPins
from engine.kv_cache.pool import PoolExhausted
from engine.kv_cache.reservations import Reservations
from engine.kv_cache.tiers.cache import CacheTiers, TierSpec
from engine.scheduler.chunk_size import ChunkSizer, has_decodes
from engine.scheduler.lookahead import Lookahead
from engine.scheduler.planner import StepPlanner
from engine.scheduler.preempted_kv import Offloading
from engine.scheduler.request_limits import check_size, end_rule, finish_reason, reason_of
from engine.scheduler.request_queue import Ranking
from engine.scheduler.request_table import RequestTable
from engine.scheduler.settling import settle
from engine.scheduler.step_events import StepEventCollector
from engine.scheduler.step_rates import RateMeter
from engine.speculation.speculation import Speculation
from engine.types.config import SchedulerConfig
from engine.types.kv_events import KVEventLog
from engine.types.request import Batch, FinishReason, Request, RequestState, SampledToken
from engine.types.step_output import Load, SettledDraft, StepOutput, StepTimings
from engine.types.token_guide import follow
from tandem.errors import ConfigError, InvalidRequest, InvariantError, Overloaded
from tandem.telemetry.logs import about
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockId, RequestId

_log = logging.getLogger(__name__)
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class _Committed:
    """What one step has brought so far, while it is committed."""

    leaving: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    num_caught_up: int = 0
    """Tokens by which the backlog has shrunk."""
    num_accepted: int = 0
    """Drafts that have become tokens."""
    drafts: list[SettledDraft] = field(default_factory=list)


class Scheduler:
    """All requests of one worker and the blocks they use. Plain, synchronous, touched by the engine thread alone.

    Call nothing between `schedule` and the launch of its batch: the runner lays it out from live tables. From then to
    its `commit` any method may be called: what a launched step can touch stays unchanged until it has settled.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        hasher: BlockHasher,
        *,
        tier: OffloadTier | None = None,
        block_bytes: int = 0,
        cache: TierSpec | None = None,
        pins: PinBounds | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        speculation: Speculation | None = None,
    ) -> None:
        """`tier` takes the KV of preempted requests where that costs less than computing it again; `block_bytes` is
        then the size of a block over all layers; call `offloading.set_copy_rates`. `cache` takes evicted blocks; call
        `tiers.costs.set_copy_rates`, and respect `patience_s` where there is a disk. With either, or with steps bounded
        by time (`max_step_s`), or adaptive `speculation`, call `observe` after every `commit`. Without `pins`, no
        prefix can be pinned. `clock`: see BlockManager. `speculation`: proposes drafts for the running requests.
        """
        self._config = config
        self._speculation = speculation
        if config.windows is not None and (tier is not None or cache is not None):
            raise ConfigError("KV of windowed layers in blocks of their own cannot be kept in lower tiers")
        kv_events = KVEventLog(config.kv_event_capacity)
        self.blocks = BlockManager(
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            hasher=hasher,
            events=kv_events,
            policy=eviction_policy(config.eviction),
            clock=clock,
            windows=config.windows,
        )
        self.tiers = CacheTiers(self.blocks, cache) if cache is not None else None
        if self.tiers is not None:
            self.blocks.set_lower_cache(self.tiers)
        self._collector = StepEventCollector(kv_events)
        self.pins = PrefixPins(self.blocks, pins or PinBounds(), lost=self._collector.pin_lost)
        self.reservations = Reservations(
            self.blocks, self.pins, screen=self._screen_reservation, adopt=self._adopt_reserved, tiers=self.tiers
        )
        self.offloading = Offloading(self.blocks, tier, block_bytes=block_bytes) if tier is not None else None
        self._table = RequestTable(Ranking(config.priority_aging_s))
        self._ahead = Lookahead()
        self._rates = RateMeter()
        self._pace = ChunkSizer(max_step_s=config.max_step_s, max_tokens=config.prefill_chunk_tokens)
        self._deferred: dict[RequestId, Request] = {}
        """Prefills whose progress is reported once the steps under way have settled."""
        self._had_decodes = False
        """True when the batch committed last contained decodes."""
        self._planner = StepPlanner(
            config,
            blocks=self.blocks,
            table=self._table,
            collector=self._collector,
            ahead=self._ahead,
            pace=self._pace,
            pins=self.pins,
            offloading=self.offloading,
            tiers=self.tiers,
        )

    # Entering and leaving

    def add(self, request: Request) -> None:
        """Queue a request; one whose last token already ends it (a resume that lost only the end) ends at once.

        Raises InvalidRequest, ContextLengthExceeded, RequestTooLarge (it can never run), Overloaded (queue full).
        """
        self._screen(request)
        if len(self._table.waiting) >= self._config.max_waiting_requests:
            raise Overloaded(f"{len(self._table.waiting)} requests are waiting", retry_after_s=_RETRY_AFTER_S)
        self._adopt(request)

    def match_prefix(self, request: Request) -> int:
        """Count the request's tokens whose KV is cached now. Takes nothing: `reserve` and admission look again."""
        return self.blocks.match(request).num_blocks * self._config.block_size

    def abort(self, request_id: RequestId) -> bool:
        """End a request in any state with reason "abort"; False when it is unknown or already over.

        A request that is still reserved must be ended through `reservations`, which know whether its writer is quiet.
        """
        request = self._table.requests.get(request_id)
        if request is None:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    def release_held(self, request_id: RequestId) -> bool:
        """Let go of a finished prefill after its hand-off; False when it is not (or no longer) held."""
        request = self._table.requests.get(request_id)
        if request is None or request.state is not RequestState.HELD:
            return False
        self._retire(request)
        return True

    def pin_blocks(self, request_id: RequestId) -> None:
        """Protect the request's blocks from the start of a transfer: they outlive even an abort, until `unpin_blocks`.

        Counted: one per transfer. Raises InvalidRequest when the request does not exist.
        """
        if request_id not in self._table.requests:
            raise InvalidRequest(f"request {request_id} does not exist")
        self.blocks.pin(request_id)

    def unpin_blocks(self, request_id: RequestId) -> None:
        """Undo one `pin_blocks` once its transfer is quiet; the request itself may be long gone."""
        self.blocks.unpin(request_id)

    def _screen(self, request: Request) -> None:
        request_id = request.request_id
        if request_id in self._table.requests or self.reservations.has_request(request_id):
            raise InvalidRequest(f"request {request_id} already exists")
        if finish_reason(request, self._config) is None:
            check_size(request, self._config)

    def _screen_reservation(self, request: Request) -> None:
        self._screen(request)
        if finish_reason(request, self._config) is not None:
            raise InvalidRequest(f"request {request.request_id} is already complete")
        if self._planner.head_is_blocked:
            raise PoolExhausted("earlier requests are waiting for KV blocks", retry_after_s=_RETRY_AFTER_S)

    def _adopt(self, request: Request) -> None:
        """Take over a request that has all its KV but the last token's, or none at all."""
        request.end_rule = end_rule(request, self._config)
        self._table.enter(request)
        reason = finish_reason(request, self._config)
        guide = request.guide
        if reason is None and guide is not None:
            if not follow(guide, request.token_ids[request.num_prompt_tokens :]):
                reason = FinishReason.ERROR
            elif guide.is_over:
                reason = FinishReason.STOP
        if reason is not None:
            self._end(request, reason)

    def _adopt_reserved(self, request: Request) -> None:
        self._planner.admitted_elsewhere(request)
        self._adopt(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        # A held prefill whose one token was also its last has reported its end already.
        if request.finish_reason is None:
            request.finish_reason = reason
            self._collector.end(request, reason)
        self._retire(request)

    def _retire(self, request: Request) -> None:
        self._table.leave(request)
        self._planner.forget(request)
        self._collector.forget(request.request_id)
        if self._speculation is not None:
            self._speculation.forget(request)

    # One step

    def schedule(self, now: float) -> Batch | None:
        """Choose the next step's work, as if every launched step were done.

        None when nothing can run until a launched step is committed or, without one, a request is added, released or
        aborted, a disk has finished a read that a request waits for, or `patience_s` is over.

        `now` is on the clock of the requests' `arrival_s`; a request that waits past its `deadline_s` ends, as the next
        output reports. Costs O(running requests + admitted blocks).
        """
        for request in self._table.deadlines.expired(now):
            self._end(request, FinishReason.DEADLINE)
        self.pins.expire(now)
        batch = self._planner.plan(now, self._speculation)
        if batch is not None:
            self._ahead.launch(batch)
            self.blocks.begin_step()
        return batch

    def commit(self, batch: Batch, sampled: Sequence[SampledToken | None]) -> StepOutput:
        """Account for the oldest launched batch: its samples, in order (see `engine.types.runner.LaunchedStep`).

        None marks logits from which no token can be sampled: only that request fails. Requests that have ended since
        the launch keep nothing.
        """
        if len(sampled) != batch.num_samples:
            raise InvariantError(f"{len(sampled)} tokens sampled for {len(batch.items)} items")
        self._ahead.settle(batch)
        self._planner.on_step_done()
        self._report_deferred()
        self._had_decodes = has_decodes(batch.items)
        size, running = self._config.block_size, RequestState.RUNNING
        tokens = iter(sampled)
        done, num_caught_up = _Committed(), 0
        for request, start, num_tokens, samples, drafts in batch.items:
            request.num_in_flight_tokens -= num_tokens
            if drafts:
                self._commit_drafts(request, start, drafts, [*islice(tokens, 1 + len(drafts))], done)
                continue
            token = None
            if samples:
                request.num_awaited_tokens -= 1
                token = next(tokens)
            if request.state is not running:
                continue
            end = start + num_tokens
            request.num_computed_tokens = end
            num_caught_up += num_tokens
            if samples and (token is None or not _may_follow(request, token)):
                done.failed.append(request)
                continue
            if start // size != end // size or request.prefill_only:
                self._commit_blocks(request, start // size)
            if request.windows is not None:
                self.blocks.slide(request)
            if token is not None:
                num_caught_up -= 1  # a token more to compute
                if self._commit_token(request, token) or request.prefill_only:
                    done.leaving.append(request)
        done.num_caught_up += num_caught_up
        self._let_go(done)
        output = self.drain()
        if not done.drafts:
            return output
        return output._replace(num_accepted_tokens=done.num_accepted, drafts=tuple(done.drafts))

    def _let_go(self, done: "_Committed") -> None:
        """End or hold the requests that a step has brought to their last token, or failed."""
        self._table.backlog_tokens -= done.num_caught_up
        for request in done.leaving:
            if request.prefill_only:
                self._table.hold(request)
            else:
                self._retire(request)
        for request in done.failed:
            name = request.request_id
            _log.warning("%s: cannot sample a token from its logits", name, extra=about(name))
            self.pins.invalidate(request)
            self.blocks.invalidate(request)
            self._end(request, FinishReason.ERROR)

    def _commit_drafts(
        self,
        request: Request,
        start: int,
        drafts: tuple[int, ...],
        sampled: Sequence[SampledToken | None],
        done: "_Committed",
    ) -> None:
        """Append and report those samples that the request would have got without drafts. The KV of wrong drafts stays
        where it is: later tokens are written over it before anything reads it.
        """
        request.num_awaited_tokens -= 1
        request.num_in_flight_drafts -= len(drafts)
        if request.state is not RequestState.RUNNING:
            return
        size, first = self._config.block_size, request.num_output_tokens
        rule = request.end_rule or end_rule(request, self._config)
        settled = settle(drafts, sampled, num_tokens=request.num_tokens, rule=rule, guide=request.guide)
        request.token_ids.extend([token.token_id for token in settled.tokens])
        request.num_computed_tokens = end = start + settled.num_computed
        if start // size != end // size:
            self._commit_blocks(request, start // size)
        if request.windows is not None:
            self.blocks.slide(request)
        request.finish_reason = settled.finish_reason
        last = len(settled.tokens) - 1
        for i, token in enumerate(settled.tokens):
            self._collector.token(request, first + i, token, settled.finish_reason if i == last else None)
        is_over = settled.is_unusable or settled.finish_reason is not None
        if self._speculation is not None:
            done.drafts.append(self._speculation.settled(request, settled.num_computed - 1, is_over=is_over))
        done.num_caught_up += settled.num_computed - len(settled.tokens)
        done.num_accepted += settled.num_computed - 1
        if is_over:
            (done.failed if settled.is_unusable else done.leaving).append(request)

    def _commit_blocks(self, request: Request, first_block: int) -> None:
        """Publish the request's full blocks from `first_block` on: cached and, for a hand-off, ready to send."""
        displaced = self.blocks.index_computed(request, first_block)
        if displaced:
            self.blocks.release_after_use(request.request_id, displaced)
        if request.prefill_only:
            self._report_progress(request)

    def _report_progress(self, request: Request) -> None:
        """Report blocks that others may read; deferred while a step still loads one of them from a lower tier."""
        if self.is_arriving(self.blocks.held(request)):
            self._deferred[request.request_id] = request
        else:
            self._collector.progress(request, self._config.block_size)

    def _report_deferred(self) -> None:
        if not self._deferred:
            return
        deferred, self._deferred = self._deferred, {}
        for request in deferred.values():
            if request.state in (RequestState.RUNNING, RequestState.HELD):
                self._report_progress(request)

    def is_arriving(self, blocks: Iterable[BlockId]) -> bool:
        """Whether a step in flight fills one of these blocks, which others must not read until it has settled."""
        return not self._ahead.arriving().isdisjoint(blocks)

    def _commit_token(self, request: Request, token: SampledToken) -> bool:
        """Append a sampled token and report it. Returns True when it ends the request."""
        request.token_ids.append(token.token_id)
        rule = request.end_rule or end_rule(request, self._config)
        num_tokens = len(request.token_ids)
        reason = None
        if num_tokens >= rule.max_tokens or token.token_id in rule.token_ids:
            reason = reason_of(rule, token.token_id, num_tokens)
        if request.guide is not None and request.guide.is_over:
            reason = FinishReason.STOP
        if reason is not None:
            request.finish_reason = reason
        self._collector.token(request, num_tokens - request.num_prompt_tokens - 1, token, reason)
        return reason is not None

    def observe(self, timings: StepTimings) -> None:
        """Record how long the last committed batch took; this bounds chunks beside decodes and prices offloading."""
        self._pace.observe(timings, beside_decodes=self._had_decodes)
        self._rates.observe(timings)
        if self._speculation is not None:
            self._speculation.observe(timings)
        if self.offloading is not None:
            self.offloading.set_prefill_rate(self._rates.prefill_tokens_per_s)
        if self.tiers is not None:
            self.tiers.costs.set_prefill_rate(self._rates.prefill_tokens_per_s)

    def patience_s(self, now: float) -> float | None:
        """Seconds until `schedule`, having found nothing, may succeed without any other event; None: never."""
        return None if self.tiers is None else self.tiers.patience_s(now)

    # Reporting

    @property
    def has_output(self) -> bool:
        """Whether something has happened that no output reports yet."""
        return bool(self._collector)

    @property
    def has_admissions(self) -> bool:
        """Whether a request has just left the queue, which is reported before its step is executed."""
        return self._collector.has_admissions

    def drain(self) -> StepOutput:
        """Return everything since the last output, once."""
        return self._collector.drain(self.load())

    def load(self) -> Load:
        """The worker's current load; O(1) apart from quarantines."""
        return Load(
            num_running=len(self._table.running),
            num_waiting=len(self._table.waiting),
            num_held=self._table.num_held,
            num_reservations=len(self.reservations),
            num_backlog_tokens=self._table.backlog_tokens,
            num_blocks=self.blocks.pool.num_blocks,
            num_used_blocks=self.blocks.pool.num_used,
            num_evictable_blocks=self.blocks.pool.num_idle,
            num_promised_blocks=self.blocks.num_promised,
            num_quarantined_blocks=self.reservations.num_quarantined_blocks,
            tiers=() if self.tiers is None else self.tiers.counts(),
            pins=self.pins.totals(),
        )

    def check_invariants(self) -> None:
        """Check that owners account for every reference count; O(num_blocks), for tests and audits."""
        self.blocks.check_invariants()
        self._table.check_invariants()
        self._ahead.check_invariants()
        if self.tiers is not None:
            self.tiers.check_invariants()
        owned = self.reservations.references() + self.blocks.pinned_blocks() + self.pins.references()
        for request in self._table.requests.values():
            owned.extend(self.blocks.held(request))
        owners = Counter(owned)
        for block in map(BlockId, range(self.blocks.pool.num_blocks)):
            if owners[block] != self.blocks.pool.num_refs(block):
                raise InvariantError(
                    f"block {block} has {owners[block]} owners and {self.blocks.pool.num_refs(block)} references"
                )


def _may_follow(request: Request, token: SampledToken) -> bool:
    """Whether the request's grammar accepts a sampled token. A sound sampler chooses no other."""
    return request.guide is None or request.guide.accept(token.token_id)
