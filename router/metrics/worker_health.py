"""Metrics of worker health (circuit breakers, quarantined requests, hedged attempts), and of the links between
workers."""

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.dispatch.choices.hedging import Hedging
from router.workers.health import WorkerHealth
from router.workers.pair_links import PairTable
from tandem.circuit_breaker import BreakerState


class HealthMetrics(Collector):
    """Exports dispatch's records at each scrape."""

    def __init__(self, health: WorkerHealth, hedging: Hedging | None, clock: Callable[[], float]) -> None:
        """`hedging`: statistics of hedged attempts; None where hedging is off."""
        self._health = health
        self._hedging = hedging
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        """Yield the current figures, without workers that never failed."""
        breakers = GaugeMetricFamily(
            "tandem_worker_breaker",
            "1 for the current state of the worker's circuit breaker",
            labels=("worker", "state"),
        )
        for key, now in self._health.breakers.states(self._clock()).items():
            for state in BreakerState:
                breakers.add_metric((key.worker_id, state.value), float(state is now))
        yield breakers
        poison, hedging = self._health.poison, self._hedging
        yield _counter(
            "tandem_quarantined_requests",
            "Requests quarantined because workers died while running them",
            poison.num_condemned,
        )
        yield _counter(
            "tandem_quarantine_refusals",
            "Requests rejected because they equal a quarantined one",
            poison.num_refused,
        )
        yield _counter("tandem_hedges", "Hedged attempts started", hedging.num_started if hedging else 0)
        yield _counter(
            "tandem_hedges_won", "Hedged attempts that produced the first token", hedging.num_won if hedging else 0
        )


class LinkMetrics(Collector):
    """Exports what hand-offs have shown of each class of links."""

    def __init__(self, pairs: PairTable, clock: Callable[[], float]) -> None:
        self._pairs = pairs
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        labels = ("locality", "transport")
        speeds = GaugeMetricFamily(
            "tandem_link_bytes_per_second",
            "Expected KV bytes per second of exposed hand-off time, by link class",
            labels=labels,
        )
        evidence = GaugeMetricFamily(
            "tandem_link_handoffs",
            "Hand-offs behind that estimate (half-life two minutes)",
            labels=labels,
        )
        for rate in self._pairs.rates(self._clock()):
            values = (rate.link.locality.value, rate.link.transport)
            speeds.add_metric(values, rate.bytes_per_s)
            evidence.add_metric(values, rate.num_handoffs)
        yield speeds
        yield evidence


def _counter(name: str, text: str, value: float) -> Metric:
    counter = CounterMetricFamily(name, text)
    counter.add_metric((), value)
    return counter
