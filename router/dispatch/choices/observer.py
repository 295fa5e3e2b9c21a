"""The observer of dispatch's decisions: the router's metrics, or none."""

from typing import Protocol


class DispatchObserver(Protocol):
    """Called on the event loop, so each must be quick. `router.metrics.router_metrics.RouterMetrics` is one."""

    def placed(self, mode: str) -> None:
        """An attempt was sent; `mode` is a value of PlacementReason."""
        ...

    def retried(self, reason: str) -> None:
        """An attempt or a hand-off failed and another follows; `reason` is a value of RetryReason."""
        ...


class SilentObserver:
    """Counts nothing: probes are not clients' requests."""

    def placed(self, mode: str) -> None: ...

    def retried(self, reason: str) -> None: ...
