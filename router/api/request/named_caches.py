"""Named beginnings of conversations (`cachedContents`): their owners, expiry, and number. Pure.

A pin of the same name keeps the prompt's blocks, for as long as `engine.kv_cache.pins` decides; this is what a later
request needs to begin with them again. Processes that share a host's ports publish their changes to each other
(`router.api.request.shared_named_caches`): the later of two changes wins, and what was removed does not come back.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from router.text.chat_template import Message
from router.workers.prefix_pins import PinRegistry
from tandem.errors import CacheNotFound, InvalidRequest, Overloaded

NAME_PREFIX = "cachedContents/"
DEFAULT_TTL_S = 3600.0
MAX_DISPLAY_NAME_CHARS = 128
_REMEMBERED_S = 60.0
"""Time for which removals are remembered: a process that has not read of one by then has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCache:
    """One named cache. Times are Unix times."""

    name: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    """Prompt tokens that every conversation with this beginning starts with."""
    created_s: float
    updated_s: float
    expires_s: float
    display_name: str | None = None
    version: int = 0
    """Number of changes so far."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept: whole blocks. One more is known, so that something is left to compute."""
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrompts:
    """The pins and named caches of one router process."""

    pins: PinRegistry
    caches: "NamedCaches | None"
    """None where named caches are disabled."""
    publish: Callable[[str, str], Awaitable[None]] | None = None
    """Publishes the state of a tenant's cache of that name to the processes that share the ports."""


class NamedCaches:
    """All named caches of one router process."""

    def __init__(self, *, clock: Callable[[], float], most: int, max_ttl_s: float) -> None:
        """`clock`: Unix time. `most`: bound per tenant."""
        self.clock = clock
        self._most = most
        self._max_ttl_s = max_ttl_s
        self._by_tenant: dict[str, dict[str, NamedCache]] = {}
        self._removed: dict[tuple[str, str], float] = {}
        """Time until which each removal is remembered, by tenant and name."""

    def check_room(self, tenant: str) -> None:
        """Check that the tenant may have one more. Raises Overloaded."""
        if len(self._live(tenant)) >= self._most:
            raise Overloaded(f"{self._most} cached contents exist already; delete one, or let one expire")

    def check_end(self, expires_s: float) -> float:
        """Check an expiry time and return it. Raises InvalidRequest."""
        if not 0.0 < expires_s - self.clock() <= self._max_ttl_s:
            raise InvalidRequest(f"ttl must be above 0 and at most {self._max_ttl_s:g} s from now", param="ttl")
        return expires_s

    def add(self, tenant: str, cache: NamedCache) -> None:
        """Add a cache for the tenant. Raises Overloaded."""
        self.check_room(tenant)
        self._by_tenant.setdefault(tenant, {})[cache.name] = cache

    def get(self, tenant: str, name: str) -> NamedCache:
        """Return the tenant's cache of that name. Raises CacheNotFound."""
        cache = self._live(tenant).get(name)
        if cache is None:
            raise CacheNotFound(f"{name[:100]!r} does not exist or has expired", param="cached_content")
        return cache

    def all(self, tenant: str) -> list[NamedCache]:
        """Return the tenant's caches, the newest last."""
        return sorted(self._live(tenant).values(), key=lambda cache: cache.created_s)

    def all_entries(self) -> list[tuple[str, str, NamedCache | None]]:
        """Return tenant and name of each cache that exists or was recently removed."""
        live = [
            (tenant, name, cache) for tenant in tuple(self._by_tenant) for name, cache in self._live(tenant).items()
        ]
        return live + [(tenant, name, None) for tenant, name in self._removed]

    def find(self, tenant: str, name: str) -> NamedCache | None:
        """Return the tenant's cache; None if there is none."""
        return self._live(tenant).get(name)

    def apply_remote(self, tenant: str, name: str, cache: NamedCache | None) -> bool:
        """Apply another process's state of a cache (None: removed); return whether it was news."""
        if cache is None:
            was_here = self.find(tenant, name) is not None
            self._forget(tenant, name)
            return was_here
        own = self.find(tenant, name)
        is_later = own is None or (cache.version, cache.expires_s) > (own.version, own.expires_s)
        if (tenant, name) in self._removed or not is_later or cache.expires_s <= self.clock():
            return False
        self._by_tenant.setdefault(tenant, {})[name] = cache
        return True

    def prolong(self, tenant: str, name: str, expires_s: float) -> NamedCache:
        """Change the expiry. Raises CacheNotFound or InvalidRequest."""
        cache = self.get(tenant, name)
        version = cache.version + 1
        cache = replace(cache, expires_s=self.check_end(expires_s), updated_s=self.clock(), version=version)
        self._by_tenant[tenant][name] = cache
        return cache

    def remove(self, tenant: str, name: str) -> None:
        """Delete the tenant's cache of that name. Raises CacheNotFound."""
        self.get(tenant, name)
        self._forget(tenant, name)

    def _forget(self, tenant: str, name: str) -> None:
        now_s = self.clock()
        self._by_tenant.get(tenant, {}).pop(name, None)
        self._removed = {key: until_s for key, until_s in self._removed.items() if until_s > now_s}
        self._removed[tenant, name] = now_s + _REMEMBERED_S

    def _live(self, tenant: str) -> dict[str, NamedCache]:
        now_s = self.clock()
        live = {name: cache for name, cache in self._by_tenant.get(tenant, {}).items() if cache.expires_s > now_s}
        if live:
            self._by_tenant[tenant] = live
        else:
            self._by_tenant.pop(tenant, None)
        return live
