"""Shared prefixes of concurrent requests are computed once."""

from engine.scheduler.scheduler import Scheduler
from engine.scheduler.shared_prefills import MAX_STALLS
from engine.types.request import Batch, Request, RequestState
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner, assert_empty, continuation, run

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def choices(prompt: range, count: int = 8, **given: object) -> list[Request]:
    made = [ledger.request(prompt, params=PARAMS, arrival_s=float(k), **given) for k in range(count)]  # type: ignore[arg-type]
    for k, request in enumerate(made):
        request.choice_index = k
    return made


def step(sched: Scheduler, runner: LedgerRunner) -> Batch:
    batch = sched.schedule(100.0)
    assert batch is not None
    sched.commit(batch, runner.execute(batch))
    sched.check_invariants()
    return batch


def test_shared_prefill_eight_choices_compute_prompt_once() -> None:
    for length in (5, 16, 32, 33, 47, 48, 75):
        sched, runner = ledger.scheduler(num_blocks=64, max_running_requests=8), LedgerRunner()
        eight = choices(range(length))
        for request in eight:
            sched.add(request)
        outputs = run(sched, runner)
        for request in eight:
            assert outputs[request.request_id] == continuation(range(length), PARAMS)
        # The others compute the prompt's last token, whose logits they sample, unless it begins a block.
        assert runner.num_computed == length + 7 + 8 * (PARAMS.max_tokens - 1)
        assert eight[0].num_cached_tokens == 0
        assert {request.num_cached_tokens for request in eight[1:]} == {length - 1}
        assert_empty(sched)


def test_shared_prefill_choices_share_full_blocks_and_copy_partial() -> None:
    sched, runner = ledger.scheduler(num_blocks=64, max_running_requests=8, prefill_chunk_tokens=40), LedgerRunner()
    eight = choices(range(40))
    for request in eight:
        sched.add(request)
    assert [item.request for item in step(sched, runner).items] == eight[:1]
    batch = step(sched, runner)
    assert len(batch.items) == 8
    assert {copy.source for copy in batch.copies} == {eight[0].block_table[2]}
    assert sorted(copy.target for copy in batch.copies) == sorted(request.block_table[2] for request in eight[1:])
    assert len({tuple(request.block_table)[:2] for request in eight}) == 1
    assert sched.load().num_used_blocks == 2 + 8
    run(sched, runner)
    assert_empty(sched)


def test_shared_prefill_aborted_leader_is_replaced() -> None:
    sched, runner = ledger.scheduler(num_blocks=64, max_running_requests=8), LedgerRunner()
    eight = choices(range(75))
    for request in eight:
        sched.add(request)
    step(sched, runner)
    step(sched, runner)
    assert [request.state for request in eight[:2]] == [RequestState.RUNNING, RequestState.WAITING]
    sched.abort(eight[0].request_id)
    outputs = run(sched, runner)
    for request in eight[1:]:
        assert outputs[request.request_id] == continuation(range(75), PARAMS)
    # What the first had computed of whole blocks is a cache hit for the second.
    assert eight[1].num_cached_tokens == 32
    assert runner.num_computed == 40 + (75 - 32) + 6 + 7 * (PARAMS.max_tokens - 1)
    assert_empty(sched)


def test_shared_prefill_common_prefix_is_computed_once() -> None:
    sched, runner = ledger.scheduler(num_blocks=64, max_running_requests=8, prefill_chunk_tokens=20), LedgerRunner()
    prompts = [[*range(64), 90 + k, *range(5)] for k in range(3)]
    requests = [ledger.request(prompt, params=PARAMS, arrival_s=float(k)) for k, prompt in enumerate(prompts)]
    for request in requests:
        sched.add(request)
    outputs = run(sched, runner)
    for request, prompt in zip(requests, prompts, strict=True):
        assert outputs[request.request_id] == continuation(prompt, PARAMS)
    assert runner.num_computed == 64 + 3 * 6 + 3 * (PARAMS.max_tokens - 1)
    assert_empty(sched)


