"""What a scrape is answered with is what prometheus_client would have said."""

from math import inf, nan

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.metrics.exposition import render_exposition
from router.metrics.router_metrics import RouterMetrics


def test_it_is_what_the_library_says() -> None:
    registry = CollectorRegistry()
    ended = Counter("ended", 'Said "so"\\ over\ntwo lines', ("why", "by"), registry=registry)
    for value in ("plain", 'quote"', "back\\slash", "two\nlines", "é"):
        ended.labels(value, "x").inc(0.1)
    for value, number in (("infinite", inf), ("none", nan), ("negative", -1e-9), ("large", 1e22)):
        Gauge(f"gauge_{value}", "A number", registry=registry).set(number)
    Histogram("seconds", "Time", ("kind",), buckets=(0.1, 1.0), registry=registry).labels("a").observe(0.5)
    assert render_exposition(registry) == generate_latest(registry)
    assert b"ended_created" in render_exposition(registry)


def test_so_is_what_a_router_tells() -> None:
    metrics = RouterMetrics("m")
    metrics.http_answered("/v1/completions", "POST", 200)
    metrics.rpc_answered("Generate", "OK")
    metrics.ttft.observe(0.2)
    assert metrics.render() == generate_latest(metrics.registry)
