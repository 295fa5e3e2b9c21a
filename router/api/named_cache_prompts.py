"""Creates named caches and prepares conversations that begin with one."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from router.api.cache_breakpoints import common_length
from router.api.frontend import Frontend
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.api.request.named_caches import NAME_PREFIX, NamedCache, NamedCaches
from router.text.chat_template import Message
from router.types.requests import PinRequest
from router.workers.prefix_pins import PinRegistry
from tandem.errors import InvalidRequest, Overloaded
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.prefix_pin import PinOutcome
from tandem.values.sampling import SamplingParams

_ANSWER_S = 10.0
"""Time limit for the worker to report whether it holds the blocks."""
_SYSTEM = frozenset({"system", "developer"})


class _PinOutcomeWaiter:
    """Waits for a worker's report about a pin, which may arrive just as the wait times out."""

    def __init__(self) -> None:
        self.outcome: asyncio.Future[PinOutcome] = asyncio.get_running_loop().create_future()

    def set(self, outcome: PinOutcome) -> None:
        """Set the outcome, unless the wait is over."""
        if not self.outcome.done():
            self.outcome.set_result(outcome)


class NamedCacheService:
    """Named caches of one router process; changes reach processes that share its ports before a call returns."""

    def __init__(
        self,
        frontend: Frontend,
        caches: NamedCaches,
        pins: PinRegistry,
        publish: Callable[[str, str], Awaitable[None]] | None = None,
    ) -> None:
        """`publish` sends a change to the other processes, as in CachedPrompts."""
        self.caches = caches
        self._publish = publish
        self._frontend = frontend
        self._pins = pins

    @classmethod
    def from_frontend(cls, frontend: Frontend) -> "NamedCacheService | None":
        """Return the service; None where named caches are disabled."""
        kept = frontend.kept
        return None if kept is None or kept.caches is None else cls(frontend, kept.caches, kept.pins, kept.publish)

    async def create(
        self,
        tenant: str,
        messages: Sequence[Message],
        *,
        expires_s: float,
        display_name: str | None,
        compute: Callable[[PreparedRequest], Awaitable[None]],
    ) -> NamedCache:
        """Have the beginning computed and kept. Raises InvalidRequest, and what `compute` raises; Overloaded when the
        tenant has too many, or no worker keeps it.
        """
        self.caches.check_room(tenant)
        self.caches.check_end(expires_s)
        ids = await self._beginning(tenant, messages)
        if len(ids) < HASH_BLOCK_TOKENS:
            raise InvalidRequest(f"contents: a cache needs at least {HASH_BLOCK_TOKENS} tokens", param="contents")
        now_s = self.caches.clock()
        cache = NamedCache(
            name=f"{NAME_PREFIX}{secrets.token_hex(12)}",
            messages=tuple(messages),
            token_ids=tuple(ids),
            created_s=now_s,
            updated_s=now_s,
            expires_s=expires_s,
            display_name=display_name,
        )
        fields = ClientRequest(sampling=SamplingParams(), max_tokens=1, tenant=tenant, reads_along=False)
        (prepared,) = await self._frontend.prepare_prompts([cache.token_ids], fields)
        is_added = is_over = False
        try:
            pinned = self._with_pin(prepared, cache, lambda: None if is_over else self._ends_s(cache))
            outcome = await self._kept(tenant, cache, compute(pinned))
            if outcome is not PinOutcome.HELD:
                raise Overloaded(f"no worker can keep this content now ({outcome.value})", retry_after_s=_ANSWER_S)
            self.caches.add(tenant, cache)
            is_added = True
        finally:
            is_over = True
            if not is_added:
                # The client never received the name, so it could not delete the cache.
                self._pins.release(tenant, cache.name)
        await self._publish_change(tenant, cache.name)
        return cache

    async def _kept(self, tenant: str, cache: NamedCache, computing: Awaitable[None]) -> PinOutcome:
        """Compute the prefix; return the outcome that the worker reports for the pin."""
        waiter = _PinOutcomeWaiter()
        self._pins.expect(tenant, cache.name, waiter.set)
        try:
            await computing
            async with asyncio.timeout(_ANSWER_S):
                return await waiter.outcome
        except TimeoutError:
            return PinOutcome.NOT_HERE
        finally:
            self._pins.expect_no_more(tenant, cache.name)

    async def _beginning(self, tenant: str, messages: Sequence[Message]) -> list[int]:
        """Return the prompt tokens that do not depend on the messages that follow."""
        heads = []
        with self._frontend.preparing(tenant) as prompts:
            for text in ("a", "b"):
                talk = [*messages, Message(role="user", content=text)]
                heads.append(await prompts.encode_chat(talk, add_generation_prompt=False))
        length = common_length(*heads)
        return heads[0][: length // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS + 1] if length > HASH_BLOCK_TOKENS else []

    async def prepare_chat(self, name: str, messages: Sequence[Message], fields: ClientRequest) -> PreparedRequest:
        """Prepare a conversation that begins with a named cache. Raises CacheNotFound, and as
        `Frontend.prepare_chat`."""
        if not messages:
            raise InvalidRequest("messages: at least one must follow the cached content", param="messages")
        if fields.cache_salt is not None:
            raise InvalidRequest("cached_content cannot be combined with cache_salt", param="cache_salt")
        self._frontend.check_base_model(fields.model, fields.tenant)
        cache = self.caches.get(fields.tenant, name)
        if any(one.role in _SYSTEM for one in cache.messages) and any(one.role in _SYSTEM for one in messages):
            raise InvalidRequest("messages: the cached content already has a system message", param="messages")
        prepared = await self._frontend.prepare_chat([*cache.messages, *messages], fields)
        return self._with_pin(prepared, cache, lambda: self._find_end_s(fields.tenant, name))

    def _with_pin(
        self, prepared: PreparedRequest, cache: NamedCache, find_end_s: Callable[[], float | None]
    ) -> PreparedRequest:
        """Add a pin, so that the cache is kept elsewhere if its worker is gone; its expiry stays the same."""
        request, num_tokens = prepared.request, cache.num_tokens
        if request.prompt_token_ids[:num_tokens] != cache.token_ids[:num_tokens]:
            return prepared  # this template merges the two parts, so the cached prefix does not match
        wish = PinRequest(name=cache.name, num_tokens=num_tokens, find_end_s=find_end_s)
        return replace(prepared, request=replace(request, pins=(wish,)))

    async def prolong(self, tenant: str, name: str, expires_s: float) -> NamedCache:
        """Change when a cache expires. Raises CacheNotFound or InvalidRequest."""
        cache = self.caches.prolong(tenant, name, expires_s)
        self._pins.prolong(tenant, name, self._ends_s(cache))
        await self._publish_change(tenant, name)
        return cache

    async def remove(self, tenant: str, name: str) -> None:
        """Delete the cache and unpin its blocks. Raises CacheNotFound."""
        self.caches.remove(tenant, name)
        self._pins.release(tenant, name)
        await self._publish_change(tenant, name)

    async def _publish_change(self, tenant: str, name: str) -> None:
        if self._publish is not None:
            await self._publish(tenant, name)

    def _find_end_s(self, tenant: str, name: str) -> float | None:
        """Return when the cache expires, on the pins' clock; None: it has been removed."""
        cache = self.caches.find(tenant, name)
        return None if cache is None else self._ends_s(cache)

    def _ends_s(self, cache: NamedCache) -> float:
        return self._frontend.clock() + cache.expires_s - self.caches.clock()


async def prepare_named(
    frontend: Frontend,
    named: NamedCacheService | None,
    name: str | None,
    messages: Sequence[Message],
    fields: ClientRequest,
) -> PreparedRequest:
    """Prepare a conversation that begins with the named cache, if a name is given. Raises as `prepare_chat`."""
    if name is None:
        return await frontend.prepare_chat(messages, fields)
    if named is None:
        raise InvalidRequest("cached_content: named caches are disabled here", param="cached_content")
    return await named.prepare_chat(name, messages, fields)