def test_shared_prefill_other_requests_run_while_choices_wait() -> None:
    sched, runner = ledger.scheduler(num_blocks=64, max_running_requests=8, prefill_chunk_tokens=40), LedgerRunner()
    twins = choices(range(30), 3)
    other = ledger.request(range(50, 60), arrival_s=9.0)
    for request in (*twins, other):
        sched.add(request)
    assert [item.request for item in step(sched, runner).items] == [twins[0], other]
    run(sched, runner)
    assert_empty(sched)


def test_shared_prefill_stalled_leader_is_not_awaited_forever() -> None:
    """Only progress extends the wait."""
    sched, runner = ledger.scheduler(num_blocks=64, max_batched_tokens=2, prefill_chunk_tokens=2), LedgerRunner()
    leader = ledger.request(range(60), params=PARAMS)
    follower = ledger.request(range(60), params=PARAMS, arrival_s=1.0)
    sched.add(leader)
    sched.add(follower)
    step(sched, runner)
    in_flight, looks = sched._planner._in_flight, 0
    in_flight.begin_step()
    while in_flight.must_wait(follower, 0):
        in_flight.begin_step()
        looks += 1
    assert looks == MAX_STALLS
    leader.num_computed_tokens += 1
    assert in_flight.must_wait(follower, 0)
    leader.num_computed_tokens -= 1
    run(sched, runner)
    assert_empty(sched)


def test_shared_prefill_lower_priority_leader_is_not_awaited() -> None:
    sched, runner = ledger.scheduler(num_blocks=64, prefill_chunk_tokens=20), LedgerRunner()
    low = ledger.request(range(60), params=PARAMS, priority=3)
    sched.add(low)
    step(sched, runner)
    high = ledger.request(range(60), params=PARAMS, arrival_s=5.0)
    sched.add(high)
    batch = step(sched, runner)
    assert [item.request for item in batch.items] == [high]
    outputs = run(sched, runner)
    assert outputs[low.request_id] == outputs[high.request_id] == continuation(range(60), PARAMS)
    assert_empty(sched)


def test_shared_prefill_of_choices_shares_pinned_blocks() -> None:
    sched, runner = ledger.scheduler(num_blocks=64, max_running_requests=8), LedgerRunner()
    four = choices(range(75), 4, prefill_only=True)
    for request in four:
        sched.add(request)
        sched.pin_blocks(request.request_id)
    run(sched, runner)
    assert runner.num_computed == 75 + 3
    assert {request.state for request in four} == {RequestState.HELD}
    assert sched.load().num_used_blocks == 4 + 4
    for request in four:
        assert runner.read(request.block_table, 75) == ledger.kv_of(range(75))
        sched.release_held(request.request_id)
    assert sched.load().num_used_blocks == 4 + 4
    for request in four:
        sched.unpin_blocks(request.request_id)
    assert_empty(sched)


def test_shared_prefill_copied_block_is_evicted_before_its_prefix() -> None:
    """Its owner ends and fills it, and who copies it is aborted, while the copy is still under way.

    Then all of it becomes cache at once, and what a block stands on must be evicted after it.
    """
    sched, runner = ledger.scheduler(num_blocks=4), LedgerRunner()
    params = SamplingParams(max_tokens=13, ignore_eos=True)  # with the prompt, two blocks and a token
    owner, copier = (ledger.request(range(20), params=params, arrival_s=float(k)) for k in range(2))
    sched.add(owner)
    for _ in range(12):
        step(sched, runner)
    last = sched.schedule(100.0)
    assert last is not None
    sampled = runner.execute(last)
    sched.add(copier)
    copying = sched.schedule(100.0)
    assert copying is not None
    assert [copy.source for copy in copying.copies] == [owner.block_table[1]]
    copied = runner.execute(copying)
    sched.commit(last, sampled)
    assert owner.state is RequestState.FINISHED
    assert sched.abort(copier.request_id)
    sched.commit(copying, copied)
    assert_empty(sched)
    sched.add(ledger.request(range(50, 110)))  # needs the whole pool
    run(sched, runner)
    assert_empty(sched)
