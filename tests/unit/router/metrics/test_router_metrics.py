"""What the meter measures, on a virtual clock."""

import contextlib

import pytest

from engine.types.step_output import Load
from engine.types.tier_counts import TierCounts
from router.api.request_meter import RequestMeter
from router.dispatch.choices.retry import RetryReason
from router.fleet.session_wire import load_from_pb
from router.metrics.request_outcomes import RequestVerdict
from router.metrics.router_metrics import RouterMetrics
from router.types.requests import ChoiceFinish
from router.types.worker_view import WorkerLoad
from tandem.config.telemetry import ObjectivesConfig
from tandem.errors import Overloaded, Unavailable
from tandem.protocol.session_versions import SPOKEN
from tandem.values.outputs import FinishReason
from tandem.values.prefix_pin import PinTotals
from tests.support.router.servers import fakes
from tests.support.router.worker_views import worker
from worker.wire import load_to_pb


class Clock:
    """A virtual clock."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def value(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels or {"model_name": "m", "engine": "router"})


def genai(metrics: RouterMetrics, name: str, **labels: str) -> float | None:
    """A metric that follows OpenTelemetry's conventions."""
    of_server = {"provider_name": "tandem", "request_model": "m", "response_model": "m"}
    same = {f"gen_ai_{label}": value for label, value in {"operation_name": "text_completion", **of_server}.items()}
    return metrics.registry.get_sample_value(f"gen_ai_server_{name}", same | labels)


def test_worker_cache_tier_metrics_match_reported_counts() -> None:
    metrics = RouterMetrics("m")
    counts = TierCounts(tier="disk", num_blocks=3, capacity_blocks=9, hits=5, stored_bytes=7, store_s=0.5, damaged=2)
    plain = dict.fromkeys((name for name in Load._fields if name not in ("tiers", "pins")), 1)
    load = Load(**plain, tiers=(counts,), pins=PinTotals())
    snapshot = load_to_pb(load, prefill_tokens_per_s=1.0, decode_step_s=1.0, kv_bytes_per_s=1.0, step_age_s=2.5)
    snapshot.cache_tiers.add(tier="made up by a peer")
    metrics.worker_loads([worker("w", load=load_from_pb(snapshot))])
    labels = {"worker": "w", "role": "decode", "tier": "disk"}
    shown = {
        name: value(metrics, f"tandem_worker_cache_{name}", **labels)
        for name in (
            "blocks",
            "capacity_blocks",
            "hits_total",
            "stored_bytes_total",
            "store_seconds_total",
            "damaged_total",
        )
    }
    assert shown == {
        "blocks": 3,
        "capacity_blocks": 9,
        "hits_total": 5,
        "stored_bytes_total": 7,
        "store_seconds_total": 0.5,
        "damaged_total": 2,
    }
    assert value(metrics, "tandem_worker_step_age_seconds", worker="w", role="decode") == 2.5
    assert value(metrics, "tandem_worker_backlog_tokens", worker="w", role="decode") == 1
    assert value(metrics, "tandem_worker_protocol_version", worker="w", role="decode") == SPOKEN.newest
    assert value(metrics, "tandem_worker_session_direct", worker="w", role="decode") == 0
    assert value(metrics, "tandem_worker_cache_hits_total", **labels | {"tier": "other"}) == 0
    assert "tandem_worker_cache_hits_total" in metrics.render().decode()
    metrics.worker_loads([])
    assert value(metrics, "tandem_worker_cache_blocks", **labels) is None


@pytest.mark.parametrize("bottleneck", ["prefill", "decode"])
def test_scaling_metrics_are_labelled_by_pool(bottleneck: str) -> None:
    """Each pool's metrics show its own shortage only."""
    full = WorkerLoad(num_running=8, num_waiting=9, num_free_blocks=0, backlog_tokens=4000)
    # What it has reserved waits for the other pool.
    idle = WorkerLoad(num_running=1, num_waiting=5, num_reserved=5, num_free_blocks=990)
    loads = {role: full if role == bottleneck else idle for role in ("prefill", "decode")}
    metrics = RouterMetrics("m")
    pools = {role: [f"{role[0]}{i}" for i in range(2)] for role in loads}
    metrics.worker_loads([worker(name, load=loads[role]) for role, names in pools.items() for name in names])

    def of_pool(role: str, name: str, state: str) -> float:
        labels = [{"worker": one, "role": role, "state": state} for one in pools[role]]
        return sum(value(metrics, name, **each) or 0.0 for each in labels)

    shown = {
        role: (of_pool(role, "tandem_worker_requests", "waiting"), of_pool(role, "tandem_worker_kv_blocks", "used"))
        for role in loads
    }
    other = "decode" if bottleneck == "prefill" else "prefill"
    assert shown == {bottleneck: (18.0, 2000.0), other: (0.0, 20.0)}


