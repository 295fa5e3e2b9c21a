"""What a finished request adds to the slices, and bounded tenant labels."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.access.api_keys import ApiKeyStore
from router.metrics.latency_slices import FirstTokens, RequestTraits, SliceMetrics, length_bucket
from router.metrics.tenants import TenantLabels
from router.tenants.usage import OTHERS
from router.types.requests import ChoiceFinish
from tandem.config.admission import ApiKey
from tandem.values.outputs import CachedTokens, FinishReason, PhaseTimes
from tandem.values.roles import WorkerRole

INSTANTS = FirstTokens(arrived_s=10.0, prepared_s=10.25, first_s=12.0, second_s=12.5, shown_s=12.125, last_s=14.0)
TIMES = PhaseTimes(
    router_queue_s=0.75,
    prefill_queue_s=0.25,
    prefill_s=1.0,
    transfer_s=0.25,
    cached=CachedTokens(prefill_pool=64, fetched=36),
)


def shown(
    *,
    finishes: bool = True,
    traits: RequestTraits | None = None,
    tenants: TenantLabels | None = None,
    reason: FinishReason = FinishReason.STOP,
    prefilled_by: WorkerRole | None = WorkerRole.PREFILL,
) -> Any:
    registry = CollectorRegistry()
    metrics = SliceMetrics(registry, tenants or TenantLabels())
    finish = ChoiceFinish(reason=reason, cached_tokens=100, times=TIMES, prefilled_by=prefilled_by)
    metrics.ended(
        traits or RequestTraits(prompt_tokens=600, guided=True, tenant="a"), INSTANTS, [finish] if finishes else [], 5
    )
    return registry.get_sample_value


def test_ttft_phases_add_up_without_overlap() -> None:
    value = shown()
    phases = {
        name: value("tandem_ttft_phase_seconds_sum", {"phase": name})
        for name in ("preprocess", "queue", "prefill", "first_decode", "serialize")
    }
    # The router's queue is counted from the arrival, so preprocessing is taken out of it.
    assert phases == {"preprocess": 0.25, "queue": 0.75, "prefill": 1.0, "first_decode": 0.5, "serialize": 0.125}


def test_latency_slices_label_kind_of_request() -> None:
    value = shown()
    kind = {"pool": "prefill", "prompt": "2k", "guided": "yes"}
    assert value("tandem_slice_ttft_seconds_sum", kind | {"cached": "some"}) == 2.0
    assert value("tandem_slice_time_per_output_token_seconds_sum", kind | {"output": "128"}) == 0.5
    assert value("tandem_tenant_ttft_seconds_count", {"tenant": "a"}) == 1
    sources = {
        name: value("tandem_prompt_tokens_by_source_total", {"source": name}) for name in ("computed", "fetched")
    }
    assert sources == {"computed": 500, "fetched": 36}


@pytest.mark.parametrize(
    ("prefilled_by", "pool"), [(WorkerRole.PREFILL, "prefill"), (WorkerRole.DECODE, "decode"), (None, "unknown")]
)
def test_latency_slices_pool_is_where_prompt_was_computed(prefilled_by: WorkerRole | None, pool: str) -> None:
    value = shown(prefilled_by=prefilled_by)  # a prefix was fetched first, which counts as transfer
    kind = {"prompt": "2k", "guided": "yes"}
    found = {
        name: value("tandem_slice_ttft_seconds_count", kind | {"pool": name, "cached": "some"})
        for name in ("prefill", "decode", "unknown")
    }
    assert {name: count for name, count in found.items() if count} == {pool: 1}
    assert value("tandem_slice_time_per_output_token_seconds_count", kind | {"pool": pool, "output": "128"}) == 1


def test_latency_slices_cancelled_request_counts_for_tenant_only() -> None:
    value = shown(finishes=False)
    assert value("tandem_tenant_ttft_seconds_count", {"tenant": "a"}) == 1
    assert value("tandem_slice_ttft_seconds_count", {"pool": "prefill"}) is None
    assert value("tandem_prompt_tokens_by_source_total", {"source": "computed"}) == 0


def test_structured_answers_truncated_are_counted() -> None:
    def ended(*, structured: bool, reason: FinishReason) -> tuple[float, float]:
        value = shown(traits=RequestTraits(prompt_tokens=600, structured=structured), reason=reason)
        name = "tandem_structured_answers_total"
        return value(name, {"finished_reason": "stop"}), value(name, {"finished_reason": "length"})

    assert ended(structured=True, reason=FinishReason.STOP) == (1, 0)
    assert ended(structured=True, reason=FinishReason.LENGTH) == (0, 1)
    assert ended(structured=False, reason=FinishReason.LENGTH) == (0, 0)


def test_tenant_labels_beyond_bound_share_other() -> None:
    labels = TenantLabels(most=2)
    assert [labels.label_for(tenant) for tenant in ("a", "b", "c", "a", "d")] == ["a", "b", "other", "a", "other"]


def test_tenant_labels_are_unique() -> None:
    labels, digest = TenantLabels(), "0123456789abcdef0123456789abcdef"
    keys = ApiKeyStore([ApiKey(key="nobodys-own"), ApiKey(key="another", tenant=digest)])
    labels.is_nameless = keys.is_nameless
    (nameless,) = keys.tenants - {digest}
    names = ["customer-north-europe-production", "customer-south-europe-production", digest, "acme"]
    assert [len(name) for name in names[:3]] == [32, 32, 32]
    assert [labels.label_for(name) for name in names] == names
    ours = ["", nameless, OTHERS]
    assert [labels.label_for(tenant) for tenant in ours] == ["default", f"key-{nameless[:8]}", "other"]
    # Names that could be taken for these.
    theirs = ["default", f"key-{nameless[:8]}", "other"]
    assert [labels.label_for(tenant) for tenant in theirs] == [f"tenant:{name}" for name in theirs]
    keys.replace([ApiKey(key="another", tenant=digest)])
    assert keys.is_nameless(nameless)  # its last requests end after it is taken away


def test_length_buckets_have_inclusive_ends() -> None:
    assert [length_bucket(n) for n in (1, 128, 129, 2048, 131072, 131073)] == [
        "128",
        "128",
        "512",
        "2k",
        "128k",
        "longer",
    ]
