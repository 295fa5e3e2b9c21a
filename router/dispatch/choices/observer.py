"""The observer of dispatch's decisions: the router's metrics, or none."""

from typing import Protocol


class DispatchObserver(Protocol):
    """Receives dispatch's decisions, on the event loop, so calls must be quick (`router.metrics.router_metrics`)."""

    def placed(self, mode: str) -> None:
        """Count an attempt that was sent; `mode` is a value of PlacementReason."""
        ...

    def retried(self, reason: str) -> None:
        """Count a failed attempt or hand-off that another follows; `reason` is a value of RetryReason."""
        ...


class SilentObserver:
    """Counts nothing: for probes, which are not clients' requests."""

    def placed(self, mode: str) -> None: ...

    def retried(self, reason: str) -> None: ...
