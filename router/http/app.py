"""The HTTP application: FastAPI with each API's routers; generating routes bypass it."""

from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import APIRouter, Depends, FastAPI
from starlette.responses import Response
from starlette.types import ASGIApp

from router.access.access_files import AccessControl
from router.api.embeddings import Embedder
from router.api.frontend import Frontend
from router.api.named_cache_prompts import NamedCacheService
from router.api.relevance import RelevanceScorer
from router.api.request.client_request import ModelInfo
from router.http.admin.adapters import AdapterRoutes
from router.http.admin.debug import DecisionRoutes, PinRoutes
from router.http.admin.operations import OperatorRoutes, ReadinessSource, UsageRoutes, installed_version
from router.http.admin.profiles import ProfileRoutes
from router.http.admin.status import StatusRoutes, page_router
from router.http.anthropic.messages import MESSAGES_PATH, MessagesRoutes
from router.http.body.json_body import BodyBounds
from router.http.google.cached_contents import CachedContentRoutes
from router.http.openai.batches import BATCHES, FILES, BatchRoutes
from router.http.openai.generation import CHAT_PATH, COMPLETIONS_PATH, GenerationRoutes
from router.http.openai.models_and_tokenize import TextRoutes
from router.http.openai.responses.routes import RESPONSES_PATH, ResponsesRoutes
from router.http.openapi.document import OpenApiDocument, operation_id
from router.http.pooling.embeddings import EmbeddingRoutes
from router.http.pooling.relevance import RelevanceRoutes
from router.http.routing.access import AccessGuard, ClientAccess, OperatorPage, PageAccess, check_access
from router.http.routing.direct_routes import DirectRoutes
from router.http.routing.error_answers import ErrorAnswers, MissingRoutes
from router.http.routing.generation_calls import GenerationContext
from router.http.server.middleware import RequestMiddleware
from router.metrics.router_metrics import RouterMetrics
from router.placement.decision_log import DecisionLog
from router.status.feed import StatusFeed
from router.types.requests import Generator
from tandem.config.cluster import RouterConfig

STATUS_WRITE_TIMEOUT_S = 10.0
"""A client that reads nothing of a status stream for this long is disconnected."""
DIRECT_PATHS = (CHAT_PATH, COMPLETIONS_PATH, RESPONSES_PATH, MESSAGES_PATH)
"""Paths answered without FastAPI, because of its cost per request (ADR 17)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionalRoutes:
    """Optional parts of an application; the routes of an absent part do not exist."""

    decisions: DecisionLog | None = None
    """Served at /debug/decisions, unless no decisions are kept."""
    status: StatusFeed | None = None
    """Served below /status/ and by the page at /."""
    batches: BatchRoutes | None = None
    profiles: ProfileRoutes | None = None
    """Served below /debug/profile."""

    def disabled(self) -> dict[str, str]:
        """Paths that are absent because a setting does not enable them, with the setting."""
        found = {} if self.batches is not None else dict.fromkeys((FILES, BATCHES), "router.batches.path")
        return found if self.profiles is not None else found | {"/debug/profile": "profiling.enabled"}


def create_app(
    frontend: Frontend,
    generator: Generator,
    readiness: ReadinessSource,
    config: RouterConfig,
    metrics: RouterMetrics,
    extras: OptionalRoutes | None = None,
    access: AccessControl | None = None,
) -> ASGIApp:
    """Build the ASGI application. It owns nothing: its parts are closed by their makers.

    `access`: API keys and audit log; without it, just the configured keys.
    """
    access = access or AccessControl(config)
    guard = AccessGuard(access.keys, config)
    bounds = BodyBounds.for_model(config.max_body_bytes, frontend.model.max_model_len)
    api = _create_api(guard, frontend.model, bounds, extras or OptionalRoutes())
    context = GenerationContext(frontend=frontend, generator=generator, metrics=metrics)
    for router in _routers(context, config, readiness, guard, extras or OptionalRoutes()):
        api.include_router(router)
    check_access(api)
    return RequestMiddleware(DirectRoutes(api, guard, bounds, DIRECT_PATHS), metrics, access.audit)


def _create_api(guard: AccessGuard, model: ModelInfo, bounds: BodyBounds, extras: OptionalRoutes) -> FastAPI:
    api = FastAPI(
        title="Tandem",
        version=installed_version(),
        # The document requires access like every route; /docs is built from files of our own, without third-party
        # hosts.
        openapi_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
        # Spans, metrics and logs are the router's own.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    api.state.body_bounds = bounds
    api.add_middleware(ErrorAnswers)
    MissingRoutes(guard, extras.disabled()).add_to(api)
    api.include_router(_document_router(OpenApiDocument(api, guard, model), guard))
    return api


def _document_router(document: OpenApiDocument, guard: AccessGuard) -> APIRouter:
    router = APIRouter(dependencies=[Depends(PageAccess(guard, OperatorPage.OPENAPI))])

    async def get_document() -> Response:
        """Return the OpenAPI document of this router."""
        return Response(orjson.dumps(document.render()), media_type="application/json")

    router.add_api_route("/openapi.json", get_document, methods=["GET"], response_model=dict[str, Any])
    return router


def _routers(
    context: GenerationContext,
    config: RouterConfig,
    readiness: ReadinessSource,
    guard: AccessGuard,
    extras: OptionalRoutes,
) -> list[APIRouter]:
    frontend, metrics, clients = context.frontend, context.metrics, ClientAccess(guard)
    named = NamedCacheService.from_frontend(frontend)
    embedder = Embedder(frontend, context.generator, most_values=config.max_answer_values)
    found = [
        OperatorRoutes(readiness, metrics).router(guard),
        GenerationRoutes(frontend, context.generator, metrics, named).router(clients),
        ResponsesRoutes(context).router(clients),
        MessagesRoutes(context).router(clients),
        EmbeddingRoutes(frontend, embedder, metrics).router(clients),
        RelevanceRoutes(frontend, RelevanceScorer(frontend, context.generator, embedder), metrics).router(clients),
        TextRoutes(frontend).router(clients),
        AdapterRoutes(frontend).router(clients),
        UsageRoutes(metrics.usage).router(clients),
    ]
    if frontend.kept is not None:
        found.append(PinRoutes(frontend.kept.pins).router(clients))
    if named is not None:
        found.append(CachedContentRoutes(context, named).router(clients))
    if extras.batches is not None:
        found.append(extras.batches.router(clients))
    if extras.decisions is not None and extras.decisions.most:
        found.append(DecisionRoutes(extras.decisions).router(clients))
    if extras.profiles is not None:
        found.append(extras.profiles.router(clients))
    if extras.status is not None:
        status = StatusRoutes(extras.status, write_timeout_s=STATUS_WRITE_TIMEOUT_S)
        found += [status.router(clients), page_router(guard)]
    return found
