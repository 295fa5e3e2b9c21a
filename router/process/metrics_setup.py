"""From the configuration to a router's metrics."""

import time

from router.access.access_control import Doorkeeper
from router.cluster_state.redis_metrics import ClusterStateMetrics
from router.cluster_state.redis_tasks import RouterClusterState
from router.metrics.router_metrics import RouterMetrics
from router.tenants.prices import PriceTable
from router.tenants.usage import TenantUsage
from tandem.config.cluster import ClusterConfig


def make_metrics(
    config: ClusterConfig, model_name: str, keeper: Doorkeeper, board: RouterClusterState | None
) -> RouterMetrics:
    """With what keys and the board in Redis have to show; the latter where there is one."""
    usage = TenantUsage(PriceTable(config.prices), since_s=time.time())
    metrics = RouterMetrics(model_name, usage, config.telemetry.objectives)
    keeper.show(metrics.registry)
    metrics.tenants.is_nameless = keeper.keys.is_nameless
    if board is not None:
        metrics.registry.register(ClusterStateMetrics(board))
    return metrics
