"""Section `prices`: the prices of requests, shown in responses and in tenants' totals."""

from typing import Annotated

from pydantic import Field

from tandem.config.section import Section

Price = Annotated[float, Field(ge=0.0, le=1e9)]


class PriceConfig(Section):
    """Prices; 0 means free. Prices per token and per second add up."""

    currency: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,15}$")] = "USD"
    """Currency shown with amounts."""
    prompt_per_million: Price = 0.0
    """Price of a million prompt tokens."""
    cached_discount: float = Field(default=0.0, ge=0.0, le=1.0)
    """Discount on that price for cached prompt tokens: 1 makes them free."""
    completion_per_million: Price = 0.0
    """Price of a million completion tokens."""
    prefill_second: Price = 0.0
    """Price of a second of prefill on one worker."""
    decode_second: Price = 0.0
    """Price of a second of one choice in a decode worker's batch."""
    kv_gib_second: Price = 0.0
    """Price of holding a GiB of KV blocks for a second."""
