"""What the engine computes next: requests catch up with their tokens, within budgets, oldest first.

One step is `schedule` → a runner executes the batch → `commit`. There is no prefill and no decode phase: a request's
`num_computed_tokens` trails its tokens by a prompt, by one, or by everything after a preemption, and each step
closes some of the gap. Blocks for all known tokens are taken when a request is admitted, so only sampling makes a
request grow, and a `prefill_only` request, which samples once, is never preempted under a running hand-off.

Progress: a total rank (priority, arrival, id) orders everything. A request that finds no block preempts the
last-ranked one, itself if need be, never one before it; the queue is admitted strictly in rank order, and while
its head finds no room nothing else enters, reservations included. So the first-ranked request always advances,
unless all blocks are held by hand-offs, which end by lease.
"""

from collections import Counter
from collections.abc import Sequence

from engine.block_manager import BlockManager
from engine.blocks import PoolExhausted
from engine.config import EngineConfig
from engine.kv_events import KVEventLog
from engine.limits import check_size, finish_reason
from engine.notices import Notices
from engine.request import Batch, BatchItem, FinishReason, Request, RequestState, SampledToken
from engine.request_queue import RequestQueue, rank
from engine.reservations import Reservations
from engine.step import Load, StepOutput
from engine.step_plan import StepPlan
from tandem.block_hash import BlockHasher
from tandem.errors import InvalidRequest, InvariantError, Overloaded
from tandem.ids import BlockId, RequestId

_RETRY_AFTER_S = 1.0


