"""The HTTP door: OpenAI's routes, those for operators, and nothing that decides."""

from dataclasses import dataclass

from starlette.types import ASGIApp

from router.access.access_control import AccessControl
from router.api.frontend import Frontend
from router.api.named_cache_prompts import NamedCacheService
from router.http.admin.debug import DecisionRoutes, PinRoutes
from router.http.admin.operations import ReadinessSource, UsageRoutes, add_operator_routes, installed_version
from router.http.admin.profiles import ProfileRoutes
from router.http.admin.status import StatusRoutes, add_page
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
from router.http.routing.generation_calls import GenerationContext
from router.http.routing.route_table import Routes
from router.http.server.middleware import RequestMiddleware
from router.metrics.router_metrics import RouterMetrics
from router.placement.decision_log import DecisionLog
from router.status.feed import StatusFeed
from router.types.requests import Generator
from tandem.config.cluster import RouterConfig

STATUS_WRITE_TIMEOUT_S = 10.0
"""Whoever does not read a status for so long has none to look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalRoutes:
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
    readiness: ReadinessSource,
    config: RouterConfig,
    metrics: RouterMetrics,
    extras: OptionalRoutes | None = None,
    keeper: AccessControl | None = None,
) -> ASGIApp:
    """The ASGI application. It owns nothing: whoever made the parts closes them.

    `keeper`: of keys and audit log; the configured keys alone when absent.
    """
    keeper, extras = keeper or AccessControl(config), extras or OptionalRoutes()
    routes = Routes(guard := Guard(keeper.keys, config))
    named, most_bytes = NamedCacheService.from_frontend(frontend), config.max_body_bytes
    generation = GenerationRoutes(frontend, generator, metrics, max_body_bytes=most_bytes, named=named)
    answering = GenerationContext.create(frontend, generator, metrics, max_body_bytes=most_bytes)
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
    routes.add("GET", "/v1/usage", public(UsageRoutes(metrics.usage).get_usage))
    _add_extras(routes, extras)
    document = OpenApiRoute(routes, guard, keeper.keys, frontend.model, installed_version())
    routes.add("GET", "/openapi.json", operator(document.get_document, OperatorPage.OPENAPI))
    add_operator_routes(routes, readiness, metrics)
    return RequestMiddleware(routes, metrics, keeper.audit)


def _add_extras(routes: Routes, extras: OptionalRoutes) -> None:
    if extras.batches is not None:
        extras.batches.add_to(routes)
    else:
        for path in (FILES, BATCHES):
            routes.off(path, "router.batches.path")
    if extras.decisions is not None and extras.decisions.most:
        routes.add("GET", "/debug/decisions", public(DecisionRoutes(extras.decisions).list_decisions))
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


def _add_prompt_caching(routes: Routes, answering: GenerationContext, named: NamedCacheService | None) -> None:
    messages, kept = MessagesRoutes(answering), answering.frontend.kept
    routes.add("POST", "/v1/messages", public(messages.messages), show_error=anthropic_error)
    routes.add("POST", "/v1/messages/count_tokens", public(messages.count_tokens), show_error=anthropic_error)
    if kept is not None:
        routes.add("GET", "/debug/pins", public(PinRoutes(kept.pins).list_pins))
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
