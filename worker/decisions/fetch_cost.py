"""Whether to bring a prefix from a peer or to compute it again. Pure: measured rates in, a decision out."""

from dataclasses import dataclass

from kv_transfer.session.peer_rates import PRIOR_BYTES_PER_S

_ROUND_TRIPS_S = 0.01
"""To ask, be offered, reserve and commit, besides what the bytes take."""
_MARGIN = 0.8
"""A fetch must be so much cheaper: predictions err, and what is computed here burdens nobody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRates:
    """What this worker has measured; 0 where nothing has been."""

    prefill_tokens_per_s: float
    bytes_per_s: float


def compute_s(num_tokens: int, rates: FetchRates) -> float:
    """Time to compute so many tokens of prefix; 0 while the rate is unknown: then computing is how to learn it."""
    return num_tokens / rates.prefill_tokens_per_s if rates.prefill_tokens_per_s > 0.0 else 0.0


def fetch_s(num_bytes: int, rates: FetchRates) -> float:
    """Time to bring so many bytes from a peer."""
    return _ROUND_TRIPS_S + num_bytes / (rates.bytes_per_s or PRIOR_BYTES_PER_S)


def worth_fetching(num_tokens: int, num_bytes: int, rates: FetchRates) -> bool:
    """Whether bringing `num_bytes` costs less than computing the `num_tokens` that they are."""
    return num_tokens > 0 and fetch_s(num_bytes, rates) < _MARGIN * compute_s(num_tokens, rates)
