"""Admission decisions one at a time: requests that run, wait or are refused."""

import pytest
from msgspec.structs import replace

from router.admission.cluster_capacity import CapacityPolicy, DrainMeter, InTransit, measure_capacity
from router.admission.counts import Rejection
from router.admission.rate_limits import TokenBucket
from router.admission.types import AdmissionRequest
from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.errors import DeadlineExceeded, Overloaded, Unavailable
from tandem.values.roles import WorkerRole
from tests.support.router.admission_world import AdmissionBench, order
from tests.support.router.overload_world import info, snapshot
from tests.support.router.worker_views import view_of


def test_admission_queues_only_without_room() -> None:
    bench = AdmissionBench()
    assert not bench.enter().waiting
    bench.fill()
    entry = bench.enter()
    assert entry.waiting
    assert bench.turns() == []
    bench.workers = [snapshot(backlog=50, active=1)]
    assert bench.turns() == [entry]


def test_admission_turn_counts_as_in_transit_until_placed() -> None:
    bench = AdmissionBench()
    bench.fill()
    entries = [bench.enter() for _ in range(5)]
    bench.workers = [snapshot()]
    assert bench.turns() == entries[:1]  # a tenth of a second is 100 tokens
    bench.admission.placed(entries[0])
    assert bench.turns() == entries[1:2]


def test_admission_without_live_worker_passes_to_dispatch() -> None:
    bench = AdmissionBench()
    bench.workers = []
    assert not bench.enter().waiting


def test_admission_waits_for_places_memory_and_running_requests() -> None:
    bench = AdmissionBench()
    bench.places = 0
    entry = bench.enter()
    assert entry.waiting
    bench.places = 1
    bench.workers = [snapshot(active=8)]
    assert bench.turns() == []
    bench.workers = [snapshot(active=1)]
    assert bench.turns() == [entry]
    room = measure_capacity(view_of([snapshot(active=1)]), CapacityPolicy(), InTransit(), 0.0)
    assert room.takes(159_999)
    assert not room.takes(160_000)
    slow = view_of([snapshot(active=1, decode_step_s=0.2)])
    assert measure_capacity(slow, CapacityPolicy(max_itl_s=0.1), InTransit(), 0.0).slots == 0
    assert measure_capacity(slow, CapacityPolicy(max_itl_s=0.3), InTransit(), 0.0).slots > 0


def test_admission_request_larger_than_pools_blocks_no_other() -> None:
    """Dispatch refuses it. The only worker is busy with a stream and never empty."""
    bench = AdmissionBench(max_queue_s=1000.0)
    bench.fill()
    pool_tokens = bench.workers[0].info.pool_tokens
    waiting = bench.enter()
    too_large = bench.enter(tokens=pool_tokens, within_s=1.0)
    assert (waiting.waiting, too_large.waiting) == (True, False)
    assert bench.enter(tokens=pool_tokens - 1).waiting
    # It had waited for a larger worker, which left.
    bench = AdmissionBench(max_queue_s=1000.0)
    bench.workers = [snapshot(active=1), replace(snapshot("d1", active=1), info=info("d1", num_blocks=20_000))]
    # So long that not even a block of the larger pool is left: otherwise what is behind may pass (`test_overtaking`).
    patient, behind = bench.enter(tokens=2 * pool_tokens - 10), bench.enter()
    assert (patient.waiting, behind.waiting) == (True, True)
    bench.workers = bench.workers[:1]
    assert bench.turns() == [patient]
    bench.admission.end(patient)
    assert bench.turns() == [behind]


def test_admission_priorities_go_first_and_are_bounded() -> None:
    bench = AdmissionBench(
        limits=LimitsConfig(tenants={"a": TenantLimits(best_priority=-1), "b": TenantLimits(best_priority=1)})
    )
    bench.fill()
    normal, later, bounded, sooner = (
        bench.enter(),
        bench.enter(priority=5),
        bench.enter("b", priority=-9),
        bench.enter(priority=-1),
    )
    assert order(bench, 4) == [sooner, normal, bounded, later]


def test_admission_earlier_deadline_goes_first_within_tenant() -> None:
    bench = AdmissionBench()
    bench.fill()
    late, early, never = bench.enter(within_s=9.0), bench.enter(within_s=8.0), bench.enter()
    assert order(bench, 3) == [early, late, never]


def test_admission_alternates_between_tenants() -> None:
    bench = AdmissionBench()
    bench.fill()
    many = [bench.enter("greedy") for _ in range(6)]
    few = [bench.enter("modest") for _ in range(2)]
    assert order(bench, 6) == [many[0], few[0], many[1], few[1], many[2], many[3]]


