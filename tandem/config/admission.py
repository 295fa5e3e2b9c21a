"""The parts of the router's configuration about admission: API keys, tenants' limits, the queue, hedging."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, SecretStr

from tandem.config.section import Seconds, Section
from tandem.values.api_key import is_digest, is_well_formed, kept_of

_KEY = re.compile(r"[\x21-\x7e]{1,512}")
AdapterPattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/*-]{1,128}$")]
TenantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _sendable(key: SecretStr) -> SecretStr:
    """Check that a header can carry the key. Raises ValueError."""
    text = key.get_secret_value()
    if not _KEY.fullmatch(text):
        raise ValueError("a key must have 1 to 512 printable ASCII characters and no spaces")
    if is_digest(text) and not is_well_formed(text):
        raise ValueError("sha256: must be followed by 64 lowercase hexadecimal digits")
    return key


class ApiKey(Section):
    """A bearer key and the tenant that it belongs to."""

    key: Annotated[SecretStr, AfterValidator(_sendable)]
    """`sha256:` and the key's digest, so that the file reveals no key; or the key itself."""
    tenant: TenantName | None = None
    """Tenant of the key. Keys of one tenant share its limits, its weight and its cached prefixes. null: a tenant of its
    own."""
    operator: bool = False
    """Whether the key may read the usage of all tenants and /metrics, and may profile."""

    @property
    def kept(self) -> bytes:
        """The hash of the key."""
        return kept_of(self.key.get_secret_value())

    @property
    def is_plain(self) -> bool:
        """Whether the file has the key itself."""
        return not is_digest(self.key.get_secret_value())


def _bare_key(value: Any) -> Any:
    return {"key": value} if isinstance(value, (str, SecretStr)) else value


BearerKey = Annotated[ApiKey, BeforeValidator(_bare_key)]


class TenantLimits(Section):
    """Limits of one tenant. null means unlimited, except for `adapters` and `best_priority`."""

    requests_per_minute: PositiveInt | None = None
    """Requests accepted per minute."""
    tokens_per_minute: PositiveInt | None = None
    """Prompt and completion tokens per minute: estimated when a request arrives, corrected when it ends."""
    concurrent_requests: PositiveInt | None = None
    """Requests accepted and not yet completed, queued ones included."""
    weight: float = Field(default=1.0, gt=0.0, le=1000.0)
    """Share of a saturated cluster, relative to other tenants' weights."""
    adapters: tuple[AdapterPattern, ...] | None = None
    """Names of the LoRA adapters that the tenant may use, where `*` stands for any characters; `[]`: none. null: those
    of `default`, and there every one."""
    best_priority: int | None = None
    """Best (lowest) priority that the tenant's requests can have; better ones are raised to it. null: 0 when API keys
    are configured, unlimited otherwise. -2147483647: unlimited."""


class LimitsConfig(Section):
    """Limits of API keys."""

    default: TenantLimits = TenantLimits()
    """Limits of every tenant that `tenants` does not name."""
    tenants: dict[TenantName, TenantLimits] = Field(default={})
    """Limits by the `tenant` of API keys. What an entry leaves out is unlimited, whatever `default` says; only
    `adapters` are then those of `default`."""


def keys_problem(keys: Sequence[ApiKey], limits: LimitsConfig) -> str | None:
    """The contradiction between keys and limits, beginning with the setting's name; None when there is none. Contains
    no key."""
    first: dict[bytes, int] = {}
    for index, one in enumerate(keys):
        if (before := first.setdefault(one.kept, index)) != index:
            return f"api_keys.{index} is the same key as api_keys.{before}"
    named = {one.tenant for one in keys}
    # Otherwise a tenant might be believed to be limited who is not.
    for tenant in limits.tenants:
        if tenant not in named:
            return f"limits.tenants.{tenant}: no key in router.api_keys has this tenant"
    return None


class QueueConfig(Section):
    """The router's queue of requests that wait for capacity."""

    max_requests: PositiveInt = 512
    """Maximum number of queued requests. When it is exceeded, the tenant with the most queued requests gets 429."""
    max_tokens: PositiveInt = 4_000_000
    """Maximum number of prompt tokens in the queue, and in one call for embeddings, rerank or score."""
    worker_backlog_s: Seconds = 0.25
    """Seconds of work dispatched to a worker ahead of time, so that it is never idle between requests. Requests in a
    worker's own queue can no longer be overtaken."""
    max_running_per_worker: PositiveInt | None = None
    """Maximum number of requests on one decode worker. null: `engine.max_running_requests`."""
    max_itl_s: Seconds | None = None
    """A decode worker whose steps take longer than this gets no further requests. null: no such limit."""
    input_weight: float = Field(default=1.0, gt=0.0, le=1000.0)
    """Weight of a computed prompt token in fair sharing."""
    output_weight: float = Field(default=2.0, gt=0.0, le=1000.0)
    """Weight of a completion token in fair sharing."""


class HedgingConfig(Section):
    """Hedging: a second attempt on another worker for a request whose first token is late."""

    quantile: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Quantile of the measured times to first token after which a request is hedged."""
    budget: float = Field(default=0.05, gt=0.0, le=0.5)
    """Maximum number of hedged attempts per request."""
