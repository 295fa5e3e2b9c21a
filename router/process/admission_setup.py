"""From the configuration to a gate before dispatch."""

from collections.abc import Callable

from router.access.api_keys import ApiKeyStore
from router.admission.cluster_capacity import CapacityPolicy
from router.admission.concurrency_limit import Admission
from router.admission.continuations import Continuations
from router.admission.fair_admission import FairAdmission
from router.admission.types import AdmissionPolicy
from router.dispatch.admission_queue import AdmissionQueue
from router.dispatch.choices.context import HedgingSettings
from router.dispatch.dispatcher import Dispatcher
from router.metrics.admission import AdmissionMetrics
from router.metrics.router_metrics import RouterMetrics
from router.metrics.worker_health import HealthMetrics
from router.placement.costs import CostModel
from router.tenants.rate_limits import RateLimiter
from router.tenants.shared_rate_limits import SharedRateLimits, tenant_tags
from router.workers.registry import WorkerRegistry
from tandem.config.cluster import ClusterConfig, RouterConfig


def cost_model(config: RouterConfig) -> CostModel:
    """What placement predicts with, and the gate by what it will do."""
    return CostModel(
        local_prefill_tokens=config.local_prefill_tokens, max_local_prefill_tokens=config.max_local_prefill_tokens
    )


def admission_policy(config: RouterConfig, *, max_running: int) -> AdmissionPolicy:
    """`max_running`: what a worker runs at once where the router's own bound is left open."""
    queue = config.queue
    return AdmissionPolicy(
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
    """None: off."""
    asked = config.hedging
    return None if asked is None else HedgingSettings(quantile=asked.quantile, budget=asked.budget)


def make_limits(config: RouterConfig, secret: bytes, clock: Callable[[], float]) -> SharedRateLimits:
    """The accounts of all tenants that there are."""
    limiter = RateLimiter(config.limits, clock=clock)
    return SharedRateLimits(limiter, tenants=ApiKeyStore(config.api_keys).tenants, tag_of=tenant_tags(secret))


def make_gate(
    config: ClusterConfig,
    dispatcher: Dispatcher,
    admission: Admission,
    registry: WorkerRegistry,
    clock: Callable[[], float],
    limiter: RateLimiter,
    metrics: RouterMetrics,
) -> AdmissionQueue:
    """The queue before `dispatcher`, which has it from now on; `admission`: its own, whose places bound what runs.

    What it and `dispatcher` know is shown in `metrics` from now on.
    """

    fair = FairAdmission(
        view=registry.view,
        places=admission.num_free,
        num_refused=lambda: dispatcher.num_waiting_for_room,
        limiter=limiter,
        policy=admission_policy(config.router, max_running=config.engine.max_running_requests),
        clock=clock,
        is_due=lambda: registry.worker_due_s() > 0.0,
    )
    metrics.registry.register(AdmissionMetrics(fair, metrics.tenants))
    metrics.registry.register(HealthMetrics(dispatcher.health, dispatcher.hedging, clock))
    continuations = Continuations(
        most=config.router.max_inflight_requests, remembered_s=config.router.request_timeout_s, clock=clock
    )
    dispatcher.queue = AdmissionQueue(fair, registry, continuations)
    return dispatcher.queue