class Scheduler:
    """All requests of one worker and the blocks they use. Plain, synchronous, touched by the engine thread alone.

    Between `schedule` and the `commit` of its batch nothing may be called: the runner works on live tables.
    """

    def __init__(self, config: EngineConfig, hasher: BlockHasher) -> None:
        self._config = config
        kv_events = KVEventLog(config.kv_event_capacity)
        self.blocks = BlockManager(
            num_blocks=config.num_blocks, block_size=config.block_size, hasher=hasher, events=kv_events
        )
        self.reservations = Reservations(self.blocks, screen=self._screen_reservation, adopt=self._adopt_reserved)
        self._requests: dict[RequestId, Request] = {}
        self._waiting = RequestQueue()
        self._num_waiting_tokens = 0
        self._running = RequestQueue()
        self._was_admitted: set[RequestId] = set()
        self._head_is_blocked = False
        self._notices = Notices(kv_events)

    # Entering and leaving

    def add(self, request: Request) -> None:
        """Queue a request; one whose last token already ends it (a resume that lost only the end) ends at once.

        Raises InvalidRequest, ContextLengthExceeded, RequestTooLarge (it can never run), Overloaded (queue full).
        """
        self._screen(request)
        if len(self._waiting) >= self._config.max_waiting_requests:
            raise Overloaded(f"{len(self._waiting)} requests are waiting", retry_after_s=_RETRY_AFTER_S)
        self._adopt(request)

    def match_prefix(self, request: Request) -> int:
        """Tokens of the request whose KV is here now. Pins nothing: `reserve` and admission look again and pin."""
        return len(self.blocks.match(request).blocks) * self._config.block_size

    def abort(self, request_id: RequestId) -> bool:
        """End a request in any state with reason "abort"; False when it is unknown or already over.

        One that is still reserved is ended through `reservations`, which know whether its writer is quiet.
        """
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, FinishReason.ABORT)
        return True

    def release_held(self, request_id: RequestId) -> bool:
        """Let go of a finished prefill after its hand-off; False when it is not (or no longer) held."""
        request = self._requests.get(request_id)
        if request is None or request.state is not RequestState.HELD:
            return False
        self._retire(request)
        return True

    def pin_blocks(self, request_id: RequestId) -> None:
        """A transfer starts reading the request's blocks: they outlive even its abort, until `unpin_blocks`.

        Counted: one per transfer. InvalidRequest when the request is not here.
        """
        if request_id not in self._requests:
            raise InvalidRequest(f"request {request_id} is not here")
        self.blocks.pin(request_id)

    def unpin_blocks(self, request_id: RequestId) -> None:
        """A transfer is quiet; the request itself may be long gone."""
        self.blocks.unpin(request_id)

    def _screen(self, request: Request) -> None:
        request_id = request.request_id
        if request_id in self._requests or self.reservations.has_request(request_id):
            raise InvalidRequest(f"request {request_id} is already here")
        if finish_reason(request, self._config) is None:
            check_size(request, self._config)

    def _screen_reservation(self, request: Request) -> None:
        self._screen(request)
        if finish_reason(request, self._config) is not None:
            raise InvalidRequest(f"request {request.request_id} is already complete")
        if self._head_is_blocked:
            raise PoolExhausted("requests before this one wait for KV blocks", retry_after_s=_RETRY_AFTER_S)

    def _adopt(self, request: Request) -> None:
        """Take over a request that holds all its KV but the last token's, or none at all."""
        self._requests[request.request_id] = request
        reason = finish_reason(request, self._config)
        if len(request.block_table):
            request.move_to(RequestState.RUNNING)
            self._running.add(request)
        else:
            self._enqueue(request)
        if reason is not None:
            self._end(request, reason)

    def _adopt_reserved(self, request: Request) -> None:
        # Its reservation was its admission: the prefix found then is what it was spared, not what landed since.
        self._was_admitted.add(request.request_id)
        self._adopt(request)

    def _enqueue(self, request: Request) -> None:
        self._waiting.add(request)
        self._num_waiting_tokens += request.num_tokens

    def _dequeue(self, request: Request) -> None:
        self._waiting.remove(request)
        self._num_waiting_tokens -= request.num_tokens

    def _end(self, request: Request, reason: FinishReason) -> None:
        # A held prefill whose one token was also its last has told its end already.
        if request.finish_reason is None:
            request.finish_reason = reason
            self._notices.end(request, reason)
        self._retire(request)

    def _retire(self, request: Request) -> None:
        if request.state is RequestState.WAITING:
            self._dequeue(request)
        elif request.state is RequestState.RUNNING:
            self._running.remove(request)
        request.move_to(RequestState.FINISHED)
        self.blocks.surrender(request.request_id, request.block_table.clear())
        del self._requests[request.request_id]
        self._was_admitted.discard(request.request_id)
        self._notices.forget(request.request_id)

    # Choosing a batch

    def schedule(self, now: float) -> Batch | None:
        """Choose the next step's work; None when nothing can run until somebody adds, releases or aborts.

        `now` is on the clock of the requests' `arrival_s`. Costs O(running requests + admitted blocks).
        """
        plan = StepPlan(
            max_tokens=self._config.max_batched_tokens,
            max_rows=self._config.max_running_requests,
            chunk_tokens=self._config.prefill_chunk_tokens,
        )
        self._plan_running(plan)
        # After a preemption the room is for those who run; only when it left nobody may the queue be asked.
        if not plan.has_preempted or not len(plan):
            self._plan_waiting(plan, now)
        return plan.batch()

    def _plan_running(self, plan: StepPlan) -> None:
        """Requests one token behind come first, since somebody reads along; then the chunks of longer gaps."""
        running = list(self._running)
        behind = [request for request in running if request.num_uncomputed_tokens > 1]
        # One row is kept for the oldest even if it is in the middle of its prompt: everybody progresses in turn.
        spare = 1 if behind and behind[0] is running[0] else 0
        for request in running:
            if request.num_uncomputed_tokens == 1 and plan.has_room(spare):
                self._plan_one(request, plan)
        for request in behind:
            if plan.has_room():
                self._plan_one(request, plan)

    def _plan_one(self, request: Request, plan: StepPlan) -> None:
        """Schedule a running request, taking blocks from those behind it when there are no others."""
        if request.state is not RequestState.RUNNING:
            return
        num_missing = self.blocks.blocks_for(request.num_tokens) - len(request.block_table)
        while num_missing > self.blocks.num_available:
            victim = self._last_preemptible()
            if victim is None or rank(victim) <= rank(request):
                self._preempt(request, plan)
                return
            self._preempt(victim, plan)
        if num_missing:
            self.blocks.grow(request, self.blocks.allocate(num_missing))
        plan.add(request)

    def _last_preemptible(self) -> Request | None:
        """The last-ranked running request whose blocks would really come free."""
        for request in reversed(self._running):
            if not request.prefill_only and not self.blocks.is_pinned(request.request_id):
                return request
        return None

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Back to the queue, nothing computed; what it had computed stays findable while memory allows."""
        plan.drop(request)
        plan.has_preempted = True
        self._head_is_blocked = True
        self._running.remove(request)
        self.blocks.surrender(request.request_id, request.block_table.clear())
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.move_to(RequestState.WAITING)
        self._enqueue(request)
        self._notices.preemption(request)

    def _plan_waiting(self, plan: StepPlan, now: float) -> None:
        """Admit from the head of the queue; a head without room preempts only lower priorities, else all wait."""
        self._head_is_blocked = False
        while len(self._waiting) and plan.has_room() and len(self._running) < self._config.max_running_requests:
            request = self._waiting.first()
            if not self._take_blocks(request):
                victim = self._last_preemptible()
                if victim is None or victim.priority <= request.priority:
                    self._head_is_blocked = True
                    return
                self._preempt(victim, plan)
                continue
            self._dequeue(request)
            request.move_to(RequestState.RUNNING)
            self._running.add(request)
            self._note_admission(request, now)
            plan.add(request)
            if plan.has_preempted:
                return

    def _take_blocks(self, request: Request) -> bool:
        """Take all blocks that the request needs now, or none."""
        # Beside others some room stays for their growth, or the newcomer would be preempted at once.
        margin = 1 + self._config.num_blocks // 100 if len(self._running) else 0
        match = self.blocks.match(request)
        if match.cost + margin > self.blocks.num_available:
            return False
        self.blocks.take_prefix(request, match)
        self.blocks.grow(request, self.blocks.allocate(match.num_missing))
        return True

    def _note_admission(self, request: Request, now: float) -> None:
        if request.request_id in self._was_admitted:
            return
        self._was_admitted.add(request.request_id)
        request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._notices.admission(request, now)

    # Taking in the results

    def commit(self, batch: Batch, sampled: Sequence[SampledToken]) -> StepOutput:
        """Account for an executed batch: one sampled token per sampling item, in order."""
        if len(sampled) != sum(item.samples for item in batch.items):
            raise InvariantError(f"{len(sampled)} tokens sampled for {len(batch.items)} items")
        tokens = iter(sampled)
        for item in batch.items:
            self._commit_item(item, next(tokens) if item.samples else None)
        return self.drain()

    def _commit_item(self, item: BatchItem, token: SampledToken | None) -> None:
        request = item.request
        request.num_computed_tokens = item.start + item.num_tokens
        displaced = self.blocks.index_computed(request, item.start // self._config.block_size)
        if displaced:
            self.blocks.surrender(request.request_id, displaced)
        if request.prefill_only:
            self._notices.progress(request, self._config.block_size)
        if token is None:
            return
        request.token_ids.append(token.token_id)
        reason = finish_reason(request, self._config)
        request.finish_reason = reason
        self._notices.token(request, token, reason)
        if request.prefill_only:
            self._running.remove(request)
            request.move_to(RequestState.HELD)
        elif reason is not None:
            self._retire(request)

    # Telling

    @property
    def has_notices(self) -> bool:
        """Whether something happened that no output has told yet."""
        return bool(self._notices)

    @property
    def has_admissions(self) -> bool:
        """Whether a request has just left the queue: worth telling before its step is executed."""
        return self._notices.has_admissions

    def drain(self) -> StepOutput:
        """Everything since the last output, told once."""
        return self._notices.drain(self.load())

    def load(self) -> Load:
        """The worker's occupation now; O(running requests)."""
        backlog = self._num_waiting_tokens + sum(request.num_uncomputed_tokens for request in self._running)
        return Load(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_held=len(self._requests) - len(self._running) - len(self._waiting),
            num_reservations=len(self.reservations),
            num_backlog_tokens=backlog,
            num_blocks=self.blocks.pool.num_blocks,
            num_used_blocks=self.blocks.pool.num_used,
            num_evictable_blocks=self.blocks.pool.num_idle,
            num_promised_blocks=self.blocks.num_promised,
            num_quarantined_blocks=self.reservations.num_quarantined_blocks,
        )

    def check_invariants(self) -> None:
        """Every reference count is accounted for by its owners; O(num_blocks), for tests and audits."""
        self.blocks.check_invariants()
        owned = self.reservations.references() + self.blocks.pinned_blocks()
        for request in self._requests.values():
            owned.extend(request.block_table)
        owners = Counter(owned)
        for block in map(BlockId, range(self.blocks.pool.num_blocks)):
            if owners[block] != self.blocks.pool.num_refs(block):
                raise InvariantError(
                    f"block {block} has {owners[block]} owners and {self.blocks.pool.num_refs(block)} references"
                )
