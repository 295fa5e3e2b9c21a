"""Preempted KV is recomputed, or offloaded and restored, with the same tokens."""

import math

import pytest

from engine.kv_cache.lower_tiers import HostTier
from engine.kv_cache.tiers.costs import CopyRates, MeasuredRates, offload_s, prefers_offload, recompute_s
from engine.scheduler.scheduler import Scheduler
from engine.types.block_moves import BlockLoad, BlockOffload
from engine.types.request import Request, RequestState
from engine.types.step_output import StepTimings
from tandem.errors import InvariantError
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockId, TransferId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner, assert_empty, continuation, kv_of, next_token, run

RATES = MeasuredRates(prefill_tokens_per_s=100.0, offload_bytes_per_s=1000.0, load_bytes_per_s=500.0)


def test_preempted_kv_cost_model_prefers_cheaper_way() -> None:
    assert recompute_s(50, RATES) == pytest.approx(0.5)
    assert offload_s(100, RATES) == pytest.approx(0.1 + 0.2)
    assert prefers_offload(50, 100, RATES)
    assert not prefers_offload(30, 100, RATES)
    assert recompute_s(1, MeasuredRates()) == offload_s(1, MeasuredRates()) == math.inf
    assert not prefers_offload(50, 100, MeasuredRates())
    assert not prefers_offload(50, 100, MeasuredRates(prefill_tokens_per_s=1e-9))


def test_host_tier_is_bounded_and_refuses_misuse() -> None:
    tier = HostTier(3)
    blocks = [BlockId(k) for k in (7, 8)]
    handle = tier.store(blocks)
    assert handle is not None
    assert tier.store(blocks) is None
    assert tier.store([]) is None
    assert tuple(tier.load(handle, blocks[1:])) == handle.slots[1:]
    tier.drop(handle)
    assert tier.num_free == 3
    with pytest.raises(InvariantError):
        tier.drop(handle)
    with pytest.raises(InvariantError):
        tier.load(handle, blocks)


def scheduler(tier: HostTier, rates: MeasuredRates) -> Scheduler:
    config = ledger.config(num_blocks=8, max_model_len=128)
    made = Scheduler(config, BlockHasher(ledger.SECRET), tier=tier, block_bytes=1)
    assert made.offloading is not None
    made.offloading.rates = rates
    return made


CHEAP_COPY = MeasuredRates(prefill_tokens_per_s=1.0, offload_bytes_per_s=1e9, load_bytes_per_s=1e9)
DEAR_COPY = MeasuredRates(prefill_tokens_per_s=1e9, offload_bytes_per_s=1.0, load_bytes_per_s=1.0)


@pytest.mark.parametrize(("rates", "slots"), [(CHEAP_COPY, 16), (DEAR_COPY, 16), (CHEAP_COPY, 1)])
def test_preempted_kv_tokens_are_equal_saved_or_recomputed(rates: MeasuredRates, slots: int) -> None:
    tier, runner = HostTier(slots), LedgerRunner()
    sched = scheduler(tier, rates)
    params = SamplingParams(max_tokens=70, ignore_eos=True)
    requests = [ledger.request([k] * 20, arrival_s=float(k), params=params) for k in range(4)]
    for request in requests:
        sched.add(request)
    offloads: list[BlockOffload] = []
    loads: list[BlockLoad] = []
    while (batch := sched.schedule(9.0)) is not None:
        offloads += batch.offloads
        loads += batch.loads
        sched.commit(batch, runner.execute(batch))
        sched.check_invariants()
    for request in requests:
        assert list(request.token_ids[20:]) == continuation([request.token_ids[0]] * 20, params)
    num_preemptions = sum(request.num_preemptions for request in requests)
    assert num_preemptions > 0
    least = sum(request.num_tokens - 1 for request in requests)
    if rates is CHEAP_COPY and slots > 1:
        assert offloads
        assert loads
        assert runner.num_computed == least  # nothing twice
    elif rates is DEAR_COPY:
        assert not offloads
        assert runner.num_computed > least
    assert tier.num_free == slots
    assert_empty(sched)


