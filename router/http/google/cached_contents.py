"""/v1beta/cachedContents: named beginnings of conversations, made, looked at, prolonged and deleted."""

from typing import Any

from starlette.requests import Request

from router.api.answer.choice_text import TextCollector
from router.api.named_cache_prompts import NamedCacheService
from router.api.request.client_request import PreparedRequest
from router.api.request.named_caches import DEFAULT_TTL_S, NAME_PREFIX, NamedCache
from router.http.body.client_link import WhileConnected
from router.http.google.body import CacheExpiry, CreateBody, shown_time
from router.http.openai.schemas import validate
from router.http.routing.generation_calls import GenerationContext
from tandem.errors import InvalidRequest

PATH = "/v1beta/cachedContents"
_MAX_PAGE = 1000


class CachedContentRoutes:
    """The handlers of the five routes."""

    def __init__(self, answering: GenerationContext, named: NamedCacheService) -> None:
        self._answering = answering
        self._frontend = answering.frontend
        self._named = named

    async def create(self, request: Request) -> dict[str, Any]:
        """The answer comes when the prefix is computed and kept."""
        body = validate(CreateBody, await self._answering.read_object(request))
        self._frontend.check_model(body.model.removeprefix("models/"))

        async def compute(prepared: PreparedRequest) -> None:
            await self._answering.read_text([prepared], TextCollector())

        async with WhileConnected(request.scope, request.receive):
            cache = await self._named.create(
                request.state.tenant,
                body.messages(),
                expires_s=body.expires_s(self._named.caches.clock(), DEFAULT_TTL_S),
                display_name=body.displayName,
                compute=compute,
            )
        return self._shown(cache)

    async def get(self, request: Request) -> dict[str, Any]:
        """One of the tenant's own."""
        return self._shown(self._named.caches.get(request.state.tenant, _name(request)))

    async def list_all(self, request: Request) -> dict[str, Any]:
        """Page by page. Raises InvalidRequest."""
        query = request.query_params
        if unknown := query.keys() - {"pageSize", "pageToken"}:
            raise InvalidRequest(f"{min(unknown)[:40]!r} is no parameter of this list; pageSize and pageToken are")
        size, start = (_number(query.get(name), name) for name in ("pageSize", "pageToken"))
        size = size or _MAX_PAGE
        caches = self._named.caches.all(request.state.tenant)
        shown: dict[str, Any] = {"cachedContents": [self._shown(cache) for cache in caches[start : start + size]]}
        if start + size < len(caches):
            shown["nextPageToken"] = str(start + size)
        return shown

    async def patch(self, request: Request) -> dict[str, Any]:
        """Another end."""
        query = request.query_params
        body = validate(CacheExpiry, await self._answering.read_object(request))
        mask = query.get("updateMask")
        if query.keys() - {"updateMask"} or (mask is not None and mask not in body.model_fields_set):
            raise InvalidRequest("updateMask names what the body changes: ttl or expireTime", param="updateMask")
        expires_s = body.expires_s(self._named.caches.clock())
        return self._shown(await self._named.prolong(request.state.tenant, _name(request), expires_s))

    async def delete(self, request: Request) -> dict[str, Any]:
        """It need not be kept any longer."""
        await self._named.remove(request.state.tenant, _name(request))
        return {}

    def _shown(self, cache: NamedCache) -> dict[str, Any]:
        shown = {
            "name": cache.name,
            "model": f"models/{self._frontend.model.name}",
            "createTime": shown_time(cache.created_s),
            "updateTime": shown_time(cache.updated_s),
            "expireTime": shown_time(cache.expires_s),
            "usageMetadata": {"totalTokenCount": cache.num_tokens},
        }
        return shown if cache.display_name is None else shown | {"displayName": cache.display_name}


def _name(request: Request) -> str:
    path: str = request.scope["path"]
    return NAME_PREFIX + path.removeprefix(f"{PATH}/")


def _number(text: str | None, param: str) -> int:
    if text is None or text == "":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 6):
        raise InvalidRequest(f"{param} must be a number", param=param)
    return int(text)
