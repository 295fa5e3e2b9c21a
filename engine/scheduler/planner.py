"""Chooses the work of one step and which requests to preempt: decodes first, then prompts in order, within its budgets.

Sequences that are one token behind come first, since their output is being streamed. What is left goes, in rank order
and at most `prefill_chunk_tokens` in all, to those further behind: running ones and, from the queue, newcomers that
rank before them. So a prompt's first token waits for no later prompt's chunk, and a step is never longer than its
decodes and one chunk, which `engine.scheduler.chunk_size` shortens to keep steps with decodes within their time.

Progress: one total rank orders everything. A request that finds no block preempts the last-ranked one, itself if need
be, never one before it; and while the queue's head finds no room nothing else enters, reservations included. So the
first-ranked request always advances, unless all blocks are held by hand-offs, which end by lease.

A step may be planned while others are under way. Work under way counts as done, but nothing is preempted then: a
request that finds no block sits the step out; the next plan waits until every step has settled, then preempts.
"""

from engine.kv_cache.block_manager import BlockManager, PrefixMatch
from engine.kv_cache.pins import PrefixPins
from engine.kv_cache.tiers.cache import CacheTiers
from engine.scheduler.chunk_size import ChunkSizer
from engine.scheduler.draft_planner import plan_drafts
from engine.scheduler.lookahead import Lookahead, ends_lookahead
from engine.scheduler.preempted_kv import Offloading
from engine.scheduler.queue_order import QueueOrder
from engine.scheduler.request_queue import Rank
from engine.scheduler.request_table import RequestTable
from engine.scheduler.shared_prefills import SharedPrefills
from engine.scheduler.step_events import StepEventCollector
from engine.scheduler.step_plan import StepPlan
from engine.speculation.speculation import Speculation
from engine.types.block_moves import BlockLoad, BlockOffload
from engine.types.config import SchedulerConfig
from engine.types.request import Batch, Request, RequestState
from tandem.values.ids import RequestId


def choose_preemption_victim(request: Request, table: RequestTable, blocks: BlockManager) -> Request | None:
    """The running request to preempt so that `request` gets blocks; None when there is none.

    It is the last-ranked one whose blocks would really come free, if it ranks behind `request`. If `request` is still
    in the queue, the victim must have a lower priority as well.
    """
    for victim in reversed(table.running):
        if victim.prefill_only or blocks.is_pinned(victim.request_id):
            continue
        may_take = request.state is RequestState.RUNNING or victim.priority > request.priority
        return victim if may_take and table.rank(victim) > table.rank(request) else None
    return None


