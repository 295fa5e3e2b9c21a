"""Plain instruments render as prometheus_client's own would."""

import contextlib

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from router.api.request_meter import RequestMeter
from router.metrics.instruments import LabelledCounter, LabelledHistogram, LocalHistogram, SingleValue
from router.metrics.router_metrics import RouterMetrics
from tandem.errors import Unavailable

LABELS = {"model_name": "m", "engine": "router"}


def samples(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@pytest.mark.parametrize("finer", [(), (0.001, 0.25, 0.5, 3e9)])
def test_local_histogram_renders_like_the_library(finer: tuple[float, ...]) -> None:
    bounds = (0.015625, 0.5, 1.0, 500000.0, 2e7)
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = LocalHistogram("tandem_x", "some", bounds, LABELS, finer=finer)
    ours.register(plain)
    library = Histogram("tandem_x", "some", tuple(LABELS), buckets=bounds, registry=theirs).labels(*LABELS.values())
    for value in (0.0, 0.015625, 0.03125, 0.5, 3.0, 1e9):
        for _ in range(4):
            library.observe(value)
        plain.observe(value)
        plain.observe_many(value, 3)
    assert samples(ours) == samples(theirs)
    assert sum(plain.counts) == 24
    assert plain.counts[plain.bounds.index(0.5)] == (4 if finer else 8)


def test_pending_observations_stay_few_however_requests_end() -> None:
    metrics = RouterMetrics("toy")
    for _ in range(1000):
        with contextlib.suppress(Unavailable), RequestMeter(metrics, lambda: 0.0, prompt_tokens=3, choices=1):
            raise Unavailable("no worker")
    assert max(len(one.pending) for one in metrics._histograms) < 100
    with RequestMeter(metrics, lambda: 0.0, prompt_tokens=3, choices=1) as meter:
        for _ in range(10_000):
            meter.tokens(0, 1)
            meter.token(0)
            metrics.on_load()
    assert max(len(one.pending) for one in metrics._histograms) < 100
    assert sum(metrics.itl.counts) == 19_999


def test_local_counter_renders_like_the_library() -> None:
    registry = CollectorRegistry()
    count = SingleValue("tandem_c", "some", CounterMetricFamily, LABELS)
    level = SingleValue("tandem_g", "some", GaugeMetricFamily, LABELS)
    registry.register(count)
    registry.register(level)
    count.inc()
    count.inc(4)
    level.inc(2)
    level.dec()
    assert registry.get_sample_value("tandem_c_total", LABELS) == 5
    assert registry.get_sample_value("tandem_g", LABELS) == 1


def test_labelled_counter_renders_like_the_library() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    plain = LabelledCounter("tandem_c", "some", ("a", "b"))
    ours.register(plain)
    library = Counter("tandem_c", "some", ("a", "b"), registry=theirs)
    for values in (("1", 'q"uote'), ("2", "y"), ("1", 'q"uote')):
        plain.inc(*values)
        library.labels(*values).inc()
    plain.inc("2", "y", amount=40)
    library.labels("2", "y").inc(40)
    assert samples(ours) == samples(theirs)


def test_labelled_counter_sum_adds_all_labels() -> None:
    counts = LabelledCounter("tandem_t", "some", ("code",))
    counts.inc("a", amount=2)
    counts.inc("b")
    assert (counts.sum(), counts.sum(without="a")) == (3, 1)


def test_labelled_histogram_observes_several_like_one_by_one() -> None:
    one_by_one, at_once = CollectorRegistry(), CollectorRegistry()
    first, second = (LabelledHistogram("tandem_h", "some", (0.1, 1.0), ("a",)) for _ in range(2))
    one_by_one.register(first)
    at_once.register(second)
    for value in (0.05, 0.1, 3.0):
        first.observe(value, "x")
        first.observe(2 * value, "y")
        second.observe_each({("x",): value, ("y",): 2 * value})
    assert samples(one_by_one) == samples(at_once)
