"""The section `prices`: what requests cost, for the cost line of an answer and the totals of a tenant."""

from typing import Annotated

from pydantic import Field

from tandem.config.section import Section

Price = Annotated[float, Field(ge=0.0, le=1e9)]


class PriceConfig(Section):
    """A table of prices; what stands at 0 is free. Prices of tokens and of seconds may stand together."""

    currency: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,15}$")] = "USD"
    """Shown beside amounts."""
    prompt_per_million: Price = 0.0
    """Tokens of prompts."""
    cached_discount: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of that price which cached tokens of a prompt are spared: 1 makes them free."""
    completion_per_million: Price = 0.0
    """Tokens of answers."""
    prefill_second: Price = 0.0
    """Of computing a prompt, on one worker."""
    decode_second: Price = 0.0
    """Of one choice's place in a decode worker's batch."""
    kv_gib_second: Price = 0.0
    """Of a GiB of KV blocks held."""
