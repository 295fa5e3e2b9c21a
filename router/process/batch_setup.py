"""Builds batches from the configuration: the folder, the endpoints, the runner."""

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from router.api.frontend import Frontend
from router.api.request.strict_json import check_num_values, parse
from router.batches.files.store import BatchStore
from router.batches.runner import BatchRunner, RunnerBounds
from router.dispatch.admission_queue import AdmissionQueue
from router.http.body.json_body import BodyBounds
from router.http.openai.batches import BatchRoutes
from router.http.openai.generation import CHAT_BODY, CHAT_PATH, COMPLETION_BODY, COMPLETIONS_PATH, GenerationRoutes
from router.http.routing.internal_calls import InternalCalls, InternalEndpoint
from router.metrics.router_metrics import RouterMetrics
from router.types.requests import Generator
from tandem.config.cluster import RouterConfig


class IdleCapacity(Protocol):
    """The part of admission that batches wait for."""

    def has_idle_room(self) -> bool:
        """Whether a request arriving now would run at once (`router.admission.fair_admission`)."""
        ...


def make_batches(
    frontend: Frontend, generator: Generator, admission: IdleCapacity, config: RouterConfig, metrics: RouterMetrics
) -> tuple[BatchRoutes, BatchRunner] | None:
    """Build routes and runner, if a folder is configured; the caller must enter the runner."""
    batches = config.batches
    if batches.path is None:
        return None
    body_bounds = BodyBounds.for_model(config.max_body_bytes, frontend.model.max_model_len)

    def read(text: bytes) -> Any:
        check_num_values(text, body_bounds.max_values)
        return parse(text)

    store = BatchStore(Path(batches.path), max_tenant_bytes=batches.max_tenant_bytes, keep_s=batches.keep_s)
    generation = GenerationRoutes(frontend, generator, metrics)
    endpoints = {
        CHAT_PATH: InternalEndpoint(generation.chat, CHAT_BODY),
        COMPLETIONS_PATH: InternalEndpoint(generation.completions, COMPLETION_BODY),
    }
    calls = InternalCalls(endpoints, body_bounds)
    bounds = RunnerBounds(
        max_concurrent=batches.max_concurrent,
        max_requests=batches.max_requests,
        max_line_bytes=config.max_body_bytes,
        parse=read,
    )
    runner = BatchRunner(store, calls.answer, admission.has_idle_room, bounds)
    return BatchRoutes(store, runner, batches, time.time), runner


async def open_batches(
    stack: AsyncExitStack,
    frontend: Frontend,
    generator: Generator,
    queue: AdmissionQueue,
    config: RouterConfig,
    metrics: RouterMetrics,
) -> BatchRoutes | None:
    """Run batches until `stack` is left, and return their routes; no new requests begin once the queue drains."""
    made = make_batches(frontend, generator, queue.admission, config, metrics)
    if made is None:
        return None
    routes, runner = made
    await stack.enter_async_context(runner)
    return routes
