"""Routes for operators: probes, metrics, version, usage."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Annotated, Any, Literal, Protocol

from fastapi import APIRouter, Depends, Query
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from router.http.body.answer_object import AnswerObject, AnyObject
from router.http.routing.access import AccessGuard, ClientAccess, OperatorPage, PageAccess
from router.metrics.router_metrics import RouterMetrics
from router.tenants.usage import TenantUsage
from tandem.errors import Unavailable

_DISTRIBUTION = "tandem-serve"


class SharedScrape:
    """Shares one reading among concurrent callers, since a reading takes milliseconds of the event loop.

    No caller gets a reading that began before its call: one that calls during a reading shares the next one. For use on
    one event loop.
    """

    def __init__(self, read: Callable[[], Awaitable[bytes]]) -> None:
        """`read` never runs twice at the same time."""
        self._read = read
        self._under_way: asyncio.Task[bytes] | None = None
        self._next: asyncio.Task[bytes] | None = None
        """The reading that has not begun yet."""

    async def __call__(self) -> bytes:
        """Read, or share the reading that is about to begin. A cancelled caller does not cancel it for others."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._make(self._under_way))
        return await asyncio.shield(self._next)

    async def _make(self, before: asyncio.Task[bytes] | None) -> bytes:
        if before is not None:
            await asyncio.wait([before])
        await asyncio.sleep(0)  # callers from the same turn of the loop
        self._under_way, self._next = self._next, None
        return await self._read()


class UsageReport(AnswerObject):
    object: Literal["usage"]
    data: list[AnyObject]
    total: AnyObject


class UsageRoutes:
    """The path operation of /v1/usage."""

    def __init__(self, usage: TenantUsage) -> None:
        self._usage = usage

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        router.add_api_route("/v1/usage", self.get_usage, methods=["GET"], response_model=UsageReport)
        return router

    async def get_usage(self, request: Request) -> dict[str, Any]:
        """Return the totals of the key's own tenant; of all tenants for an operator, and where there are no keys."""
        only = None if request.state.sees_all else request.state.tenant
        return self._usage.object(await self._usage.collect(), only=only)


class ReadinessSource(Protocol):
    """Reports whether this router can answer."""

    def not_ready_reason(self, *, exclude_workers: bool = False) -> str | None:
        """Return None once a decode worker has answered; until then, what is missing.

        `exclude_workers`: check the router alone.
        """
        ...


def installed_version() -> str:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


class LivenessReport(AnswerObject):
    status: str


class VersionReport(AnswerObject):
    version: str


class OperatorRoutes:
    """Path operations for orchestrators and scrapers: probes, metrics, version."""

    def __init__(self, readiness: ReadinessSource, metrics: RouterMetrics) -> None:
        self._readiness = readiness
        self._metrics = metrics
        self._scrape = SharedScrape(metrics.collect)

    def router(self, guard: AccessGuard) -> APIRouter:
        router = APIRouter()
        for path, page, endpoint, model in (
            ("/health", OperatorPage.HEALTH, self.health, LivenessReport),
            ("/readyz", OperatorPage.READYZ, self.readyz, LivenessReport),
            ("/version", OperatorPage.VERSION, self.version, VersionReport),
        ):
            access = [Depends(PageAccess(guard, page))]
            router.add_api_route(path, endpoint, methods=["GET"], response_model=model, dependencies=access)
        access = [Depends(PageAccess(guard, OperatorPage.METRICS))]
        router.add_api_route(
            "/metrics", self.render_metrics, methods=["GET"], response_class=PlainTextResponse, dependencies=access
        )
        return router

    async def health(self) -> dict[str, Any]:
        """Answer that the process is alive."""
        return {"status": "alive"}

    async def readyz(self, exclude: Annotated[list[Literal["workers"]] | None, Query()] = None) -> dict[str, Any]:
        """Answer whether requests can be served; 503 says what is missing. `exclude=workers`: check the router
        alone."""
        if (reason := self._readiness.not_ready_reason(exclude_workers=bool(exclude))) is not None:
            raise Unavailable(f"not ready: {reason}", retry_after_s=1.0)
        return {"status": "ready"}

    async def render_metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' format; a tenant's key gets only the tenant's own series."""
        text = await self._scrape()
        if not request.state.sees_all:
            text = _only_tenant(text, self._metrics.tenants.label(request.state.tenant))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self) -> dict[str, Any]:
        """Return the installed version."""
        return {"version": installed_version()}


def _only_tenant(text: bytes, label: str) -> bytes:
    """Return the series of an exposition that carry `tenant="label"`, below the heads of their families.

    An unescaped quote ends a label's value, so the text searched for cannot occur inside one.
    """
    marks = [f'{before}tenant="{_escaped(label)}"' for before in ("{", ",")]
    kept: list[str] = []
    head: list[str] = []
    for line in text.decode().split("\n"):
        if line.startswith("#"):
            # HELP begins a family's head, and TYPE follows.
            head = [line] if line.startswith("# HELP ") else [*head, line]
        elif any(mark in line for mark in marks):
            kept += [*head, line]
            head = []
    return "".join([f"{line}\n" for line in kept]).encode()


def _escaped(value: str) -> str:
    if "\\" in value or "\n" in value or '"' in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value