def test_admission_turns_follow_weights() -> None:
    bench = AdmissionBench(limits=LimitsConfig(tenants={"heavy": TenantLimits(weight=3.0)}))
    bench.fill()
    for _ in range(12):
        bench.enter("heavy")
        bench.enter("light")
    tenants = [entry.ticket.tenant for entry in order(bench, 12)]
    assert tenants.count("heavy") == 9


def test_admission_counts_answers_and_lifts_idle_tenants() -> None:
    bench = AdmissionBench(credit_s=0.0)
    first = bench.enter("talker")
    bench.admission.generated(first, 10_000)
    bench.fill()
    quiet = [bench.enter("quiet") for _ in range(3)]
    talker = [bench.enter("talker") for _ in range(2)]
    # The quiet one was lifted to the talker when it came, so both take turns.
    assert order(bench, 4) == [quiet[0], talker[0], quiet[1], talker[1]]


def test_tenant_served_less_has_bounded_credit() -> None:
    bench = AdmissionBench(credit_s=0.25)
    bench.enter("quiet", tokens=0, output=0)
    first = bench.enter("talker")
    bench.admission.generated(first, 10_000)
    bench.fill()
    talker = [bench.enter("talker") for _ in range(3)]
    quiet = [bench.enter("quiet") for _ in range(5)]
    # A quarter of a second of the cluster is two of its requests and a half. Who is new has none.
    assert order(bench, 6) == [*quiet[:3], talker[0], quiet[3], talker[1]]


@pytest.mark.parametrize(("away_s", "who_first"), [(4.0, "quiet"), (6.0, "talker")])
def test_tenant_returning_after_a_while_has_no_credit(away_s: float, who_first: str) -> None:
    bench = AdmissionBench(credit_s=0.25)
    bench.admission.end(bench.enter("quiet"))
    for _ in range(int(2 * away_s)):
        bench.now_s += 0.5
        bench.admission.end(bench.enter("talker"))
    bench.fill()
    for _ in range(2):
        bench.enter("quiet")
        bench.enter("talker")
    # What the talker had while nobody waited is no debt: both have a whole credit, or it alone.
    tenants = [entry.ticket.tenant for entry in order(bench, 4)]
    assert tenants == (["quiet", "talker"] * 2 if who_first == "quiet" else ["talker", "talker", "quiet", "quiet"])


def test_admission_cached_tokens_are_refunded() -> None:
    bench = AdmissionBench()
    for _ in range(60):
        entry = bench.enter("a", tokens=1000)
        bench.admission.generated(entry, 1)
        bench.admission.cached(entry, 900)
        bench.admission.end(entry)
    assert bench.enter("a", tokens=1000).ticket.work_tokens == pytest.approx(100, rel=0.05)


def test_admission_predicted_wait_beyond_bound_is_refused() -> None:
    bench = AdmissionBench(max_queue_s=4.0)
    bench.fill()
    # A second of backlog, and half a second each.
    waiting = [bench.enter(tokens=500) for _ in range(5)]
    with pytest.raises(Unavailable, match="longer than 4 s") as caught:
        bench.enter(tokens=500)
    assert caught.value.retry_after_s is not None
    assert bench.admission.counts.rejections[Rejection.QUEUE_TIME] == 1
    assert bench.admission.num_inflight == len(waiting)


def test_admission_refusals_have_increasing_retry_after() -> None:
    bench = AdmissionBench(max_queue_s=1.0)
    bench.fill()
    retry_after_s = []
    for _ in range(4):
        with pytest.raises(Unavailable) as caught:
            bench.enter(tokens=500)
        retry_after_s.append(caught.value.retry_after_s)
    assert retry_after_s == sorted(set(retry_after_s))
    bench.now_s += 60.0
    with pytest.raises(Unavailable) as caught:
        bench.enter(tokens=500)
    assert caught.value.retry_after_s == pytest.approx(retry_after_s[0])


def test_admission_hopeless_deadline_is_refused_when_idle() -> None:
    bench = AdmissionBench()
    with pytest.raises(Unavailable, match="its deadline"):
        bench.enter(tokens=2000, within_s=1.0)
    assert not bench.enter(tokens=2000, within_s=3.0).waiting
    assert not bench.enter(tokens=50_000).waiting  # its own prompt is no wait
    assert bench.admission.counts.rejections[Rejection.DEADLINE] == 1


