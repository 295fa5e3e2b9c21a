"""Random histories of a whole worker's scheduler, in all its roles at once, against expected results."""

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.kv_cache.eviction import POLICIES
from engine.kv_cache.lower_tiers import HostTier
from engine.kv_cache.pool import PoolExhausted
from engine.kv_cache.tiers.costs import MeasuredRates
from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.request import Batch, FinishReason, Request, RequestState
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockId, RequestId, TransferId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner
from tests.unit.engine.kv_cache.test_pool_machine import prompts


class SchedulerMachine(RuleBasedStateMachine):
    """A worker in all its roles at once; every finished request must have the expected output."""

    @initialize(
        num_blocks=st.integers(12, 30),
        chunk=st.integers(1, 40),
        budget=st.integers(1, 60),
        rows=st.integers(1, 5),
        num_slots=st.integers(0, 12),
        with_decodes=st.integers(1, 40),
        policy=st.tuples(st.sampled_from(sorted(POLICIES)), st.integers(0, 3), st.sampled_from([None, 4.0])),
    )
    def start(
        self,
        num_blocks: int,
        chunk: int,
        budget: int,
        rows: int,
        num_slots: int,
        with_decodes: int,
        policy: tuple[str, int, float | None],
    ) -> None:
        config = ledger.config(
            num_blocks=num_blocks,
            max_model_len=120,
            prefill_chunk_tokens=chunk,
            max_batched_tokens=budget,
            max_running_requests=rows,
            max_waiting_requests=1000,
            eviction=policy[0],
            max_overtakes=policy[1],
            priority_aging_s=policy[2],
        )
        self.tier = HostTier(num_slots)
        self.runner = self.make_runner()
        self.sched = self.make_scheduler(config)
        if self.sched.offloading is not None:
            # Copying is next to free: whatever fits in the tier goes there.
            self.sched.offloading.rates = MeasuredRates(
                prefill_tokens_per_s=1.0, offload_bytes_per_s=1e9, load_bytes_per_s=1e9
            )
        self.sched._planner._pace = ledger.Crawl(with_decodes)
        self.now = 0.0
        self.requests: dict[RequestId, Request] = {}
        self.prompts: dict[RequestId, list[int]] = {}
        self.outputs: dict[RequestId, list[int]] = {}
        self.ended: dict[RequestId, FinishReason] = {}
        self.reserved: dict[TransferId, Request] = {}
        self.stale_writers: dict[TransferId, tuple[BlockId, ...]] = {}
        self.sources: dict[RequestId, list[BlockId]] = {}
        self.pinned: dict[RequestId, list[BlockId]] = {}

    def make_runner(self) -> LedgerRunner:
        return LedgerRunner()

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return Scheduler(config, BlockHasher(ledger.SECRET), tier=self.tier, block_bytes=1)

    def expected(self, request: Request) -> list[int]:
        return ledger.continuation(self.prompts[request.request_id], request.params, limit=120)

    def make(
        self,
        prompt: list[int],
        max_tokens: int,
        *,
        prefill_only: bool,
        priority: int,
        patience_s: float | None = None,
    ) -> Request:
        self.now += 1.0
        params = SamplingParams(max_tokens=max_tokens)
        request = ledger.request(
            prompt,
            params=params,
            prefill_only=prefill_only,
            priority=priority,
            arrival_s=self.now,
            deadline_s=None if patience_s is None else self.now + patience_s,
        )
        self.requests[request.request_id] = request
        self.prompts[request.request_id] = prompt
        self.outputs[request.request_id] = []
        return request

    def pick(self, data: st.DataObject, among: object) -> object | None:
        choices = list(among)  # type: ignore[call-overload]
        return data.draw(st.sampled_from(choices)) if choices else None

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 40),
        prefill_only=st.booleans(),
        priority=st.integers(0, 1),
        seen=st.integers(0, 3),
        patience_s=st.none() | st.integers(1, 6),
        num_choices=st.sampled_from([1, 1, 1, 2, 4]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        prefill_only: bool,
        priority: int,
        seen: int,
        patience_s: float | None,
        num_choices: int,
    ) -> None:
        for _ in range(num_choices):
            request = self.make(prompt, max_tokens, prefill_only=prefill_only, priority=priority, patience_s=patience_s)
            resumed = self.expected(request)[:seen]
            request.token_ids.extend(resumed)
            self.outputs[request.request_id] = resumed
            self.sched.add(request)

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            batch = self.sched.schedule(self.now)
            if batch is None:
                self.take_output(self.sched.drain())
                return
            self.check_writes(batch)
            self.take_output(self.sched.commit(batch, self.runner.execute(batch)))
            for transfer_id in self.stale_writers:
                self.write_garbage(transfer_id)

    def settle(self) -> None:
        """Nothing is in flight: each step here ends before the next begins."""

    def check_writes(self, batch: Batch) -> None:
        """No block is written while another owner reads it; copies read their source first."""
        pool = self.sched.blocks.pool
        read = [copy.source for copy in batch.copies]
        for item in batch.items:
            table, end = item.request.block_table, item.start + item.num_tokens
            for i in range(item.start // ledger.BLOCK, -(-end // ledger.BLOCK)):
                assert pool.num_refs(table[i]) - read.count(table[i]) == 1
        assert not {*read} & {copy.target for copy in batch.copies}

    def take_output(self, output: object) -> None:
        for event in output.events:  # type: ignore[attr-defined]
            assert event.request_id not in self.ended, "reported after its end"
            assert event.index == len(self.outputs[event.request_id])
            if event.token is not None:
                self.outputs[event.request_id].append(event.token.token_id)
            if event.finish_reason is not None:
                self.ended[event.request_id] = event.finish_reason
        for part in output.progress:  # type: ignore[attr-defined]
            blocks = self.sources.setdefault(part.request_id, [])
            assert part.first_block_index == len(blocks)
            blocks.extend(part.block_ids)
            num_tokens = part.num_computed_tokens if part.is_complete else len(blocks) * ledger.BLOCK
            known = self.requests[part.request_id].token_ids[:num_tokens]
            assert self.runner.read(blocks, num_tokens) == ledger.kv_of(known), "reported before it was there"

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = self.pick(data, (r for r in self.requests.values() if r.state is not RequestState.FINISHED))
        if isinstance(request, Request) and request not in self.reserved.values():
            self.sched.abort(request.request_id)

    @rule(data=st.data())
    def release_held(self, data: st.DataObject) -> None:
        request = self.pick(data, (r for r in self.requests.values() if r.state is RequestState.HELD))
        if isinstance(request, Request):
            self.sched.release_held(request.request_id)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        held = (r for r in self.requests.values() if r.state is RequestState.HELD and r.request_id not in self.pinned)
        request = self.pick(data, held)
        if isinstance(request, Request):
            self.sched.pin_blocks(request.request_id)
            self.pinned[request.request_id] = list(request.block_table)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        request_id = self.pick(data, self.pinned)
        if isinstance(request_id, str):
            del self.pinned[RequestId(request_id)]
            self.sched.unpin_blocks(RequestId(request_id))

    @rule(prompt=prompts, max_tokens=st.integers(1, 40), bind=st.booleans())
    def reserve(self, prompt: list[int], max_tokens: int, bind: bool) -> None:
        request = self.make(prompt, max_tokens, prefill_only=False, priority=0)
        transfer_id = TransferId(f"t{request.request_id}")
        try:
            grant = self.sched.reservations.reserve(transfer_id, request)
        except PoolExhausted:
            assert not len(request.block_table)
            request.state = RequestState.FINISHED
            return
        self.reserved[transfer_id] = request
        if bind:
            assert len(self.sched.reservations.bind(transfer_id)) == grant.num_blocks

    @rule(
        data=st.data(),
        outcome=st.sampled_from(["commit", "partial", "retry", "cancel", "quarantine"]),
        quiet=st.booleans(),
    )
    def end_transfer(self, data: st.DataObject, outcome: str, quiet: bool) -> None:
        transfer_id = self.pick(data, self.reserved)
        if not isinstance(transfer_id, str):
            return
        transfer_id = TransferId(transfer_id)
        request, reservations = self.reserved[transfer_id], self.sched.reservations
        was_bound = data.draw(st.booleans()) or outcome == "commit"
        total, held = request.num_tokens, request.num_computed_tokens
        if was_bound or len(request.block_table) > held // ledger.BLOCK:
            bound = reservations.bind(transfer_id)
            landed = total if outcome == "commit" else data.draw(st.integers(held, total))
            self.land(request, held, landed)
            if outcome != "commit" and not (quiet and outcome != "quarantine"):
                num_landed = (landed - held) // ledger.BLOCK if outcome != "quarantine" else 0
                self.stale_writers[transfer_id] = self.awaited(request, bound[num_landed:])
        else:
            landed = held
        del self.reserved[transfer_id]  # after the last draw: one that finds no more data ends the history there
        self.finish_transfer(transfer_id, request, outcome, landed, quiet)
        if transfer_id in self.stale_writers:
            self.write_garbage(transfer_id)

    def land(self, request: Request, held: int, landed: int) -> None:
        """What a transport does: tokens [held, landed) arrive."""
        self.runner.write_range(request.block_table, request.token_ids, held, landed)

    def awaited(self, _request: Request, blocks: tuple[BlockId, ...]) -> tuple[BlockId, ...]:
        """All blocks that a writer may still write, of those token blocks at the request's end."""
        return blocks

    def finish_transfer(
        self, transfer_id: TransferId, request: Request, outcome: str, landed: int, quiet: bool
    ) -> None:
        reservations = self.sched.reservations
        first = self.expected(request)[0]
        if outcome == "commit":
            self.outputs[request.request_id].append(first)
            reservations.commit(transfer_id, first)
        elif outcome == "partial":
            self.outputs[request.request_id].append(first)
            reservations.commit_partial(transfer_id, landed, first_token=first, writer_is_quiet=quiet)
        elif outcome == "retry":
            reservations.salvage(transfer_id, landed, writer_is_quiet=quiet)
            self.sched.add(request)
        else:
            reservations.cancel(transfer_id) if outcome == "cancel" and quiet else reservations.quarantine(transfer_id)
            request.state = RequestState.FINISHED

    def write_garbage(self, transfer_id: TransferId) -> None:
        for position in range(len(self.stale_writers[transfer_id]) * ledger.BLOCK):
            self.runner.write(self.stale_writers[transfer_id], position, -5)

    @rule(data=st.data())
    def writer_goes_quiet(self, data: st.DataObject) -> None:
        transfer_id = self.pick(data, self.stale_writers)
        if isinstance(transfer_id, str):
            del self.stale_writers[TransferId(transfer_id)]
            self.sched.reservations.release_quarantine(TransferId(transfer_id))

    @invariant()
    def conserved(self) -> None:
        self.sched.check_invariants()

    @invariant()
    def assert_same_answers(self) -> None:
        for request_id, outputs in self.outputs.items():
            request = self.requests[request_id]
            expected = self.expected(request)
            assert outputs == expected[: len(outputs)]
            cut_short = (None, FinishReason.ABORT, FinishReason.DEADLINE)
            if self.ended.get(request_id) not in cut_short:
                assert outputs == expected

    @invariant()
    def pinned_sources_keep_their_content(self) -> None:
        for request_id, blocks in self.pinned.items():
            prompt = self.prompts[request_id]
            assert self.runner.read(blocks, len(prompt)) == ledger.kv_of(prompt)

    def teardown(self) -> None:
        """End every hand-off: whatever happened, all the rest then completes and nothing is left."""
        if not hasattr(self, "sched"):
            return
        for transfer_id in [*self.stale_writers]:
            del self.stale_writers[transfer_id]
            self.sched.reservations.release_quarantine(transfer_id)
        for transfer_id, request in self.reserved.items():
            self.sched.reservations.cancel(transfer_id)
            request.state = RequestState.FINISHED
        for request_id in self.pinned:
            self.sched.unpin_blocks(request_id)
        while any(request.state is not RequestState.FINISHED for request in self.requests.values()):
            self.step(1)
            for request in self.requests.values():
                self.sched.release_held(request.request_id)
        self.settle()
        self.take_output(self.sched.drain())
        self.assert_same_answers()
        ledger.assert_empty(self.sched)
        assert self.tier.num_free == self.tier.num_slots


SchedulerMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestScheduler = SchedulerMachine.TestCase
