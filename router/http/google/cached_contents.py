"""/v1beta/cachedContents: named beginnings of conversations, created, listed, prolonged and deleted."""

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import APIRouter, Depends, Query
from pydantic import AfterValidator
from starlette.requests import Request

from router.api.answer.choice_text import TextCollector
from router.api.named_cache_prompts import NamedCacheService
from router.api.request.client_request import PreparedRequest
from router.api.request.named_caches import DEFAULT_TTL_S, NAME_PREFIX, NamedCache
from router.http.body.client_link import WhileConnected
from router.http.body.json_body import JsonBody
from router.http.google.body import (
    CachedContentList,
    CachedContentObject,
    CachedContentQuery,
    CacheExpiry,
    CacheUpdateQuery,
    CreateBody,
    NothingObject,
    shown_time,
)
from router.http.routing.access import ClientAccess
from router.http.routing.generation_calls import GenerationContext
from tandem.errors import InvalidRequest

PATH = "/v1beta/cachedContents"
_MAX_PAGE = 1000
CacheId = Annotated[str, AfterValidator(unquote)]


class CachedContentRoutes:
    """Path operations on named caches, in Google's format."""

    def __init__(self, answering: GenerationContext, named: NamedCacheService) -> None:
        self._answering = answering
        self._frontend = answering.frontend
        self._named = named

    def router(self, access: ClientAccess) -> APIRouter:
        router = APIRouter(dependencies=[Depends(access)])
        one, cache = f"{PATH}/{{id}}", CachedContentObject
        router.add_api_route(
            PATH, self.create, methods=["POST"], response_model=cache, response_model_exclude_unset=True
        )
        router.add_api_route(
            PATH, self.list_all, methods=["GET"], response_model=CachedContentList, response_model_exclude_unset=True
        )
        router.add_api_route(one, self.get, methods=["GET"], response_model=cache, response_model_exclude_unset=True)
        router.add_api_route(
            one, self.patch, methods=["PATCH"], response_model=cache, response_model_exclude_unset=True
        )
        router.add_api_route(one, self.delete, methods=["DELETE"], response_model=NothingObject)
        return router

    async def create(
        self, request: Request, body: Annotated[CreateBody, Depends(JsonBody(CreateBody))]
    ) -> dict[str, Any]:
        """Cache the beginning of a conversation; the answer comes when the prefix is computed and kept."""
        self._frontend.check_base_model(body.model.removeprefix("models/"), request.state.tenant)

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

    async def get(self, request: Request, id: CacheId) -> dict[str, Any]:
        """Describe one of the tenant's caches."""
        return self._shown(self._named.caches.get(request.state.tenant, NAME_PREFIX + id))

    async def list_all(self, request: Request, query: Annotated[CachedContentQuery, Query()]) -> dict[str, Any]:
        """List the tenant's caches, page by page."""
        size, start = query.pageSize or _MAX_PAGE, query.pageToken
        caches = self._named.caches.all(request.state.tenant)
        shown: dict[str, Any] = {"cachedContents": [self._shown(cache) for cache in caches[start : start + size]]}
        if start + size < len(caches):
            shown["nextPageToken"] = str(start + size)
        return shown

    async def patch(
        self,
        request: Request,
        id: CacheId,
        body: Annotated[CacheExpiry, Depends(JsonBody(CacheExpiry))],
        query: Annotated[CacheUpdateQuery, Query()],
    ) -> dict[str, Any]:
        """Change when a cache expires."""
        if query.updateMask is not None and query.updateMask not in body.model_fields_set:
            raise InvalidRequest("updateMask must name what the body changes: ttl or expireTime", param="updateMask")
        expires_s = body.expires_s(self._named.caches.clock())
        return self._shown(await self._named.prolong(request.state.tenant, NAME_PREFIX + id, expires_s))

    async def delete(self, request: Request, id: CacheId) -> dict[str, Any]:
        """Delete a cache: its prefix may be evicted."""
        await self._named.remove(request.state.tenant, NAME_PREFIX + id)
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
