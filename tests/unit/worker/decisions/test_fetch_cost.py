"""When fetching a peer's prefix is worth it."""

import pytest

from worker.decisions.fetch_cost import FetchRates, compute_s, fetch_s, worth_fetching

MEASURED = FetchRates(prefill_tokens_per_s=3000.0, bytes_per_s=1.5e9)
TOKEN_BYTES = 49_152


def test_fetch_cost_long_prefix_is_fetched_short_one_computed() -> None:
    assert worth_fetching(2048, 2048 * TOKEN_BYTES, MEASURED)
    assert not worth_fetching(16, 16 * TOKEN_BYTES, MEASURED)
    assert not worth_fetching(0, 0, MEASURED)


def test_fetch_cost_slow_link_or_fast_machine_computes() -> None:
    assert not worth_fetching(2048, 2048 * TOKEN_BYTES, FetchRates(prefill_tokens_per_s=3000.0, bytes_per_s=1e8))
    assert not worth_fetching(2048, 2048 * TOKEN_BYTES, FetchRates(prefill_tokens_per_s=1e6, bytes_per_s=1.5e9))


def test_fetch_cost_unknown_rates_are_explored() -> None:
    assert not worth_fetching(2048, 2048 * TOKEN_BYTES, FetchRates(prefill_tokens_per_s=0.0, bytes_per_s=1.5e9))
    assert worth_fetching(2048, 2048 * TOKEN_BYTES, FetchRates(prefill_tokens_per_s=3000.0, bytes_per_s=0.0))


def test_fetch_cost_fetch_must_win_by_margin() -> None:
    rates = FetchRates(prefill_tokens_per_s=1000.0, bytes_per_s=1e9)
    num_bytes = int(0.09e9)
    assert fetch_s(num_bytes, rates) == pytest.approx(0.1)
    assert compute_s(120, rates) == pytest.approx(0.12)
    assert not worth_fetching(120, num_bytes, rates)
    assert worth_fetching(130, num_bytes, rates)