def test_router_metrics_one_request_is_observed() -> None:
    metrics, clock = RouterMetrics("m"), Clock()
    with RequestMeter(metrics, clock, prompt_tokens=10, choices=1) as meter:
        assert value(metrics, "vllm:num_requests_waiting") == 1
        clock.now = 0.5
        meter.tokens(0, 1)
        assert (value(metrics, "vllm:num_requests_waiting"), value(metrics, "vllm:num_requests_running")) == (0, 1)
        clock.now = 1.5
        meter.tokens(0, 2)
        meter.choice_finished(0, ChoiceFinish(reason=FinishReason.LENGTH, cached_tokens=4, times=fakes.TIMES))
        clock.now = 2.0
        meter.succeeded()
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:time_to_first_token_seconds_sum": 0.5,
        "vllm:inter_token_latency_seconds_sum": 1.0,
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_sum": 2.0,
        "vllm:prompt_tokens_total": 10,
        "vllm:generation_tokens_total": 3,
        "vllm:prefix_cache_queries_total": 10,
        "vllm:prefix_cache_hits_total": 4,
        "vllm:request_queue_time_seconds_sum": 0.5,
        "vllm:request_time_per_output_token_seconds_sum": 0.5,
        "vllm:request_max_num_generation_tokens_sum": 3,
        "vllm:request_params_max_tokens_sum": 1,
        "vllm:request_params_n_sum": 1,
        "vllm:request_inference_time_seconds_sum": 1.875,
        "tandem_transfer_seconds_sum": 0.125,
    }
    assert {name: value(metrics, name) for name in expected} == expected
    assert genai(metrics, "request_duration_seconds_sum", error_type="") == 2.0
    assert genai(metrics, "time_to_first_token_seconds_sum") == 0.5
    assert genai(metrics, "time_per_output_token_seconds_sum") == 0.5
    length = {"model_name": "m", "engine": "router", "finished_reason": "length"}
    assert value(metrics, "vllm:request_success_total", **length) == 1


def test_oldest_request_gauge_follows_unfinished_requests() -> None:
    metrics, clock = RouterMetrics("m"), Clock()
    with RequestMeter(metrics, clock, prompt_tokens=1, choices=1, arrived_s=-1.0):
        clock.now = 2.0
        with RequestMeter(metrics, clock, prompt_tokens=1, choices=1):
            assert metrics.registry.get_sample_value("tandem_oldest_request_seconds") == 3.0
    assert metrics.registry.get_sample_value("tandem_oldest_request_seconds") == 0.0


def test_ended_requests_are_counted_together_or_at_a_scrape() -> None:
    metrics, seen = RouterMetrics("m"), list[int]()
    observe = metrics.longest.observe
    metrics.longest.observe = lambda num_tokens: (seen.append(int(num_tokens)), observe(num_tokens))[1]
    for num_tokens in range(1, 101):
        with RequestMeter(metrics, Clock(), prompt_tokens=1, choices=1) as meter:
            meter.tokens(0, num_tokens)
    assert len(seen) == 96
    assert value(metrics, "vllm:request_max_num_generation_tokens_count") == 100
    assert genai(metrics, "request_duration_seconds_count", error_type="") == 100
    assert value(metrics, "tandem_tenant_ttft_seconds_count", tenant="default") == 100
    assert seen == list(range(1, 101))


def test_failed_requests_reset_gauges_and_count_failures() -> None:
    metrics = RouterMetrics("m")
    for error in (Unavailable("x"), GeneratorExit(), ZeroDivisionError()):
        with pytest.raises(type(error)), RequestMeter(metrics, Clock(), prompt_tokens=1, choices=1):
            raise error
    assert value(metrics, "vllm:num_requests_waiting") == 0
    for code in ("UNAVAILABLE", "CANCELLED", "INTERNAL"):
        assert value(metrics, "tandem_request_failures_total", code=code) == 1
        assert genai(metrics, "request_duration_seconds_count", error_type=code) == 1
    assert genai(metrics, "time_to_first_token_seconds_count") is None


def test_router_metrics_count_dispatch_events() -> None:
    metrics = RouterMetrics("m")
    metrics.retried(RetryReason.REFUSED.value)
    metrics.workers("decode", "healthy", 2)
    metrics.placement.prefix_map(num_blocks=5, num_approximate=2)
    assert value(metrics, "tandem_dispatch_retries_total", reason="refused") == 1
    assert value(metrics, "tandem_workers", role="decode", state="healthy") == 2
    assert "tandem_prefix_map_blocks 5.0" in metrics.render().decode()
    assert "tandem_prefix_map_approximate_workers 2.0" in metrics.render().decode()


@pytest.mark.parametrize(
    ("first_s", "last_s", "error", "verdict"),
    [
        (2.0, 2.5, None, "good"),
        (2.6, 2.7, None, "late_first"),
        (2.0, 3.1, None, "late_tokens"),
        (2.0, 2.5, Unavailable("x"), "failed"),
        (None, None, Overloaded("x", retry_after_s=1.0), "refused"),
        (2.6, 9.0, GeneratorExit(), None),
    ],
)
def test_goodput_counts_requests_meeting_every_objective(
    first_s: float | None, last_s: float | None, error: BaseException | None, verdict: str | None
) -> None:
    metrics, clock = RouterMetrics("m", objectives=ObjectivesConfig(ttft_s=2.5, per_token_s=0.1)), Clock()
    meter = RequestMeter(metrics, clock, prompt_tokens=1, choices=1)
    with contextlib.suppress(Unavailable, Overloaded, GeneratorExit), meter:
        for now_s, num_tokens in ((first_s, 1), (last_s, 10)):
            if now_s is not None:
                clock.now = now_s
                meter.tokens(0, num_tokens)
        if error is not None:
            raise error
    counted = {
        one: value(metrics, "tandem_judged_requests_total", verdict=one) for one in (v.value for v in RequestVerdict)
    }
    assert {one for one, count in counted.items() if count} == ({verdict} if verdict else set())
