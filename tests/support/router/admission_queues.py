"""A gate for the tests: real sessions and dispatch behind it, fake workers behind those."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from router.admission.cluster_capacity import CapacityPolicy
from router.admission.continuations import Continuations
from router.admission.fair_admission import FairAdmission
from router.admission.rate_limits import RateLimiter
from router.admission.types import AdmissionPolicy
from router.dispatch.admission_queue import AdmissionQueue
from router.dispatch.dispatcher import Dispatcher
from router.types.requests import RoutedRequest
from tandem.config.admission import LimitsConfig
from tests.support.fake_worker import FakeWorker
from tests.support.router.cluster import Cluster, cluster, routed


@asynccontextmanager
async def gated(
    *workers: FakeWorker,
    running: int = 1,
    inflight: int = 100,
    passing: int = 100,
    limits: LimitsConfig | None = None,
    **bounds: float,
) -> AsyncIterator[tuple[Dispatcher, Cluster]]:
    async with cluster(*workers) as core:
        admission = FairAdmission(
            view=core.registry.view,
            num_running=lambda: core.dispatcher.num_inflight,
            limiter=RateLimiter(limits or LimitsConfig(), clock=time.monotonic),
            policy=AdmissionPolicy(
                max_inflight=inflight, room=CapacityPolicy(max_running_per_worker=running), **bounds
            ),
            clock=time.monotonic,
            is_due=lambda: core.registry.worker_due_s() > 0.0,
        )
        continuations = Continuations(most=passing, remembered_s=600.0, clock=time.monotonic)
        core.dispatcher.queue = AdmissionQueue(admission, core.registry, continuations)
        yield core.dispatcher, core


def of(tenant: str, number: int) -> RoutedRequest:
    return replace(routed(request_id=f"{tenant}{number}"), tenant=tenant)
