"""Named beginnings of conversations over gRPC, as /v1beta/cachedContents offers them over HTTP."""

from collections.abc import Awaitable, Callable

from router.api.answer.choice_text import TextCollector, TextSink
from router.api.frontend import Frontend
from router.api.named_cache_prompts import NamedCacheService
from router.api.request.client_request import PreparedRequest
from router.api.request.named_caches import DEFAULT_TTL_S, MAX_DISPLAY_NAME_CHARS, NamedCache
from router.grpc.client_request import model_of
from router.grpc.conversation import check_no_breakpoints, messages_of
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb

_DISPLAY_NAME = "display_name"


class CachedContentCalls:
    """The five cached-content calls, each for one tenant."""

    def __init__(
        self,
        frontend: Frontend,
        named: NamedCacheService | None,
        read: Callable[[PreparedRequest, TextSink], Awaitable[None]],
    ) -> None:
        """`named`: None where named caches are disabled. `read` computes a request's prompt."""
        self._frontend = frontend
        self._kept = named
        self._read = read

    async def create(self, tenant: str, request: pb.CreateCachedContentRequest) -> pb.CachedContent:
        """Compute and keep a prefix under a name. Raises as `NamedCacheService.create`."""
        named = self._named()
        self._frontend.check_base_model(model_of(request), tenant)
        check_no_breakpoints(request.chat)
        if not request.chat.messages:
            raise InvalidRequest("chat must have at least one message", param="chat")
        if len(request.display_name) > MAX_DISPLAY_NAME_CHARS:
            raise InvalidRequest(f"{_DISPLAY_NAME}: at most {MAX_DISPLAY_NAME_CHARS} characters", param=_DISPLAY_NAME)

        async def compute(prepared: PreparedRequest) -> None:
            await self._read(prepared, TextCollector())

        cache = await named.create(
            tenant,
            messages_of(request.chat),
            expires_s=_expires_s(request, named.caches.clock(), DEFAULT_TTL_S),
            display_name=request.display_name if request.HasField(_DISPLAY_NAME) else None,
            compute=compute,
        )
        return _shown(cache)

    def get(self, tenant: str, request: pb.GetCachedContentRequest) -> pb.CachedContent:
        """Describe one cache. Raises CacheNotFound."""
        return _shown(self._named().caches.get(tenant, request.name))

    def list_all(self, tenant: str) -> pb.ListCachedContentsResponse:
        """List the tenant's caches, all on one page: they are few."""
        caches = self._named().caches.all(tenant)
        return pb.ListCachedContentsResponse(cached_contents=[_shown(cache) for cache in caches])

    async def update(self, tenant: str, request: pb.UpdateCachedContentRequest) -> pb.CachedContent:
        """Change when a cache expires. Raises CacheNotFound or InvalidRequest."""
        named = self._named()
        return _shown(await named.prolong(tenant, request.name, _expires_s(request, named.caches.clock())))

    async def delete(self, tenant: str, request: pb.DeleteCachedContentRequest) -> pb.DeleteCachedContentResponse:
        """End a cache and its pins. Raises CacheNotFound."""
        await self._named().remove(tenant, request.name)
        return pb.DeleteCachedContentResponse()

    def _named(self) -> NamedCacheService:
        if self._kept is None:
            raise InvalidRequest("cached_content: named caches are disabled here", param="cached_content")
        return self._kept


def _expires_s(
    request: pb.CreateCachedContentRequest | pb.UpdateCachedContentRequest, now_s: float, default_s: float | None = None
) -> float:
    """Return the requested expiry as Unix time. Raises InvalidRequest when none is given, or two."""
    if request.HasField("ttl_s") and request.HasField("expires_s"):
        raise InvalidRequest("send either ttl_s or expires_s", param="expires_s")
    if request.HasField("expires_s"):
        return request.expires_s
    if not request.HasField("ttl_s") and default_s is None:
        raise InvalidRequest("send ttl_s or expires_s: nothing else can be changed", param="ttl_s")
    return now_s + (request.ttl_s if request.HasField("ttl_s") else default_s or 0.0)


def _shown(cache: NamedCache) -> pb.CachedContent:
    return pb.CachedContent(
        name=cache.name,
        num_tokens=cache.num_tokens,
        created_s=cache.created_s,
        updated_s=cache.updated_s,
        expires_s=cache.expires_s,
        display_name=cache.display_name,
    )
