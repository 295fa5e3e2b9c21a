"""The part of the configuration that says which cached prompts stay, for how long, and who may find them."""

from pydantic import Field, PositiveInt

from tandem.config.section import Seconds, Section


class PinnedShares(Section):
    """Of one worker's pool: what prefixes may hold that clients asked to be kept. A request that would not fit beside
    them makes them give way; one that does never touches them."""

    pinned_share: float = Field(default=0.25, ge=0.0, le=0.9)
    """Of the pool's blocks, over all tenants; beyond it a pin is refused."""
    pinned_tenant_share: float = Field(default=0.125, ge=0.0, le=0.9)
    """Of the pool's blocks, for one tenant; beyond it its least recently used pins give way to its new one."""


class PromptCacheConfig(Section):
    """Prompt caching as clients see it."""

    shared_by_tenants: bool = False
    """One tenant finds what another has cached: equal prompts are computed once, and the time that one takes tells
    whether somebody else has sent it."""
    max_pins: PositiveInt = 4096
    """Pinned prefixes that one router process knows of."""
    max_named: PositiveInt = 64
    """`cachedContents` that one tenant has on one host, whichever of its router processes made them."""
    max_ttl_s: Seconds = 86_400.0
    """Longest life of one of them."""


class PromptCaching(Section):
    """Base of the router's section."""

    prompt_cache: PromptCacheConfig = PromptCacheConfig()
