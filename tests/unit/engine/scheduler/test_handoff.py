import pytest

from engine.kv_cache.pool import PoolExhausted
from engine.scheduler.scheduler import Scheduler
from engine.types.request import FinishReason, RequestState
from engine.types.step_output import PrefillProgress
from tandem.errors import InvalidRequest, TransferError
from tandem.values.ids import TransferId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner, assert_empty, continuation, run

PROMPT = list(range(50))
T1, T2 = TransferId("t1"), TransferId("t2")


def test_handoff_source_blocks_are_reported_once_and_held() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    sched.add(ledger.request(range(32)))
    run(sched, runner)
    source = ledger.request(range(75), prefill_only=True, arrival_s=3.0)
    sched.add(source)
    progress: list[PrefillProgress] = []
    admissions, events = [], []
    while (batch := sched.schedule(5.0)) is not None:
        output = sched.commit(batch, runner.execute(batch))
        progress += output.progress
        admissions += output.admissions
        events += output.events
    assert [(a.request_id, a.queued_s, a.num_cached_tokens) for a in admissions] == [(source.request_id, 2.0, 32)]
    assert [p.num_computed_tokens for p in progress] == [52, 72, 75]
    assert [p.is_complete for p in progress] == [False, False, True]
    blocks = []
    for part in progress:
        assert part.first_block_index == len(blocks)
        blocks += part.block_ids
    assert runner.read(blocks, 75) == ledger.kv_of(range(75))
    assert [e.token.token_id for e in events if e.token] == continuation(range(75), source.params)[:1]
    assert source.state is RequestState.HELD
    assert sched.load().num_held == 1
    assert sched.release_held(source.request_id)
    assert not sched.release_held(source.request_id)
    assert_empty(sched)


def test_handoff_pinned_blocks_outlive_abort_until_all_unpinned() -> None:
    sched, runner = ledger.scheduler(num_blocks=8, max_model_len=128), LedgerRunner()
    source = ledger.request(range(75), prefill_only=True)
    sched.add(source)
    run(sched, runner)
    blocks = list(source.block_table)
    sched.pin_blocks(source.request_id)
    sched.pin_blocks(source.request_id)
    assert sched.abort(source.request_id)
    other = ledger.request(range(100, 140), params=SamplingParams(max_tokens=1))
    sched.add(other)
    run(sched, runner)
    sched.unpin_blocks(source.request_id)
    assert runner.read(blocks, 75) == ledger.kv_of(range(75))
    assert sched.load().num_used_blocks == 5
    sched.unpin_blocks(source.request_id)
    assert_empty(sched)
    with pytest.raises(InvalidRequest):
        sched.pin_blocks(source.request_id)