class StepPlanner:
    """Plans steps for a table of requests within the blocks of one pool."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        blocks: BlockManager,
        table: RequestTable,
        collector: StepEventCollector,
        ahead: Lookahead,
        pace: ChunkSizer,
        pins: PrefixPins,
        offloading: Offloading | None = None,
        tiers: CacheTiers | None = None,
    ) -> None:
        self.head_is_blocked = False
        """True when the first of the queue finds no room: nothing may enter before it."""
        self._config = config
        self._blocks = blocks
        self._pins = pins
        self._table = table
        self._collector = collector
        self._ahead = ahead
        self._pace = pace
        self._must_settle = False
        self._offloading = offloading
        self._tiers = tiers
        self._in_flight = SharedPrefills(blocks)
        self._order = QueueOrder(
            table.waiting, blocks, self._in_flight, max_overtakes=config.max_overtakes, tiers=tiers
        )
        self._was_admitted: set[RequestId] = set()

    def admitted_elsewhere(self, request: Request) -> None:
        """Record that its reservation admitted the request: only the prefix found then counts as cached."""
        self._was_admitted.add(request.request_id)

    def release_blocks(self, request: Request) -> None:
        """Take the request's blocks away, and stop sharing its prefill."""
        self._in_flight.leave(request)
        self._blocks.release_after_use(request.request_id, self._blocks.take_table(request))

    def forget(self, request: Request) -> None:
        """Forget a request that is over, wherever it is recorded."""
        self.release_blocks(request)
        self._in_flight.forget(request)
        self._was_admitted.discard(request.request_id)
        self._order.forget(request.request_id)
        if self._offloading is not None:
            self._offloading.drop(request.request_id)
        if self._tiers is not None:
            self._tiers.drop(request.request_id)

    def on_step_done(self) -> None:
        """Account for the oldest batch, which is computed: its block moves are done."""
        self._blocks.end_step()
        if self._offloading is not None:
            self._offloading.on_step_done()
        if self._tiers is not None:
            self._tiers.on_step_done()

    def skip_steps(self, num_steps: int) -> None:
        """Account for steps that ran without a plan: no request entered or lost blocks in them."""
        self.head_is_blocked = False
        self._in_flight.skip_steps(num_steps)

    # Running requests

    def plan(self, now: float, speculation: Speculation | None = None) -> Batch | None:
        """The next step's work; None when nothing can run, or must wait until the steps under way have settled.

        `speculation` adds drafts from what the step has left. O(running requests + admitted blocks).
        """
        if self._must_settle and self._ahead:
            return None
        self._must_settle = False
        plan = StepPlan(
            max_tokens=self._config.max_batched_tokens,
            max_rows=self._config.max_running_requests,
            chunk_tokens=self._config.prefill_chunk_tokens,
        )
        self._in_flight.begin_step()
        if self._tiers is not None:
            self._tiers.collect()
        self.head_is_blocked = False
        behind = self._plan_decodes(plan)
        if (behind or len(self._table.waiting)) and plan.has_decodes:
            plan.bound_chunk(self._pace.chunk_tokens())
        for request in behind:
            if plan.has_room(2):
                self._admit(plan, now, before=self._table.rank(request))
                self._plan_one(request, plan)
        # After a preemption the room is for running requests. Admit from the queue only if none is left.
        self._admit(plan, now, before=None)
        if not len(plan):
            if self._offloading is not None:
                self._offloading.cancel_offloads()
            if self._tiers is not None:
                self._tiers.cancel()
            return None
        if speculation is not None:
            # Before the offloads are taken: blocks for drafts may evict cached ones.
            may_grow = not (self.head_is_blocked or plan.has_preempted)
            plan_drafts(plan, speculation, blocks=self._blocks, table=self._table, may_grow=may_grow)
        nothing: tuple[BlockOffload, ...] = ()
        return plan.batch(
            self._offloading.take_offloads() if self._offloading is not None else nothing,
            self._tiers.take_offloads() if self._tiers is not None else nothing,
        )

    def _plan_decodes(self, plan: StepPlan) -> list[Request]:
        """Plan the requests that are one token behind. Returns the other running requests, in order."""
        running = list(self._table.running)
        behind: list[Request] = []
        size = self._blocks.block_size
        running_state = RequestState.RUNNING
        # One row is kept for the oldest even if it is in the middle of its prompt, so that it progresses.
        spare = 1 if running and running[0].num_unplanned_tokens > 1 else 0
        room = min(plan.tokens_left, plan.rows_left) - spare
        for request in running:
            num_planned = request.num_computed_tokens + request.num_in_flight_tokens
            if len(request.token_ids) + request.num_awaited_tokens - num_planned > 1:
                behind.append(request)
            elif room <= 0 or (request.num_awaited_tokens and ends_lookahead(request)):
                continue
            elif num_planned % size and request.state is running_state:
                # The token before it has a block with room for this one.
                plan.add_token(request)
                room -= 1
            else:
                self._plan_one(request, plan)
                room = min(plan.tokens_left, plan.rows_left) - spare
        return behind

    def _plan_one(self, request: Request, plan: StepPlan) -> None:
        """Schedule a running request, taking blocks from those behind it when there are no others."""
        if request.state is not RequestState.RUNNING or not plan.has_room(request.num_unplanned_tokens):
            return
        num_tokens = request.num_tokens + request.num_awaited_tokens
        num_missing = self._blocks.num_missing(request, num_tokens)
        while num_missing > self._blocks.num_available:
            if self._pins.make_way(self._blocks.num_needed(num_tokens), request.block_table):
                continue
            if self._ahead:
                self._must_settle = True
                return
            victim = choose_preemption_victim(request, self._table, self._blocks)
            if victim is None:
                self._preempt(request, plan)
                return
            self._preempt(victim, plan)
        if num_missing > 0:
            self._blocks.extend(request, num_tokens)
        self._add(request, plan)

    def _add(self, request: Request, plan: StepPlan) -> None:
        """Schedule the request's next tokens, as far as the budgets and the blocks of its windows go."""
        covered = self._blocks.coverable_tokens(request)
        if covered is None:
            plan.add(request)
        elif covered > request.num_planned_tokens:
            num_tokens = plan.add(request, most=covered - request.num_planned_tokens)
            self._blocks.cover(request, request.num_planned_tokens + num_tokens)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Move a running request back to the queue. Its KV is saved, or remains in the prefix cache until evicted."""
        plan.drop(request)
        plan.has_preempted = True
        self.head_is_blocked = True
        if self._offloading is not None:
            self._offloading.save(request)
        self.release_blocks(request)
        self._table.requeue(request)
        request.num_preemptions += 1
        self._collector.preemption(request)

    # The queue

    def _admit(self, plan: StepPlan, now: float, *, before: Rank | None) -> None:
        """Admit requests that rank before `before`; None: all. To find room, the first may preempt lower priorities."""
        if len(plan) and (plan.has_preempted or self.head_is_blocked):
            return
        while len(self._table.running) < self._config.max_running_requests and plan.has_room(1):
            if before is not None and self._next_ranks_after(before):
                return
            choice = self._order.choose(now=now, may_wait=len(plan) > 0 or len(self._ahead) > 0)
            if choice is None or (before is not None and self._table.rank(choice.head.request) > before):
                return
            head = choice.head
            if not self._fits(head.match):
                if not self._make_room(head.request, head.match, plan):
                    self.head_is_blocked = True
                    return
                continue
            best = choice.best
            if not self._fits(best.match):
                best = head
            if not self._start(best.request, best.match, plan, now):
                return
            if best is not head:
                self._order.record_overtakes(choice)
            if plan.has_preempted:
                return

    def _next_ranks_after(self, rank: Rank) -> bool:
        waiting = self._table.waiting
        return not len(waiting) or self._table.rank(waiting.first()) > rank

    def _make_room(self, head: Request, match: PrefixMatch, plan: StepPlan) -> bool:
        """Make room for the queue's head: release pins beside which it never fits, or preempt. False if nothing gave
        way.
        """
        if self._pins.make_way(match.num_total, self._blocks.found(head, match)):
            return True
        victim = choose_preemption_victim(head, self._table, self._blocks)
        if victim is None:
            return False
        if self._ahead:
            self._must_settle = True
            return False
        self._preempt(victim, plan)
        return True

    def _fits(self, match: PrefixMatch) -> bool:
        # Other running requests need room to grow, or the newcomer would be preempted at once.
        margin = 1 + self._config.num_blocks // 100 if len(self._table.running) else 0
        return match.cost + margin <= self._blocks.num_available

    def _start(self, request: Request, match: PrefixMatch, plan: StepPlan, now: float) -> bool:
        """Give a waiting request its blocks and a share of the step; False when the step has no tokens for it."""
        offloading, tiers, found = self._offloading, self._tiers, match.num_blocks
        num_saved = 0 if offloading is None else offloading.num_saved_tokens(request, found)
        # Rows that are scored one by one cannot be provided by cached blocks.
        is_scored = request.scoring is not None and not request.scoring.may_reuse
        num_below = 0 if num_saved or is_scored or tiers is None else tiers.num_loadable_blocks(request, found)
        tail = None if num_saved or num_below or is_scored else self._in_flight.matching_tail(request, found)
        num_cached = (found + num_below) * self._blocks.block_size
        num_here = num_saved or (tail.num_tokens if tail is not None else num_cached)
        if not plan.has_room(request.num_tokens - num_here):
            return False
        # Before anything is evicted: evicted content may overwrite these slots.
        places: list[int] = []
        if tiers is not None and not num_saved:
            places = tiers.pin_for_load(request, found, num_below)
            tiers.record_misses(request, found + num_below)
        self._blocks.take_prefix(request, match)
        if tail is not None:
            plan.move(request, loads=[], copies=self._blocks.fork(request, tail.source, tail.block_index))
            request.num_computed_tokens = tail.num_tokens
        missing = self._blocks.blocks_for(request.num_tokens) - len(request.block_table)
        self._blocks.grow(request, self._blocks.allocate(missing))
        loads = [BlockLoad(slot, request.block_table[found + i]) for i, slot in enumerate(places)]
        if loads:
            request.num_computed_tokens = num_cached
        elif num_saved and offloading is not None:
            loads = offloading.resume(request)
        if loads:
            plan.move(request, loads=loads, copies=[])
            self._blocks.release_after_next_step(self._blocks.index_computed(request, found))
        if offloading is not None:
            offloading.drop(request.request_id)
        self._table.admit(request)
        self._in_flight.forget(request)
        self._in_flight.enter(request)
        self._note_admission(request, now)
        self._add(request, plan)
        return True

    def _note_admission(self, request: Request, now: float) -> None:
        if request.request_id in self._was_admitted:
            return
        self._was_admitted.add(request.request_id)
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._collector.admission(request, now)