def test_admission_hopeless_queued_request_is_refused_early() -> None:
    bench = AdmissionBench()
    bench.fill()
    entry = bench.enter(within_s=3.0)
    assert bench.admission.end_hopeless() == []
    bench.workers = [snapshot(backlog=5000, active=1)]
    ((found, error),) = bench.admission.end_hopeless()
    assert found is entry
    assert isinstance(error, Unavailable)
    assert bench.admission.num_waiting == bench.admission.num_inflight == 0
    assert bench.admission.counts.rejections[Rejection.HOPELESS] == 1
    assert bench.admission.oldest_s() == 0.0
    bench.fill()
    bench.enter(within_s=3.0)
    bench.now_s += 3.0
    assert isinstance(bench.admission.end_hopeless()[0][1], DeadlineExceeded)


def test_admitted_request_may_wait_longer_than_new_one() -> None:
    bench = AdmissionBench(max_queue_s=4.0, patience=2.0)
    bench.fill()
    waiting = [bench.enter(tokens=500) for _ in range(5)]
    bench.workers = [snapshot(backlog=5800, active=1)]
    with pytest.raises(Unavailable):
        bench.enter(tokens=500)
    # Half a second each after 5.8: the fifth alone would come after more than twice four.
    assert [entry for entry, _ in bench.admission.end_hopeless()] == [waiting[4]]


def test_full_queue_evicts_end_of_longest_line() -> None:
    bench = AdmissionBench(max_requests=4, limits=LimitsConfig(default=TenantLimits(best_priority=-1)))
    bench.fill()
    many = [bench.enter("greedy") for _ in range(4)]
    modest = bench.enter("modest")
    assert modest.waiting
    assert [entry for entry, _ in bench.evicted] == [many[3]]
    with pytest.raises(Overloaded, match="4 requests are waiting"):
        bench.enter("greedy")
    urgent = bench.enter("greedy", priority=-1)
    assert [entry for entry, _ in bench.evicted] == [many[2]]
    assert bench.admission.num_waiting == 4
    assert order(bench, 1) == [urgent]
    assert bench.admission.counts.rejections[Rejection.QUEUE_FULL] == 3


def test_queue_beyond_token_bound_is_full() -> None:
    bench = AdmissionBench(max_tokens=1000)
    bench.fill()
    bench.enter(tokens=600)
    with pytest.raises(Overloaded):
        bench.enter(tokens=600)
    assert bench.admission.num_waiting_tokens == 600


def test_full_queue_evicts_none_for_request_that_cannot_fit() -> None:
    bench = AdmissionBench(max_tokens=1000)
    bench.fill()
    waiting = [bench.enter("a", tokens=300), bench.enter("a", tokens=300), bench.enter("b", tokens=300)]
    with pytest.raises(Overloaded):
        bench.enter("c", tokens=500)
    assert not any(entry.ended for entry in waiting)
    assert bench.admission.num_waiting_tokens == 900
    bench.enter("c", tokens=250)
    assert [entry for entry, _ in bench.evicted] == [waiting[1]]


def test_promised_stream_runs_at_once() -> None:
    limits = LimitsConfig(default=TenantLimits(concurrent_requests=1, tokens_per_minute=10))
    bench = AdmissionBench(limits=limits)
    bench.fill()
    bench.enter(tokens=5)
    bench.admission.closed = True
    entry = bench.enter(tokens=0, promised=True)
    assert not entry.waiting
    bench.admission.end(entry)
    with pytest.raises(Unavailable, match="draining"):
        bench.enter()


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (TenantLimits(concurrent_requests=2), "concurrent_requests"),
        (TenantLimits(requests_per_minute=2), "requests_per_minute"),
        (TenantLimits(tokens_per_minute=250), "tokens_per_minute"),
    ],
)
def test_admission_limits_are_named_and_per_tenant(limits: TenantLimits, name: str) -> None:
    bench = AdmissionBench(limits=LimitsConfig(default=limits, tenants={"free": TenantLimits()}))
    held = [bench.enter(tokens=99) for _ in range(2)]
    with pytest.raises(Overloaded, match=f"limit {name} of") as caught:
        bench.enter(tokens=99)
    assert caught.value.param == name
    assert caught.value.retry_after_s >= 0.1
    assert not bench.enter("b", tokens=99).waiting
    for _ in range(9):
        bench.enter("free", tokens=99)
    for entry in held:
        bench.admission.end(entry)
    bench.now_s += caught.value.retry_after_s + 60.0
    assert not bench.enter(tokens=99).waiting


