"""Routes for those who run the router: probes, metrics, version, usage."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from router.http.routing.access_guard import OperatorPage, operator
from router.http.routing.route_table import Routes
from router.metrics.exposition import only_tenant
from router.metrics.router_metrics import RouterMetrics
from router.tenants.usage import TenantUsage
from tandem.errors import InvalidRequest, Unavailable

_DISTRIBUTION = "tandem-serve"


class SharedScrape:
    """One reading for all who ask at once: what takes milliseconds of the event loop is made once, however many ask.

    Nobody gets what was read before it asked: a call that comes while a reading is under way shares the next one. For
    use on one event loop.
    """

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        """`read` is never under way twice."""
        self._read = read
        self._under_way: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None
        """It has not begun yet."""

    async def __call__(self) -> bytes:
        """Read, or have part in what is about to be read. One who gives up waiting takes it from nobody else."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._make(self._under_way))
        return await asyncio.shield(self._next)

    async def _make(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(0)  # those whose questions came in the same turn of the loop
        self._under_way, self._next = self._next, None
        return await self._read()


class UsageRoutes:
    """The handler of the one route."""

    def __init__(self, usage: TenantUsage) -> None:
        self._usage = usage

    async def get_usage(self, request: Request) -> dict[str, Any]:
        """Totals of the key's own tenant; of all tenants for an operator, and where no keys are configured."""
        only = None if request.state.sees_all else request.state.tenant
        return self._usage.object(await self._usage.collect(), only=only)


class ReadinessSource(Protocol):
    """Whether this router can answer."""

    def not_ready_reason(self, *, exclude_workers: bool = False) -> str | None:
        """None once a decode worker has answered; until then, what is missing.

        `exclude_workers`: look at the router alone.
        """
        ...


def installed_version() -> str:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def add_operator_routes(routes: Routes, readiness: ReadinessSource, metrics: RouterMetrics) -> None:
    """Probes, metrics, version."""

    async def health(_request: Request) -> dict[str, Any]:
        return {"status": "alive"}

    async def readyz(request: Request) -> dict[str, Any]:
        excluded = set(request.query_params.getlist("exclude"))
        if excluded - {"workers"}:
            raise InvalidRequest("exclude must be workers", param="exclude")
        if (reason := readiness.not_ready_reason(exclude_workers=bool(excluded))) is not None:
            raise Unavailable(f"not ready: {reason}", retry_after_s=1.0)
        return {"status": "ready"}

    scrape = SharedScrape(metrics.collect)

    async def render_metrics(request: Request) -> Response:
        text = await scrape()
        if not request.state.sees_all:
            text = only_tenant(text, metrics.tenants.label(request.state.tenant))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(_request: Request) -> dict[str, Any]:
        return {"version": installed_version()}

    routes.add("GET", "/health", operator(health, OperatorPage.HEALTH))
    routes.add("GET", "/readyz", operator(readyz, OperatorPage.READYZ))
    routes.add("GET", "/metrics", operator(render_metrics, OperatorPage.METRICS))
    routes.add("GET", "/version", operator(version, OperatorPage.VERSION))