def land(sched: Scheduler, runner: LedgerRunner, transfer_id: TransferId, tokens: list[int], end: int) -> None:
    """Bind and let a peer write the KV of the tokens that are not held, up to `end`."""
    blocks = sched.reservations.bind(transfer_id)
    held = (-(-len(tokens) // ledger.BLOCK) - len(blocks)) * ledger.BLOCK
    entries = ledger.kv_of(tokens)
    for position in range(held, end):
        runner.write(blocks, position - held, entries[position])


def test_handoff_commit_continues_the_request() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    sched.add(ledger.request(PROMPT[:33]))
    run(sched, runner)
    request = ledger.request(PROMPT)
    expected = continuation(PROMPT, request.params)
    grant = sched.reservations.reserve(T1, request)
    assert (grant.num_held_tokens, grant.num_blocks) == (32, 2)
    assert sched.load().num_promised_blocks == 2
    with pytest.raises(TransferError):
        sched.reservations.commit(T1, expected[0])
    land(sched, runner, T1, PROMPT, len(PROMPT))
    assert sched.reservations.bind(T1) == sched.reservations.bind(T1)
    before = runner.num_computed
    sched.reservations.commit(T1, expected[0], num_cached_tokens=48)
    assert run(sched, runner)[request.request_id] == expected[1:]
    assert runner.num_computed - before == 7
    assert request.num_cached_tokens == 48
    assert sched.match_prefix(ledger.request(PROMPT)) == 48
    with pytest.raises(TransferError):
        sched.reservations.cancel(T1)
    assert_empty(sched)


@pytest.mark.parametrize("landed", [0, 15, 16, 40, 50])
@pytest.mark.parametrize("first_is_known", [True, False])
@pytest.mark.parametrize("quiet", [True, False])
def test_handoff_failed_transfer_is_finished_locally(landed: int, first_is_known: bool, quiet: bool) -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    request = ledger.request(PROMPT)
    expected = continuation(PROMPT, request.params)
    sched.reservations.reserve(T1, request)
    land(sched, runner, T1, PROMPT, landed)
    bound = sched.reservations.bind(T1)
    first = expected[0] if first_is_known else None
    sched.reservations.commit_partial(T1, landed, first_token=first, writer_is_quiet=quiet)
    assert sched.load().num_quarantined_blocks == (0 if quiet else 4)
    batch = sched.schedule(0.0)
    assert batch is not None
    assert batch.items[0].start == landed // 16 * 16
    if not quiet:
        for slot in range(landed // 16 * 16, 64):
            runner.write(bound, slot, -1)  # the writer that nobody could prove dead
    outputs = [e.token.token_id for e in sched.commit(batch, runner.execute(batch)).events if e.token]
    outputs += run(sched, runner).get(request.request_id, [])
    assert outputs == expected[first_is_known:]
    assert request.num_cached_tokens == 0  # what landed was computed for this request, only not here
    assert sched.reservations.release_quarantine(T1) == (0 if quiet else 4)
    assert sched.reservations.release_quarantine(T1) == 0
    assert_empty(sched)


def test_handoff_next_attempt_resumes_after_landed_tokens() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    request = ledger.request(PROMPT)
    expected = continuation(PROMPT, request.params)
    sched.reservations.reserve(T1, request)
    land(sched, runner, T1, PROMPT, 32)
    request = sched.reservations.salvage(T1, 32, writer_is_quiet=False)
    assert sched.reservations.reserve(T2, request).num_held_tokens == 32
    assert not set(sched.reservations.bind(T2)) & set(sched.reservations._quarantined[T1].references)
    land(sched, runner, T2, PROMPT, 50)
    sched.reservations.commit(T2, expected[0])
    assert run(sched, runner)[request.request_id] == expected[1:]
    sched.reservations.release_quarantine(T1)
    assert_empty(sched)


def test_handoff_first_token_may_be_last() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    request = ledger.request(PROMPT, params=SamplingParams(max_tokens=1))
    sched.reservations.reserve(T1, request)
    land(sched, runner, T1, PROMPT, 50)
    sched.reservations.commit(T1, 5)
    (event,) = sched.drain().events
    assert (event.index, event.token, event.finish_reason) == (1, None, FinishReason.LENGTH)
    assert_empty(sched)


def test_handoff_reserved_blocks_are_not_taken_by_growth() -> None:
    sched, runner = ledger.scheduler(num_blocks=10, max_model_len=160), LedgerRunner()
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    for k in range(2):
        sched.add(ledger.request([k] * 20, params=params, arrival_s=float(k)))
        batch = sched.schedule(0.0)
        assert batch is not None
        sched.commit(batch, runner.execute(batch))
    incoming = ledger.request(PROMPT)
    sched.reservations.reserve(T1, incoming)
    with pytest.raises(PoolExhausted):
        sched.reservations.reserve(T2, ledger.request(range(30, 90)))
    for _ in range(40):
        batch = sched.schedule(0.0)
        assert batch is not None
        sched.commit(batch, runner.execute(batch))
        assert sched.load().num_promised_blocks == 4
    assert sched.load().num_waiting == 1
    with pytest.raises(PoolExhausted, match="earlier requests are waiting"):
        sched.reservations.reserve(T2, ledger.request([1]))
    land(sched, runner, T1, PROMPT, 50)
    expected = continuation(PROMPT, incoming.params)
    sched.reservations.commit(T1, expected[0])
    assert run(sched, runner)[incoming.request_id] == expected[1:]
    assert_empty(sched)


def test_handoff_prefill_is_never_preempted() -> None:
    sched, runner = ledger.scheduler(num_blocks=8, max_model_len=128, prefill_chunk_tokens=1), LedgerRunner()
    grower = ledger.request([1] * 14, params=SamplingParams(max_tokens=60, ignore_eos=True))
    sched.add(grower)
    source = ledger.request(range(90), prefill_only=True, arrival_s=1.0)
    for step in range(70):
        if step == 14:
            sched.add(source)
        batch = sched.schedule(1.0)
        assert batch is not None
        sched.commit(batch, runner.execute(batch))
    assert (source.num_preemptions, source.state) == (0, RequestState.RUNNING)
    assert grower.num_preemptions == 1
    run(sched, runner)
    assert (source.state, grower.state) == (RequestState.HELD, RequestState.WAITING)
    sched.release_held(source.request_id)
    run(sched, runner)
    assert list(grower.token_ids[14:]) == continuation([1] * 14, grower.params)
    assert_empty(sched)


def test_handoff_reservations_do_not_overtake_preempted_requests() -> None:
    sched, runner = ledger.scheduler(num_blocks=8, max_model_len=128), LedgerRunner()
    for k in range(3):
        sched.add(ledger.request([k] * 30, params=SamplingParams(max_tokens=90, ignore_eos=True), arrival_s=float(k)))
    preempted = False
    while not preempted:
        batch = sched.schedule(0.0)
        assert batch is not None
        preempted = bool(sched.commit(batch, runner.execute(batch)).preemptions)
    assert sched.blocks.num_available > 0
    with pytest.raises(PoolExhausted, match="earlier requests are waiting"):
        sched.reservations.reserve(T1, ledger.request([1]))


def test_handoff_oldest_prefill_advances_next_to_full_decodes() -> None:
    sched, runner = ledger.scheduler(max_running_requests=2, prefill_chunk_tokens=1), LedgerRunner()
    oldest = ledger.request(range(40))
    sched.add(oldest)
    batch = sched.schedule(0.0)
    assert batch is not None
    sched.commit(batch, runner.execute(batch))
    for k, transfer_id in enumerate((T1, T2)):
        request = ledger.request([k] * 20, params=SamplingParams(max_tokens=90, ignore_eos=True), arrival_s=1.0)
        sched.reservations.reserve(transfer_id, request)
        land(sched, runner, transfer_id, [k] * 20, 20)
        sched.reservations.commit(transfer_id, continuation([k] * 20, request.params)[0])
    for _ in range(20):
        batch = sched.schedule(1.0)
        assert batch is not None
        assert len(batch.items) == 2
        sched.commit(batch, runner.execute(batch))
    assert oldest.num_computed_tokens == 21


def test_handoff_held_prefill_reports_one_end() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    request = ledger.request(PROMPT, prefill_only=True, params=SamplingParams(max_tokens=1))
    sched.add(request)
    run(sched, runner)
    assert (request.state, request.finish_reason) == (RequestState.HELD, FinishReason.LENGTH)
    assert sched.abort(request.request_id)
    assert not sched.has_output
    assert_empty(sched)


def test_handoff_blocks_of_earlier_attempt_are_no_cache_hit() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    request = ledger.request(PROMPT)
    sched.reservations.reserve(T1, request)
    land(sched, runner, T1, PROMPT, 32)
    again = sched.reservations.salvage(T1, 32, writer_is_quiet=True)
    grant = sched.reservations.reserve(T2, again, max_held_tokens=32)
    assert (grant.num_held_tokens, request.num_cached_tokens) == (32, 0)
    sched.reservations.cancel(T2)
    assert_empty(sched)


def test_handoff_second_attempt_holds_no_more_than_announced() -> None:
    sched, runner = ledger.scheduler(), LedgerRunner()
    sched.add(ledger.request(PROMPT))  # all of it is cached here by now
    run(sched, runner)
    grant = sched.reservations.reserve(T1, ledger.request(PROMPT), max_held_tokens=16)
    assert (grant.num_held_tokens, grant.num_blocks) == (16, 3)
    sched.reservations.cancel(T1)
    assert_empty(sched)


def test_handoff_prompt_blocks_are_reported_once() -> None:
    """A preempted hand-off would make the counts of `StepEventCollector` wrong; under load none is preempted."""
    sched, runner = ledger.scheduler(num_blocks=13, max_batched_tokens=24, max_overtakes=0), LedgerRunner()
    urgent = [ledger.request(range(40 * i, 40 * i + 30), priority=-1, arrival_s=float(i)) for i in range(3)]
    for one in urgent:
        one.params = SamplingParams(max_tokens=60, ignore_eos=True)
        sched.add(one)
    source = ledger.request(range(500, 575), prefill_only=True, arrival_s=9.0, priority=5)
    outputs: dict[str, list[PrefillProgress]] = {}
    num_preemptions = 0
    added = False
    while (batch := sched.schedule(5.0)) is not None:
        output = sched.commit(batch, runner.execute(batch))
        num_preemptions += len(output.preemptions)
        assert source.request_id not in output.preemptions
        for progress in output.progress:
            outputs.setdefault(progress.request_id, []).append(progress)
        if not added:
            added = True
            sched.add(source)
            sched.pin_blocks(source.request_id)
    assert num_preemptions > 0, "somebody had to make room"
    assert source.num_preemptions == 0
    blocks = []
    for progress in outputs[source.request_id]:
        assert progress.first_block_index == len(blocks)
        blocks += progress.block_ids
    assert len(blocks) == 5
    assert runner.read(blocks, 75) == ledger.kv_of(range(500, 575))
    sched.release_held(source.request_id)
    sched.unpin_blocks(source.request_id)
    assert_empty(sched)
