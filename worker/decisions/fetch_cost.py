"""Decides whether to fetch a prefix from a peer or to compute it, from measured rates. Pure."""

from dataclasses import dataclass

from kv_transfer.session.peer_rates import PRIOR_BYTES_PER_S

_ROUND_TRIPS_S = 0.01
"""Time of a fetch besides moving the bytes: request, offer, reservation and commit."""
_MARGIN = 0.8
"""Cost of a fetch relative to computing below which it is chosen: predictions err, and computing burdens no peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRates:
    """Rates measured by this worker; 0 where unknown."""

    prefill_tokens_per_s: float
    bytes_per_s: float


def compute_s(num_tokens: int, rates: FetchRates) -> float:
    """Seconds to compute `num_tokens` of a prefix; 0 while the rate is unknown, so that it is measured by computing."""
    return num_tokens / rates.prefill_tokens_per_s if rates.prefill_tokens_per_s > 0.0 else 0.0


def fetch_s(num_bytes: int, rates: FetchRates) -> float:
    """Seconds to fetch `num_bytes` from a peer."""
    return _ROUND_TRIPS_S + num_bytes / (rates.bytes_per_s or PRIOR_BYTES_PER_S)


def worth_fetching(num_tokens: int, num_bytes: int, rates: FetchRates) -> bool:
    """Whether fetching `num_bytes` costs less than computing the `num_tokens` that they hold."""
    return num_tokens > 0 and fetch_s(num_bytes, rates) < _MARGIN * compute_s(num_tokens, rates)
