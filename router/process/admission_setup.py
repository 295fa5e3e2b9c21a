"""Builds admission from the configuration: limits, policy, and the queue before dispatch."""

from collections.abc import Callable

from router.access.api_keys import ApiKeyStore
from router.admission.cluster_capacity import CapacityPolicy
from router.admission.continuations import Continuations
from router.admission.fair_admission import FairAdmission
from router.admission.rate_limits import RateLimiter
from router.admission.shared_rate_limits import SharedRateLimits, tenant_tags
from router.admission.types import AdmissionPolicy
from router.dispatch.admission_queue import AdmissionQueue
from router.dispatch.choices.context import HedgingSettings
from router.dispatch.dispatcher import Dispatcher
from router.host_peers.rate_limits import RateLimitFile
from router.metrics.admission import AdmissionMetrics
from router.metrics.router_metrics import RouterMetrics
from router.metrics.worker_health import HealthMetrics, LinkMetrics
from router.placement.costs import CostModel
from router.types.worker_view import WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.config.cluster import ClusterConfig, RouterConfig


def cost_model(config: RouterConfig) -> CostModel:
    """Return the cost model by which placement decides, and admission predicts placement."""
    return CostModel(
        local_prefill_tokens=config.local_prefill_tokens, max_local_prefill_tokens=config.max_local_prefill_tokens
    )


def admission_policy(config: RouterConfig, *, max_running: int) -> AdmissionPolicy:
    """`max_running`: requests that a worker runs at once, used where the router's own bound is not set."""
    queue = config.queue
    return AdmissionPolicy(
        max_inflight=config.max_inflight_requests,
        max_requests=queue.max_requests,
        max_tokens=queue.max_tokens,
        max_queue_s=config.max_queue_s,
        input_weight=queue.input_weight,
        output_weight=queue.output_weight,
        room=CapacityPolicy(
            worker_backlog_s=queue.worker_backlog_s,
            max_running_per_worker=queue.max_running_per_worker or max_running,
            max_itl_s=queue.max_itl_s,
            costs=cost_model(config),
        ),
    )


def hedging_settings(config: RouterConfig) -> HedgingSettings | None:
    """Return the settings of hedging; None when it is off."""
    hedging = config.hedging
    return None if hedging is None else HedgingSettings(quantile=hedging.quantile, budget=hedging.budget)


def make_limits(
    config: RouterConfig, secret: bytes, clock: Callable[[], float], account: RateLimitFile | None = None
) -> SharedRateLimits:
    """Build the limits of all tenants; `account`: shared by the router processes of this host, None for a single
    one."""
    tag_of, tenants = tenant_tags(secret), ApiKeyStore(config.api_keys).tenants
    if account is None:
        return SharedRateLimits(RateLimiter(config.limits, clock=clock), tenants=tenants, tag_of=tag_of)
    limiter = RateLimiter(config.limits, clock=clock, usage_of=lambda tenant: account.usage_of(tag_of(tenant)))
    return SharedRateLimits(limiter, tenants=tenants, tag_of=tag_of, host=account)


def make_admission_queue(
    config: ClusterConfig,
    dispatcher: Dispatcher,
    registry: WorkerRegistry,
    clock: Callable[[], float],
    limiter: RateLimiter,
    metrics: RouterMetrics,
) -> AdmissionQueue:
    """Install the queue before `dispatcher` and register its metrics."""
    fair = FairAdmission(
        view=registry.view,
        num_running=lambda: dispatcher.num_inflight,
        num_refused=lambda: dispatcher.num_waiting_for_room,
        refused=dispatcher.memory_waited_for,
        limiter=limiter,
        policy=admission_policy(config.router, max_running=config.engine.max_running_requests),
        clock=clock,
        is_due=lambda: registry.worker_due_s() > 0.0,
    )
    metrics.registry.register(AdmissionMetrics(fair, metrics.tenants))
    metrics.registry.register(HealthMetrics(dispatcher.health, dispatcher.hedging, clock))
    metrics.registry.register(LinkMetrics(registry.pairs, clock))
    continuations = Continuations(
        most=config.router.max_inflight_requests, remembered_s=config.router.request_timeout_s, clock=clock
    )
    dispatcher.queue = AdmissionQueue(fair, registry, continuations)
    on_load = registry.on_load

    def on_load_measured(worker: WorkerSnapshot) -> None:
        on_load(worker)
        metrics.on_load()

    registry.on_load = on_load_measured
    return dispatcher.queue
