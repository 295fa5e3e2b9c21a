import random
import subprocess
import sys
from collections import Counter

import pytest

from engine.types.request import FinishReason, RequestState
from tandem.errors import ContextLengthExceeded, InvalidRequest, Overloaded, RequestTooLarge
from tandem.values.ids import RequestId, TransferId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner, assert_empty, continuation, run

PROMPT = list(range(50))
T1 = TransferId("t1")


def test_scheduler_tokens_are_independent_of_chunks_and_batch() -> None:
    prompts = [[k * 13 % 97 for k in range(n)] for n in (1, 15, 16, 17, 33, 90)]
    for chunk, budget in ((1, 1), (7, 7), (16, 48), (200, 200)):
        sched, runner = ledger.scheduler(prefill_chunk_tokens=chunk, max_batched_tokens=budget), LedgerRunner()
        requests = [ledger.request(prompt) for prompt in prompts]
        for request in requests:
            sched.add(request)
        outputs = run(sched, runner)
        for request, prompt in zip(requests, prompts, strict=True):
            assert outputs[request.request_id] == continuation(prompt, request.params)
        assert_empty(sched)


def test_scheduler_blocks_of_several_hash_blocks_are_shared() -> None:
    sched, runner = ledger.scheduler(block_size=48, num_blocks=8), LedgerRunner(48)
    first, second = ledger.request(range(100)), ledger.request(range(100))
    sched.add(first)
    run(sched, runner)
    sched.add(second)
    assert run(sched, runner)[second.request_id] == continuation(range(100), second.params)
    assert second.num_cached_tokens == 96
    assert_empty(sched)


def test_scheduler_prefix_hit_leaves_one_token_and_is_reported() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    sched.add(ledger.request(range(48)))
    run(sched, runner)
    before = runner.num_computed
    again = ledger.request(range(48))
    assert sched.match_prefix(again) == 32
    sched.add(again)
    assert run(sched, runner)[again.request_id] == continuation(range(48), again.params)
    assert again.num_cached_tokens == 32
    assert runner.num_computed - before == 16 + again.params.max_tokens - 1


def test_scheduler_equal_concurrent_prompts_share_blocks() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    twins = [ledger.request(range(64), prefill_only=True) for _ in range(3)]
    for twin in twins:
        sched.add(twin)
    run(sched, runner)
    assert twins[0].block_table.ids == twins[1].block_table.ids == twins[2].block_table.ids
    assert sched.load().num_used_blocks == 4
    for twin in twins:
        sched.release_held(twin.request_id)
    assert_empty(sched)


def test_scheduler_preemption_keeps_tokens_and_favours_oldest() -> None:
    sched, runner = ledger.scheduler(num_blocks=8, max_model_len=128), LedgerRunner()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    requests = [ledger.request([k] * 20, arrival_s=float(k), params=params) for k in range(4)]
    for request in reversed(requests):
        sched.add(request)
    outputs = run(sched, runner)
    for request in requests:
        assert outputs[request.request_id] == continuation(request.token_ids[:20], params)
    assert requests[0].num_preemptions == 0
    assert sum(request.num_preemptions for request in requests) > 0
    assert_empty(sched)


def test_scheduler_higher_priority_preempts_lower() -> None:
    sched, runner = ledger.scheduler(num_blocks=6, max_model_len=96), LedgerRunner()
    low = ledger.request(range(60), priority=5, params=SamplingParams(max_tokens=30, ignore_eos=True))
    sched.add(low)
    for _ in range(6):
        batch = sched.schedule(0.0)
        assert batch is not None
        sched.commit(batch, runner.execute(batch))
    high = ledger.request(range(40, 90), priority=1, arrival_s=9.0)
    sched.add(high)
    batch = sched.schedule(9.0)
    assert batch is not None
    assert [item.request for item in batch.items] == [high]
    assert low.state is RequestState.WAITING
    assert low.num_computed_tokens == 0
    output = sched.commit(batch, runner.execute(batch))
    assert output.preemptions == (low.request_id,)
    run(sched, runner)
    assert list(low.token_ids[60:]) == continuation(range(60), low.params)
    assert_empty(sched)


def test_scheduler_reports_finish_reason() -> None:
    base = continuation(PROMPT, SamplingParams(max_tokens=6, ignore_eos=True))
    stop = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(base[1],))
    late = SamplingParams(max_tokens=6, ignore_eos=True, stop_token_ids=(base[1],), min_tokens=4)
    sched, runner = ledger.scheduler(), LedgerRunner()
    requests = [ledger.request(PROMPT, params=params) for params in (stop, late)]
    long = ledger.request(range(195), params=SamplingParams(max_tokens=50, ignore_eos=True))
    for request in (*requests, long):
        sched.add(request)
    outputs = run(sched, runner)
    assert outputs[requests[0].request_id] == base[:2]
    assert requests[0].finish_reason is FinishReason.STOP
    assert outputs[requests[1].request_id] == continuation(PROMPT, late)
    assert len(outputs[requests[1].request_id]) >= 4
    assert len(outputs[long.request_id]) == 5
    assert long.finish_reason is FinishReason.LENGTH


def test_scheduler_end_token_stops_unless_ignored() -> None:
    params = SamplingParams(max_tokens=150)
    prompt = next(p for p in ([k, k + 1] for k in range(90)) if continuation(p, params)[-1] == ledger.EOS)
    sched, runner = ledger.scheduler(), LedgerRunner()
    request = ledger.request(prompt, params=params)
    sched.add(request)
    assert run(sched, runner)[request.request_id] == continuation(prompt, params)
    assert request.token_ids[-1] == ledger.EOS
    assert request.finish_reason is FinishReason.STOP


