"""The HTTP door: OpenAI's routes, those for operators, and nothing that decides."""

from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from router.access.access_control import Doorkeeper
from router.api.frontend import Frontend
from router.api.named_cache_prompts import NamedPrompts
from router.http.admin.debug import DecisionRoutes, PinRoutes
from router.http.admin.profiles import ProfileRoutes
from router.http.admin.shared_scrape import SharedReading
from router.http.admin.status import StatusRoutes
from router.http.admin.status_page import add_page
from router.http.admin.usage import UsageRoutes
from router.http.anthropic.messages import MessagesRoutes
from router.http.body.error_formats import anthropic_error, google_error
from router.http.google.cached_contents import PATH, CachedContentRoutes
from router.http.openai.batches import BATCHES, FILES, BatchRoutes
from router.http.openai.embeddings import EmbeddingRoutes
from router.http.openai.generation import GenerationRoutes
from router.http.openai.models_and_tokenize import TextRoutes
from router.http.openai.responses.routes import ResponsesRoutes
from router.http.openapi.document import OpenApiRoute
from router.http.routing.access_guard import Guard, OperatorPage, operator, public
from router.http.routing.generation_calls import Answering
from router.http.routing.route_table import Routes
from router.http.server.middleware import Envelope
from router.metrics.exposition import only_tenant
from router.metrics.router_metrics import RouterMetrics
from router.placement.decision_log import DecisionLog
from router.status.feed import StatusFeed
from router.types.requests import Generator
from tandem.config.cluster import RouterConfig
from tandem.errors import Unavailable

_DISTRIBUTION = "tandem-serve"
STATUS_WRITE_TIMEOUT_S = 10.0
"""Whoever does not read a status for so long has none to look at."""


class Readiness(Protocol):
    """Whether this router can answer."""

    def not_ready_reason(self) -> str | None:
        """None once a decode worker has answered; until then, what is missing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a door may have beside its models; without one its routes are none."""

    decisions: DecisionLog | None = None
    """Shown at /debug/decisions, unless none are kept."""
    status: StatusFeed | None = None
    """Shown below /status/ and on the page at /."""
    batches: BatchRoutes | None = None
    profiles: ProfileRoutes | None = None
    """Below /debug/profile."""


def create_app(
    frontend: Frontend,
    generator: Generator,
    readiness: Readiness,
    config: RouterConfig,
    metrics: RouterMetrics,
    extras: Extras | None = None,
    keeper: Doorkeeper | None = None,
) -> ASGIApp:
    """The ASGI application. It owns nothing: whoever made the parts closes them.

    `keeper`: of keys and audit log; the configured keys alone when absent.
    """
    keeper, extras = keeper or Doorkeeper(config), extras or Extras()
    routes = Routes(guard := Guard(keeper.keys, config))
    named, most_bytes = NamedPrompts.of(frontend), config.max_body_bytes
    generation = GenerationRoutes(frontend, generator, metrics, max_body_bytes=most_bytes, named=named)
    answering = Answering.of(frontend, generator, metrics, max_body_bytes=most_bytes)
    _add_prompt_caching(routes, answering, named)
    texts = TextRoutes(frontend, max_body_bytes=most_bytes)
    routes.add("POST", "/v1/chat/completions", public(generation.chat))
    routes.add("POST", "/v1/completions", public(generation.completions))
    routes.add("POST", "/v1/responses", public(ResponsesRoutes(answering).create))
    routes.add("POST", "/v1/embeddings", public(EmbeddingRoutes(frontend, generator, metrics, config).embed))
    routes.add("GET", "/v1/models", public(texts.models))
    routes.add("GET", "/v1/models/*", public(texts.model))
    routes.add("POST", "/tokenize", public(texts.tokenize))
    routes.add("POST", "/detokenize", public(texts.detokenize))
    routes.add("GET", "/v1/usage", public(UsageRoutes(metrics.usage).show))
    _add_extras(routes, extras)
    document = OpenApiRoute(routes, guard, keeper.keys, frontend.model, _version())
    routes.add("GET", "/openapi.json", operator(document.show, OperatorPage.OPENAPI))
    _add_operator_routes(routes, readiness, metrics)
    return Envelope(routes, metrics, keeper.audit)


def _add_extras(routes: Routes, extras: Extras) -> None:
    if extras.batches is not None:
        extras.batches.add_to(routes)
    else:
        for path in (FILES, BATCHES):
            routes.off(path, "router.batches.path")
    if extras.decisions is not None and extras.decisions.most:
        routes.add("GET", "/debug/decisions", public(DecisionRoutes(extras.decisions).show))
    if extras.profiles is not None:
        routes.add("POST", "/debug/profile/router", public(extras.profiles.router))
        routes.add("POST", "/debug/profile/worker", public(extras.profiles.worker))
    else:
        routes.off("/debug/profile", "profiling.enabled")
    if extras.status is not None:
        shown = StatusRoutes(extras.status, write_timeout_s=STATUS_WRITE_TIMEOUT_S)
        routes.add("GET", "/status/snapshot", public(shown.snapshot))
        routes.add("GET", "/status/events", public(shown.events))
        add_page(routes)


def _add_prompt_caching(routes: Routes, answering: Answering, named: NamedPrompts | None) -> None:
    messages, kept = MessagesRoutes(answering), answering.frontend.kept
    routes.add("POST", "/v1/messages", public(messages.messages), show_error=anthropic_error)
    routes.add("POST", "/v1/messages/count_tokens", public(messages.count_tokens), show_error=anthropic_error)
    if kept is not None:
        routes.add("GET", "/debug/pins", public(PinRoutes(kept.pins).show))
    if named is not None:
        _add_cached_contents(routes, CachedContentRoutes(answering, named))


def _add_cached_contents(routes: Routes, cached: CachedContentRoutes) -> None:
    for method, path, handler in (
        ("POST", PATH, public(cached.create)),
        ("GET", PATH, public(cached.list_all)),
        ("GET", f"{PATH}/*", public(cached.get)),
        ("PATCH", f"{PATH}/*", public(cached.patch)),
        ("DELETE", f"{PATH}/*", public(cached.delete)),
    ):
        routes.add(method, path, handler, show_error=google_error)


def _version() -> str:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def _add_operator_routes(routes: Routes, readiness: Readiness, metrics: RouterMetrics) -> None:
    """Probes, metrics, version."""

    async def health(_request: Request) -> dict[str, Any]:
        return {"status": "alive"}

    async def readyz(_request: Request) -> dict[str, Any]:
        if (reason := readiness.not_ready_reason()) is not None:
            raise Unavailable(f"not ready: {reason}", retry_after_s=1.0)
        return {"status": "ready"}

    scrape = SharedReading(metrics.collect)

    async def render_metrics(request: Request) -> Response:
        text = await scrape()
        if not request.state.sees_all:
            text = only_tenant(text, metrics.tenants.label(request.state.tenant))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(_request: Request) -> dict[str, Any]:
        return {"version": _version()}

    routes.add("GET", "/health", operator(health, OperatorPage.HEALTH))
    routes.add("GET", "/readyz", operator(readyz, OperatorPage.READYZ))
    routes.add("GET", "/metrics", operator(render_metrics, OperatorPage.METRICS))
    routes.add("GET", "/version", operator(version, OperatorPage.VERSION))
