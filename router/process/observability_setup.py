"""Builds a router's metrics and status, shared with the processes that share its ports."""

import time
from contextlib import AsyncExitStack

from router.access.access_files import AccessControl
from router.api.request.client_request import ModelInfo
from router.cluster_state.redis_metrics import ClusterStateMetrics
from router.cluster_state.redis_tasks import RouterClusterState
from router.dispatch.admission_queue import AdmissionQueue
from router.dispatch.dispatcher import Dispatcher
from router.fleet.readiness import ReadinessCheck
from router.host_peers.exchange import HostPeerExchange
from router.metrics.router_metrics import RouterMetrics
from router.metrics.stream_writers import StreamRoomCounts
from router.placement.decision_log import DecisionLog
from router.status.feed import StatusFeed
from router.status.snapshot.part import StatusSources
from router.tenants.prices import PriceTable
from router.tenants.usage import TenantUsage
from tandem.config.cluster import ClusterConfig
from tandem.process.lifetime import RouterPlace


async def open_status(
    stack: AsyncExitStack,
    place: RouterPlace,
    model: ModelInfo,
    dispatcher: Dispatcher,
    gate: AdmissionQueue,
    metrics: RouterMetrics,
    decisions: DecisionLog,
    readiness: ReadinessCheck,
) -> StatusFeed:
    """Start the status feed; the stack stops it."""
    sources = StatusSources(
        model=model,
        placer=dispatcher.placer,
        health=dispatcher.health,
        admission=gate.admission,
        metrics=metrics,
        decisions=decisions,
        not_ready_reason=readiness.not_ready_reason,
        clock=time.monotonic,
    )
    feed = StatusFeed(sources)
    if place.shared_folder is not None:
        peers = HostPeerExchange(place.shared_folder, index=place.index, render=feed.part, name="status")
        feed.merge_with((await stack.enter_async_context(peers)).others)
    return await stack.enter_async_context(feed)


def make_metrics(
    config: ClusterConfig,
    model_name: str,
    access: AccessControl,
    cluster_state: RouterClusterState | None,
    room: StreamRoomCounts,
) -> RouterMetrics:
    """Build the router's metrics, with those of access control and, where Redis is configured, of the cluster state.

    `room`: that of the streams that are written natively.
    """
    usage = TenantUsage(PriceTable(config.prices), since_s=time.time())
    metrics = RouterMetrics(model_name, usage, config.telemetry.objectives)
    metrics.writers.room = room
    access.register_metrics(metrics.registry)
    metrics.tenants.is_nameless = access.keys.is_nameless
    if cluster_state is not None:
        metrics.registry.register(ClusterStateMetrics(cluster_state))
    return metrics
