"""Usage of requests, and its cost by the configured price table. Pure."""

from msgspec import Struct
from msgspec.structs import replace

from tandem.config.prices import PriceConfig
from tandem.values.outputs import PhaseTimes

_MILLION = 1e6
_GIB = float(1 << 30)


class Spent(Struct, frozen=True, kw_only=True):
    """Usage of one request, one client call, or all requests of a tenant."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were cached."""
    completion_tokens: int = 0
    computed_tokens: int = 0
    needed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    kv_byte_s: float = 0.0

    def plus(self, other: "Spent") -> "Spent":
        return Spent(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            computed_tokens=self.computed_tokens + other.computed_tokens,
            needed_tokens=self.needed_tokens + other.needed_tokens,
            prefill_s=self.prefill_s + other.prefill_s,
            decode_s=self.decode_s + other.decode_s,
            kv_byte_s=self.kv_byte_s + other.kv_byte_s,
        )

    def with_choice(self, times: PhaseTimes, *, computed_tokens: int, needed_tokens: int) -> "Spent":
        """Add the usage of one ended choice."""
        return replace(
            self,
            computed_tokens=self.computed_tokens + computed_tokens,
            needed_tokens=self.needed_tokens + needed_tokens,
            prefill_s=self.prefill_s + times.prefill_s,
            decode_s=self.decode_s + times.decode_s,
            kv_byte_s=self.kv_byte_s + times.kv_byte_s,
        )

    @property
    def retry_amplification(self) -> float:
        """Tokens computed over tokens that one undisturbed attempt computes; 1 when nothing was computed twice."""
        return self.computed_tokens / self.needed_tokens if self.needed_tokens else 1.0

    @property
    def hit_fraction(self) -> float:
        """Cached share of prompts."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PriceTable:
    """Prices in the configured currency."""

    def __init__(self, config: PriceConfig | None = None) -> None:
        self._prices = config or PriceConfig()
        self.currency = self._prices.currency

    def amount(self, spent: Spent) -> float:
        """Return the price of some usage."""
        prices = self._prices
        paid_prompt = spent.prompt_tokens - spent.cached_tokens * prices.cached_discount
        tokens = paid_prompt * prices.prompt_per_million + spent.completion_tokens * prices.completion_per_million
        seconds = spent.prefill_s * prices.prefill_second + spent.decode_s * prices.decode_second
        return tokens / _MILLION + seconds + spent.kv_byte_s / _GIB * prices.kv_gib_second