def preempted(tier: HostTier) -> tuple[Scheduler, LedgerRunner, Request]:
    """A scheduler whose lower-priority request has just been offloaded."""
    sched, runner = scheduler(tier, CHEAP_COPY), LedgerRunner()
    low = ledger.request(range(70), priority=1, params=SamplingParams(max_tokens=40, ignore_eos=True))
    sched.add(low)
    for _ in range(8):
        batch = sched.schedule(0.0)
        assert batch is not None
        sched.commit(batch, runner.execute(batch))
    sched.add(ledger.request(range(20, 90), arrival_s=1.0, params=SamplingParams(max_tokens=3)))
    batch = sched.schedule(1.0)
    assert batch is not None
    assert len(batch.offloads) == 5
    sched.commit(batch, runner.execute(batch))
    assert low.state is RequestState.WAITING
    assert tier.num_free == 16 - 5
    return sched, runner, low


def test_preempted_kv_abort_frees_places() -> None:
    tier = HostTier(16)
    sched, runner, low = preempted(tier)
    sched.abort(low.request_id)
    assert tier.num_free == 16
    run(sched, runner)
    assert_empty(sched)


def test_preempted_kv_restores_only_evicted_blocks() -> None:
    tier = HostTier(16)
    sched, runner, low = preempted(tier)
    loads: list[BlockLoad] = []
    while low.state is RequestState.WAITING:
        batch = sched.schedule(1.0)
        assert batch is not None
        loads = list(batch.loads)
        sched.commit(batch, runner.execute(batch))
    # Three blocks were beyond the newcomer's needs and stayed cached, the leading ones first.
    assert 0 < len(loads) < 5
    assert tier.num_free == 16
    run(sched, runner)
    assert list(low.token_ids[70:]) == continuation(range(70), low.params, limit=128)
    assert_empty(sched)


def test_preempted_kv_unsaved_blocks_are_recomputed() -> None:
    """After preempting itself nothing runs: a hand-off may take its blocks before the next step."""
    tier = HostTier(16)
    sched, runner = scheduler(tier, CHEAP_COPY), LedgerRunner()
    alone = ledger.request(range(70), params=SamplingParams(max_tokens=30, ignore_eos=True))
    sched.add(alone)
    coming = ledger.request(range(20, 60), params=SamplingParams(max_tokens=3, ignore_eos=True))
    transfer = TransferId("coming")
    while (batch := sched.schedule(0.0)) is not None:
        sched.commit(batch, runner.execute(batch))
        if alone.num_computed_tokens == 70:
            sched.reservations.reserve(transfer, coming)
    assert alone.num_preemptions == 1
    assert tier.num_free == 16
    blocks = sched.reservations.bind(transfer)
    runner.write_range(blocks, coming.token_ids, 0, 40)
    sched.reservations.commit(transfer, next_token(kv_of(range(20, 60))))
    run(sched, runner)
    assert list(alone.token_ids[70:]) == continuation(range(70), alone.params, limit=128)
    assert list(coming.token_ids[40:]) == continuation(range(20, 60), coming.params)
    assert_empty(sched)


def test_preempted_kv_prefill_rate_is_measured() -> None:
    sched = scheduler(HostTier(4), MeasuredRates())
    assert sched.offloading is not None
    sched.offloading.set_copy_rates(CopyRates(offload_bytes_per_s=3.0, load_bytes_per_s=4.0))
    for num_tokens in (500, 1):
        sched.observe(StepTimings(schedule_s=0.1, execute_s=0.5, commit_s=0.1, num_tokens=num_tokens, num_requests=1))
    assert sched.offloading.rates == MeasuredRates(
        prefill_tokens_per_s=1000.0, offload_bytes_per_s=3.0, load_bytes_per_s=4.0
    )