def test_scheduler_impossible_request_is_refused_at_once() -> None:
    sched = ledger.scheduler(num_blocks=4, max_model_len=100)
    with pytest.raises(InvalidRequest, match="empty"):
        sched.add(ledger.request([]))
    with pytest.raises(ContextLengthExceeded):
        sched.add(ledger.request(range(100)))
    with pytest.raises(ContextLengthExceeded):
        sched.add(ledger.request(range(50), params=SamplingParams(max_tokens=60, min_tokens=51)))
    with pytest.raises(RequestTooLarge):
        sched.add(ledger.request(range(64)))
    with pytest.raises(RequestTooLarge):
        sched.reservations.reserve(T1, ledger.request(range(64)))
    sched.add(ledger.request(range(5), request_id="twice"))
    with pytest.raises(InvalidRequest, match="already exists"):
        sched.add(ledger.request(range(5), request_id="twice"))
    assert sched.load().num_waiting == 1


def test_scheduler_queue_is_bounded() -> None:
    sched = ledger.scheduler(max_waiting_requests=2)
    for _ in range(2):
        sched.add(ledger.request(PROMPT))
    with pytest.raises(Overloaded) as refusal:
        sched.add(ledger.request(PROMPT))
    assert refusal.value.retry_after_s


def test_scheduler_resume_continues_and_repeats_lost_end() -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    output = continuation(PROMPT, params)
    sched, runner = ledger.scheduler(), LedgerRunner()
    resumed = ledger.request(PROMPT, output=output[:5], params=params)
    complete = ledger.request(PROMPT, output=output, params=params)
    sched.add(resumed)
    sched.add(complete)
    (event,) = sched.drain().events
    assert (event.request_id, event.index, event.token) == (complete.request_id, 8, None)
    assert event.finish_reason is FinishReason.LENGTH
    assert run(sched, runner)[resumed.request_id] == output[5:]
    assert_empty(sched)


def test_scheduler_abort_in_any_state_ends_once() -> None:
    sched, runner = ledger.scheduler(num_blocks=8, max_model_len=128), LedgerRunner()
    held = ledger.request(PROMPT[:10], prefill_only=True)
    running = ledger.request(range(60, 90), arrival_s=1.0)
    waiting = ledger.request(range(96), arrival_s=2.0)
    for request in (held, running, waiting):
        sched.add(request)
    for _ in range(2):
        batch = sched.schedule(2.0)
        assert batch is not None
        sched.commit(batch, runner.execute(batch))
    states = [request.state for request in (held, running, waiting)]
    assert states == [RequestState.HELD, RequestState.RUNNING, RequestState.WAITING]
    for request in (held, running, waiting):
        assert sched.abort(request.request_id)
        assert not sched.abort(request.request_id)
    events = sched.drain().events
    assert [e.request_id for e in events] == [held.request_id, running.request_id, waiting.request_id]
    assert {e.finish_reason for e in events} == {FinishReason.ABORT}
    assert_empty(sched)


def test_scheduler_many_requests_a_third_aborted_leave_nothing() -> None:
    rng = random.Random(7)
    sched, runner = ledger.scheduler(num_blocks=40), LedgerRunner()
    alive: dict[RequestId, list[int]] = {}
    ends: Counter[RequestId] = Counter()
    held: list[RequestId] = []
    added, aborted = 0, 0
    shared = [[rng.randrange(97) for _ in range(64)] for _ in range(3)]
    while added < 1000 or alive or held:
        while added < 1000 and len(alive) < 12:
            prompt = rng.choice(shared)[: rng.randrange(65)] + [rng.randrange(97) for _ in range(rng.randrange(1, 40))]
            params = SamplingParams(max_tokens=rng.randrange(1, 30), ignore_eos=rng.random() < 0.5)
            request = ledger.request(
                prompt, params=params, prefill_only=rng.random() < 0.2, arrival_s=added, priority=rng.randrange(2)
            )
            sched.add(request)
            alive[request.request_id] = prompt
            added += 1
        if alive and rng.random() < 0.3 and aborted < 300:
            victim = rng.choice([*alive])
            assert sched.abort(victim)
            aborted += 1
        while held and rng.random() < 0.7:
            sched.release_held(held.pop())
        batch = sched.schedule(float(added))
        output = sched.drain() if batch is None else sched.commit(batch, runner.execute(batch))
        held += [p.request_id for p in output.progress if p.is_complete]
        for event in output.events:
            done = event.finish_reason is not None or event.request_id in held
            if event.request_id in alive and done:
                del alive[event.request_id]
                ends[event.request_id] += 1
    assert aborted == 300
    assert len(ends) == 1000
    assert set(ends.values()) == {1}
    assert_empty(sched)


def test_pure_modules_import_nothing_heavy() -> None:
    pure = ["kv_cache.pool", "kv_cache.prefix_index", "kv_cache.block_manager", "kv_cache.reservations"]
    pure += ["scheduler.scheduler", "types.request", "types.step_output", "types.config", "types.runner"]
    script = (
        "import sys\n"
        + "".join(f"import engine.{name}\n" for name in pure)
        + "print([m for m in ('torch', 'triton', 'grpc', 'asyncio', 'redis', 'opentelemetry', 'numpy', 'pydantic')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
