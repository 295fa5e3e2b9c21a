"""The parts of the router's configuration that say who may ask for how much, and what happens to the rest."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, SecretStr

from tandem.config.section import Seconds, Section
from tandem.values.api_key import is_digest, is_well_formed, kept_of

_KEY = re.compile(r"[\x21-\x7e]{1,512}")
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _sendable(key: SecretStr) -> SecretStr:
    """A header can carry it, and it is not what a client sends who has none."""
    text = key.get_secret_value()
    if not _KEY.fullmatch(text):
        raise ValueError("a key has 1 to 512 visible ASCII characters, and no spaces")
    if is_digest(text) and not is_well_formed(text):
        raise ValueError("after sha256: come 64 hexadecimal digits in small letters")
    return key


class ApiKey(Section):
    """One bearer key."""

    key: Annotated[SecretStr, AfterValidator(_sendable)]
    """`sha256:` and the digest of the key, so that the file gives nobody a key; or the key itself."""
    tenant: TenantName | None = None
    """Whose it is: keys of one tenant share its limits, its share and its cached prefixes. Absent: a tenant of its
    own."""
    operator: bool = False
    """Sees the usage of all tenants and /metrics, and may profile."""

    @property
    def kept(self) -> bytes:
        """The hash of the key."""
        return kept_of(self.key.get_secret_value())

    @property
    def is_plain(self) -> bool:
        """Whether the key itself stands here."""
        return not is_digest(self.key.get_secret_value())


def _bare_key(value: Any) -> Any:
    return {"key": value} if isinstance(value, (str, SecretStr)) else value


BearerKey = Annotated[ApiKey, BeforeValidator(_bare_key)]


class TenantLimits(Section):
    """What one tenant may have; null: without a limit, but for `best_priority`."""

    requests_per_minute: PositiveInt | None = None
    """Requests accepted per minute."""
    tokens_per_minute: PositiveInt | None = None
    """Of prompts and answers together: estimated when a request comes, settled when it has ended."""
    concurrent_requests: PositiveInt | None = None
    """Accepted and not yet answered, those that wait included."""
    weight: float = Field(default=1.0, gt=0.0, le=1000.0)
    """Share of a cluster that cannot serve all, relative to other tenants'."""
    best_priority: int | None = None
    """Requests of a better (lower) priority are treated as of this one. null: as of 0 where there are keys, for who
    goes before others is not their own to say; without keys there are no others. -2147483647: as they ask."""


class LimitsConfig(Section):
    """Limits of API keys."""

    default: TenantLimits = TenantLimits()
    """Of every tenant that is not named below."""
    tenants: dict[TenantName, TenantLimits] = Field(default={})
    """By the `tenant` of API keys; what one of these leaves out has no limit, whatever the default says."""


def mistaken_keys(keys: Sequence[ApiKey], limits: LimitsConfig) -> str | None:
    """What is wrong between keys and limits, beginning with the setting's name; never with a key in it."""
    first: dict[bytes, int] = {}
    for index, one in enumerate(keys):
        if (before := first.setdefault(one.kept, index)) != index:
            return f"api_keys.{index}: the same key as api_keys.{before}"
    named = {one.tenant for one in keys}
    # Somebody would believe that a tenant is limited who is not.
    for tenant in limits.tenants:
        if tenant not in named:
            return f"limits.tenants.{tenant}: no key in router.api_keys has this tenant"
    return None


class QueueConfig(Section):
    """Requests that wait in the router for the cluster to have use for them."""

    max_requests: PositiveInt = 512
    """Beyond it the tenant with the longest line is turned away with 429."""
    max_tokens: PositiveInt = 4_000_000
    """Of all waiting prompts."""
    worker_backlog_s: Seconds = 0.25
    """Work that is kept ahead of each worker, so that none is idle between two requests; what is in its own queue
    nobody can overtake any more."""
    max_running_per_worker: PositiveInt | None = None
    """Requests on one decode worker at a time; when absent `engine.max_running_requests`."""
    max_itl_s: Seconds | None = None
    """A decode worker whose steps take longer gets no request beside those it has; null: it does."""
    input_weight: float = Field(default=1.0, gt=0.0, le=1000.0)
    """What a computed prompt token counts in fair shares."""
    output_weight: float = Field(default=2.0, gt=0.0, le=1000.0)
    """What a token of an answer counts."""


class HedgingConfig(Section):
    """A second attempt elsewhere for a request whose first token is late."""

    quantile: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Of measured times to first token: who has waited longer gets one."""
    budget: float = Field(default=0.05, gt=0.0, le=0.5)
    """Second attempts per request, at most."""
