"""Results of generation, used by every layer: tokens, finish reasons, and times by phase.

Named tuples, because they are made for every token or request: a frozen dataclass takes several times as long.
"""

from enum import Enum
from functools import lru_cache
from typing import NamedTuple


class FinishReason(Enum):
    """Reason why a choice ended. The values are OpenAI's where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    DEADLINE = "deadline"
    """The request timed out while it waited. Only within a worker: routers receive it as a failure."""


class TokenLogprob(NamedTuple):
    """A token and the natural log of its probability under the unmodified distribution."""

    token_id: int
    logprob: float


class SampledToken(NamedTuple):
    """One sampled token; `logprob` and `top_logprobs` only when the request wants them."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@lru_cache(maxsize=1 << 16)
def bare_token(token_id: int) -> SampledToken:
    """Return a token without log probabilities. Most are looked up, not made: they are equal wherever their ids are."""
    return SampledToken(token_id)


class CachedTokens(NamedTuple):
    """Prompt tokens that were not computed for a request, by where their KV was."""

    prefill_pool: int = 0
    decode_pool: int = 0
    fetched: int = 0
    """Fetched from a peer for this request."""
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.prefill_pool + self.decode_pool + self.fetched + self.host + self.disk


NO_CACHED_TOKENS = CachedTokens()


class PredictionUse(NamedTuple):
    """Tokens of a request's prediction that were verified as drafts."""

    accepted: int = 0
    """Those that became output."""
    rejected: int = 0
    """Those that did not."""

    def plus(self, other: "PredictionUse") -> "PredictionUse":
        return PredictionUse(self.accepted + other.accepted, self.rejected + other.rejected)


NO_PREDICTION_USE = PredictionUse()


class PhaseTimes(NamedTuple):
    """Seconds that one request spent in each phase, measured by the process of that phase, and the KV that it held."""

    prefill_queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    """From the last computed prompt token to the commit on the decode worker: the exposed transfer. Also the time in
    which a prefix was fetched from another worker, before prefill."""
    decode_queue_s: float = 0.0
    decode_s: float = 0.0
    """From the moment at which the sequence could run on the decode worker."""
    router_queue_s: float = 0.0
    """Time in the router without a worker, tokenizing included."""
    kv_byte_s: float = 0.0
    """Bytes of KV blocks held, times the seconds they were held; a shared block counts for each request."""
    cached: CachedTokens = NO_CACHED_TOKENS
    """Cached tokens that the prompt found on arrival."""

    def plus(self, other: "PhaseTimes") -> "PhaseTimes":
        """The sum of both; `cached` is that of the first."""
        return PhaseTimes(
            prefill_queue_s=self.prefill_queue_s + other.prefill_queue_s,
            prefill_s=self.prefill_s + other.prefill_s,
            transfer_s=self.transfer_s + other.transfer_s,
            decode_queue_s=self.decode_queue_s + other.decode_queue_s,
            decode_s=self.decode_s + other.decode_s,
            router_queue_s=self.router_queue_s + other.router_queue_s,
            kv_byte_s=self.kv_byte_s + other.kv_byte_s,
            cached=self.cached,
        )

    @property
    def total_s(self) -> float:
        before_s = self.router_queue_s + self.prefill_queue_s + self.prefill_s
        return before_s + self.transfer_s + self.decode_queue_s + self.decode_s
