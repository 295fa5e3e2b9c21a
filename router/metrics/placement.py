"""Metrics of placement: why prompts went where they went, how long deciding took, how good the predictions were."""

from prometheus_client import CollectorRegistry, Gauge

from router.metrics.instruments import LabelledCounter, LocalHistogram

_SECONDS = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05)


class PlacementMetrics:
    """A `router.placement.decision_log.PlacementObserver`, and what is known of the prefix map."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._decisions = LabelledCounter(
            "tandem_placement_decisions",
            "Placed choices, by where the prompt is computed and by how a cached prefix influenced that",
            ("reason", "affinity"),
        )
        self._seconds = LocalHistogram("tandem_placement_seconds", "Time to decide one placement", _SECONDS, {})
        self._cached = LabelledCounter(
            "tandem_placement_cached_tokens",
            "Prompt tokens that placement predicted to be cached on the chosen worker, and those that were",
            ("kind",),
        )
        for collector in (self._decisions, self._seconds, self._cached):
            registry.register(collector)
        self._blocks = Gauge("tandem_prefix_map_blocks", "Block names in the prefix map", registry=registry)
        self._approximate = Gauge(
            "tandem_prefix_map_approximate_workers",
            "Workers whose prefix cache is only partly known",
            registry=registry,
        )

    def decided(self, *, reason: str, affinity: str, seconds: float) -> None:
        """A choice was placed; values of PlacementReason and Affinity."""
        self._decisions.inc(reason, affinity)
        self._seconds.observe(seconds)

    def compared(self, *, predicted_tokens: int, actual_tokens: int) -> None:
        """The first token of a placed choice came, and with it the true count."""
        self._cached.inc("predicted", amount=predicted_tokens)
        self._cached.inc("actual", amount=actual_tokens)

    def prefix_map(self, *, num_blocks: int, num_approximate: int) -> None:
        """Block names the router knows, over all workers; and of how many workers it does not know all."""
        self._blocks.set(num_blocks)
        self._approximate.set(num_approximate)
