"""Rates that a worker measures from its own steps."""

import pytest

from engine.scheduler.step_rates import MIN_PREFILL_TOKENS, NUM_FIRST, RateMeter
from engine.types.step_output import StepTimings


def prefill(seconds: float, num_tokens: int = 100) -> StepTimings:
    return StepTimings(schedule_s=0.0, execute_s=seconds, commit_s=0.0, num_tokens=num_tokens, num_requests=1)


def decode(seconds: float) -> StepTimings:
    return StepTimings(schedule_s=0.0, execute_s=seconds, commit_s=0.0, num_tokens=4, num_requests=4)


def test_rate_meter_ignores_disturbed_first_step() -> None:
    meter = RateMeter()
    meter.observe(prefill(2.0))  # another program had the processor
    meter.observe(decode(0.5))
    assert (meter.prefill_tokens_per_s, meter.decode_step_s) == (50.0, 0.5)
    for _ in range(NUM_FIRST - 1):
        assert meter.settled_prefill_tokens_per_s == meter.settled_decode_step_s == 0.0
        meter.observe(prefill(0.01))
        meter.observe(decode(0.002))
    assert meter.settled_prefill_tokens_per_s == meter.prefill_tokens_per_s == pytest.approx(10_000.0)
    assert meter.settled_decode_step_s == meter.decode_step_s == pytest.approx(0.002)


def settled() -> RateMeter:
    """At 1,000 tokens a second, and 10 ms a decode step."""
    meter = RateMeter()
    for _ in range(NUM_FIRST):
        meter.observe(prefill(0.1))
        meter.observe(decode(0.01))
    return meter


def test_rate_meter_weighs_later_steps_by_a_fifth() -> None:
    meter = settled()
    meter.observe(prefill(0.08))
    meter.observe(decode(0.015))
    assert meter.settled_prefill_tokens_per_s == pytest.approx(1_050.0)
    assert meter.settled_decode_step_s == pytest.approx(0.011)


@pytest.mark.parametrize(("seconds", "tokens_per_s", "step_s"), [(60.0, 900.0, 0.012), (1e-6, 1_200.0, 0.009)])
def test_rate_meter_single_outlier_changes_little(seconds: float, tokens_per_s: float, step_s: float) -> None:
    meter = settled()
    meter.observe(prefill(seconds))
    meter.observe(decode(seconds))
    assert meter.settled_prefill_tokens_per_s == pytest.approx(tokens_per_s)
    assert meter.settled_decode_step_s == pytest.approx(step_s)


def test_rate_meter_follows_tenfold_slowdown() -> None:
    meter = settled()
    for _ in range(40):
        meter.observe(prefill(1.0))
        meter.observe(decode(0.1))
    assert meter.settled_prefill_tokens_per_s == pytest.approx(100.0, rel=0.1)
    assert meter.settled_decode_step_s == pytest.approx(0.1, rel=0.1)


def test_rate_meter_small_steps_do_not_affect_prefill_rate() -> None:
    meter = RateMeter()
    meter.observe(prefill(0.1, num_tokens=MIN_PREFILL_TOKENS))  # one of them is not a prompt's
    assert meter.prefill_tokens_per_s == 0.0


def test_rate_meter_drafts_count_by_the_tokens_they_bring() -> None:
    """Ten steps of 30 ms that bring each sequence three tokens are as good as thirty of 10 ms."""
    meter = settled()
    before = meter.prefill_tokens_per_s
    for _ in range(10):
        meter.observe(decode(0.03)._replace(num_tokens=4 + 160, num_draft_tokens=160, num_accepted_tokens=8))
    assert meter.decode_step_s == pytest.approx(0.01)
    assert meter.prefill_tokens_per_s == before
    meter.observe(decode(0.04)._replace(num_tokens=4 + 160, num_draft_tokens=160))
    assert meter.decode_step_s == pytest.approx(0.01 + 0.2 * 0.01)