def test_refused_call_counts_all_its_requests() -> None:
    bench = AdmissionBench(limits=LimitsConfig(default=TenantLimits(requests_per_minute=4)))
    call = [
        AdmissionRequest(tenant="a", priority=0, num_tokens=9, max_output_tokens=1, deadline_s=None) for _ in range(3)
    ]
    assert len(bench.admission.enter_call(call).entries) == 3
    with pytest.raises(Overloaded, match="requests_per_minute"):
        bench.admission.enter_call(call)
    bench.admission.closed = True
    with pytest.raises(Unavailable, match="draining"):
        bench.admission.enter_call(call)
    assert bench.admission.counts.rejections == {Rejection.REQUESTS: 3, Rejection.DRAINING: 3}
    assert bench.admission.counts.tenants["a"].rejected == 6


def test_admission_settles_tokens_actually_used() -> None:
    bench = AdmissionBench(limits=LimitsConfig(default=TenantLimits(tokens_per_minute=1000)))
    entry = bench.enter(tokens=100, output=500)
    bench.admission.generated(entry, 2000)
    bench.admission.end(entry)
    bench.admission.end(entry)
    with pytest.raises(Overloaded) as caught:
        bench.enter(tokens=10)
    # 1,100 tokens of debt, and 11 to take, at 1,000 a minute.
    assert caught.value.retry_after_s == pytest.approx(60 * 1.111, rel=0.01)


def test_queue_refusal_does_not_use_rate_limit() -> None:
    bench = AdmissionBench(limits=LimitsConfig(default=TenantLimits(requests_per_minute=3)), max_queue_s=0.5)
    bench.fill()
    for _ in range(5):
        with pytest.raises(Unavailable):
            bench.enter()
    bench.workers = [snapshot()]
    assert not bench.enter().waiting


def test_full_bucket_admits_request_larger_than_itself() -> None:
    bucket = TokenBucket.full(60, 0.0)
    assert bucket.wait_s(500.0, 0.0) == 0.0
    bucket.consume(500.0, 0.0)
    assert bucket.wait_s(1.0, 0.0) == pytest.approx(441.0)


def test_measure_capacity_covers_penalties_pools_and_prior_rates() -> None:
    prefill = replace(snapshot("p0", backlog=500), info=info("p0", role=WorkerRole.PREFILL))
    room = measure_capacity(view_of([snapshot(), prefill]), CapacityPolicy(), InTransit(), 0.0)
    assert room.least_wait_s == 0.0  # a prefill worker without an address computes for nobody
    hurt = replace(snapshot("d1", backlog=0), penalty_ms=50.0)
    assert measure_capacity(
        view_of([snapshot(backlog=800), hurt]), CapacityPolicy(), InTransit(), 0.0
    ).least_wait_s == pytest.approx(0.8)
    assert measure_capacity(view_of([hurt]), CapacityPolicy(), InTransit(), 0.0).slots > 0
    unmeasured = measure_capacity(
        view_of([snapshot(rate=0.0)]), CapacityPolicy(prior_prefill_tokens_per_s=7.0), InTransit(), 0.0
    )
    assert (unmeasured.prefill_tokens_per_s, unmeasured.measured_tokens_per_s) == (7.0, 0.0)


def test_drain_meter_idle_time_only_fades() -> None:
    meter = DrainMeter(now_s=0.0)
    assert meter.rate(500.0) == 500.0
    for second in range(1, 30):
        meter.served(100.0)
        meter.passed(float(second), busy=True)
    measured = meter.rate(500.0)
    assert measured == pytest.approx(100.0, rel=0.5)
    meter.passed(30.0, busy=False)
    assert measured < meter.rate(500.0) < 1.2 * measured
    meter.passed(1000.0, busy=False)
    assert meter.rate(500.0) == pytest.approx(500.0)


def test_drain_meter_forgets_a_slow_hour() -> None:
    """Otherwise all would be refused, and the recovered speed would never be measured."""
    bench = AdmissionBench(max_queue_s=4.0)
    bench.fill()
    patient = bench.enter(tokens=100)
    for _ in range(60):
        bench.now_s += 1.0
        assert bench.turns() == []
    bench.workers = [snapshot()]
    assert bench.turns() == [patient]
    bench.admission.placed(patient)
    bench.fill()
    with pytest.raises(Unavailable):
        bench.enter(tokens=500)
    bench.now_s += 30.0
    assert bench.enter(tokens=500).waiting
