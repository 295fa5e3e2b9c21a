"""Requests by adapter, in metrics and where they are counted."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from router.api.adapters import ServedAdapters
from router.dispatch.adapter_use import AdapterUse
from router.metrics.adapters import MAX_JOINED_CHARS, MAX_NAMES, OTHER, AdapterLabels, AdapterMetrics
from router.metrics.latency_slices import FirstTokens, RequestTraits, SliceMetrics
from router.metrics.merge import merge
from router.metrics.tenants import TenantLabels
from tests.support.router.adapters import adapter_of


class _Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def _exposition(use: AdapterUse, num_served: int) -> str:
    registry = CollectorRegistry()
    served = ServedAdapters("tiny", [adapter_of(f"a{number}") for number in range(num_served)])
    registry.register(AdapterMetrics(use, AdapterLabels(), served, wall_clock=lambda: 1000.0))
    return generate_latest(registry).decode()


async def test_use_request_waits_then_runs_then_is_gone() -> None:
    use, seen = AdapterUse(), []

    @asynccontextmanager
    async def turn(*, fails: bool = False) -> AsyncIterator[int]:
        seen.append((dict(use.waiting), dict(use.running)))
        if fails:
            raise ValueError("no turn")
        yield 7

    async with use.counted("sql", turn()) as visit:
        assert visit == 7
        seen.append((dict(use.waiting), dict(use.running)))
    assert seen == [({"sql": 1}, {}), ({}, {"sql": 1})]
    with pytest.raises(ValueError, match="no turn"):
        async with use.counted("sql", turn(fails=True)):
            raise AssertionError
    with pytest.raises(KeyError):
        async with use.counted("sql", turn()):
            raise KeyError
    assert (dict(use.waiting), dict(use.running)) == ({}, {})


def test_metrics_running_and_waiting_adapters_are_labels_as_in_vllm() -> None:
    use = AdapterUse()
    use.running.update({"sql": 3, "legal": 1})
    use.waiting["sql"] = 2
    text = _exposition(use, 5)
    labels = 'max_lora="5",running_lora_adapters="legal,sql",waiting_lora_adapters="sql"'
    assert f"vllm:lora_requests_info{{{labels}}} 1000.0" in text
    assert 'tandem_adapter_requests{adapter="sql",state="running"} 3.0' in text
    assert 'tandem_adapter_requests{adapter="sql",state="waiting"} 2.0' in text
    merged = merge([text.encode(), text.encode()]).decode()
    assert 'tandem_adapter_requests{adapter="legal",state="running"} 2.0' in merged
    assert f"vllm:lora_requests_info{{{labels}}} 1000.0" in merged


def test_metrics_of_several_processes_have_one_series_with_all_their_adapters() -> None:
    texts = []
    for running, waiting, num_served in ({"sql": 3, "legal": 1}, {}, 5), ({"zeta": 1}, {"sql": 2}, 6), ({}, {}, 5):
        use = AdapterUse()
        use.running.update(running)
        use.waiting.update(waiting)
        texts.append(_exposition(use, num_served).encode())
    infos = [line for line in merge(texts).decode().split("\n") if line.startswith("vllm:lora_requests_info")]
    labels = 'max_lora="6",running_lora_adapters="legal,sql,zeta",waiting_lora_adapters="sql"'
    assert infos == [f"vllm:lora_requests_info{{{labels}}} 1000.0"]


def test_metrics_labels_of_names_are_bounded_also_when_merged() -> None:
    texts = []
    for first in (0, 2000):
        use = AdapterUse()
        use.running.update({f"{number:0128d}": 1 for number in range(first, first + 2000)})
        texts.append(_exposition(use, 1).encode())
    for text in (*texts, merge(texts)):
        (info,) = [line for line in text.decode().split("\n") if line.startswith("vllm:lora_requests_info")]
        assert MAX_JOINED_CHARS - 129 < len(info) < MAX_JOINED_CHARS + 150
        assert f"{0:0128d}," in info or f"{2000:0128d}," in info


def test_metrics_label_of_an_adapter_that_is_no_longer_remembered_is_free_again() -> None:
    clock, registry = _Clock(), CollectorRegistry()
    slices = SliceMetrics(registry, TenantLabels())
    served = ServedAdapters("tiny", [adapter_of("kept")], wall_clock=clock)
    registry.register(AdapterMetrics(AdapterUse(), slices.adapters, served, is_remembered=served.remembers))
    times = FirstTokens(arrived_s=1.0, prepared_s=1.0, first_s=1.2, last_s=3.0)

    def use(name: str) -> None:
        slices.ended(RequestTraits(prompt_tokens=5, adapter=name), times, [], 5)

    use("kept")
    for number in range(MAX_NAMES):
        name = f"a{number}"
        served.add(adapter_of(name))
        use(name)
        served.remove(name)
    text = generate_latest(registry).decode()
    assert 'tandem_adapter_ttft_seconds_count{adapter="a0"} 1.0' in text, "for an hour its series stay"
    assert f'tandem_adapter_ttft_seconds_count{{adapter="{OTHER}"}} 1.0' in text
    clock.now_s += 3601
    served.add(adapter_of("new"))
    use("new")
    text = generate_latest(registry).decode()
    assert 'tandem_adapter_ttft_seconds_count{adapter="new"} 1.0' in text
    assert 'tandem_adapter_request_seconds_count{adapter="kept"} 1.0' in text
    assert 'adapter="a0"' not in text


def test_metrics_without_adapters_have_no_series() -> None:
    assert "lora" not in _exposition(AdapterUse(), 0)


def test_metrics_of_many_adapters_share_a_label() -> None:
    labels = AdapterLabels()
    assert [labels.label_for(f"a{number}") for number in range(MAX_NAMES + 2)][-2:] == [OTHER, OTHER]
    assert labels.label_for("a0") == "a0"


def test_slices_time_to_first_token_is_observed_by_adapter() -> None:
    registry = CollectorRegistry()
    slices = SliceMetrics(registry, TenantLabels())
    times = FirstTokens(arrived_s=1.0, prepared_s=1.0, first_s=1.2, last_s=3.0)
    for adapter in (None, "sql"):
        slices.ended(RequestTraits(prompt_tokens=5, adapter=adapter), times, [], 5)
    text = generate_latest(registry).decode()
    assert 'tandem_adapter_ttft_seconds_count{adapter="sql"} 1.0' in text
    assert 'tandem_adapter_request_seconds_bucket{adapter="sql",le="1.0"} 0.0' in text
    assert text.count("tandem_adapter_ttft_seconds_count") == 1
