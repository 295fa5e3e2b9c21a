"""Batches put together from the configuration: the folder, who answers, who runs them."""

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from router.batches.runner import BatchRunner, RunnerBounds
from router.batches.store import BatchStore
from router.batches.values import ENDPOINTS
from router.doorkeeper import Doorkeeper
from router.frontend import Frontend
from router.gate import Gate
from router.http.batch_routes import BATCHES, FILES, BatchRoutes
from router.http.generation import GenerationRoutes
from router.http.guard import Guard
from router.http.inner_call import InnerCalls
from router.http.json_body import BodyBounds, check_num_values, parse
from router.http.middleware import Envelope
from router.http.routes import Routes
from router.metrics import RouterMetrics
from router.requests import Generator
from tandem.config import RouterConfig


class IdleRoom(Protocol):
    """What of admission matters here."""

    def has_idle_room(self) -> bool:
        """See `router.fair_admission.FairAdmission`."""
        ...


def with_batches(
    app: ASGIApp,
    frontend: Frontend,
    generator: Generator,
    admission: IdleRoom,
    config: RouterConfig,
    metrics: RouterMetrics,
    keeper: Doorkeeper,
) -> tuple[ASGIApp, BatchRunner | None]:
    """The door with files and batches, if there is a folder for them; who runs what comes there is to be entered."""
    batches = config.batches
    if batches.path is None:
        return app, None
    max_values = BodyBounds.of(config.max_body_bytes, frontend.model.max_model_len).max_values

    def read(text: bytes) -> Any:
        check_num_values(text, max_values)
        return parse(text)

    store = BatchStore(Path(batches.path), max_tenant_bytes=batches.max_tenant_bytes, keep_s=batches.keep_s)
    generation = GenerationRoutes(frontend, generator, metrics, max_body_bytes=config.max_body_bytes)
    calls = InnerCalls(dict(zip(ENDPOINTS, (generation.chat, generation.completions), strict=True)))
    bounds = RunnerBounds(
        max_concurrent=batches.max_concurrent,
        max_requests=batches.max_requests,
        max_line_bytes=config.max_body_bytes,
        parse=read,
    )
    runner = BatchRunner(store, calls.answer, admission.has_idle_room, bounds)
    routes = Routes(Guard(keeper.keys, config))
    BatchRoutes(store, runner, batches, time.time).add_to(routes)
    below = Envelope(routes, metrics, keeper.audit)

    async def both(scope: Scope, receive: Receive, send: Send) -> None:
        is_below = scope["type"] == "http" and scope["path"].startswith((FILES, BATCHES))
        await (below if is_below else app)(scope, receive, send)

    return both, runner


async def open_batches(
    stack: AsyncExitStack,
    app: ASGIApp,
    frontend: Frontend,
    gate: Gate,
    config: RouterConfig,
    metrics: RouterMetrics,
    keeper: Doorkeeper,
) -> ASGIApp:
    """The door with batches, which run until `stack` is left; nothing more of them is begun once the gate drains."""
    app, runner = with_batches(app, frontend, gate, gate.admission, config, metrics, keeper)
    if runner is not None:
        await stack.enter_async_context(runner)
    return app
