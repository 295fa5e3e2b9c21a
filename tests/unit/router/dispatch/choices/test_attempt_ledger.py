"""Totals over attempts at one choice: time, KV held, recomputed tokens."""

import pytest

from router.dispatch.choices.attempt_ledger import AttemptLedger
from router.types.session_events import AttemptStarted
from tandem.values.outputs import CachedTokens, PhaseTimes, PredictionUse

PROMPT = 100


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


def started(cached: int, **times: float) -> AttemptStarted:
    found = CachedTokens(decode_pool=cached)
    return AttemptStarted(cached_tokens=cached, times=PhaseTimes(cached=found, **times))


def test_attempt_ledger_failover_counts_prompt_twice() -> None:
    clock = Clock()
    ledger = AttemptLedger(prompt_length=PROMPT, clock=clock, arrived_s=49.0)
    ledger.begin(0, kv_bytes_per_token=10)
    clock.now_s = 52.0
    ledger.on_started(started(40, prefill_s=1.5, prefill_queue_s=0.5, kv_byte_s=7.0))
    clock.now_s = 56.0
    ledger.ended(8)
    clock.now_s = 57.0
    ledger.begin(8)
    clock.now_s = 58.0
    ledger.on_started(started(96, prefill_s=1.0))
    clock.now_s = 60.0
    ledger.ended(20, PhaseTimes(prefill_s=1.0, decode_s=2.0, kv_byte_s=3.0))
    total = ledger.total()
    assert total.router_queue_s == 2.0
    assert (total.prefill_queue_s, total.prefill_s, total.decode_s) == (0.5, 2.5, 6.0)
    assert total.kv_byte_s == 7.0 + (PROMPT + 4) * 10 * 4.0 + 3.0
    assert total.cached == CachedTokens(decode_pool=40)
    assert total.total_s == pytest.approx(60.0 - 49.0)
    assert ledger.computed_tokens == (60 + 8) + (PROMPT + 8 - 96) + 12


def test_attempt_ledger_refused_attempt_counts_as_waiting() -> None:
    clock = Clock()
    ledger = AttemptLedger(prompt_length=PROMPT, clock=clock)
    ledger.begin(0)
    clock.now_s = 51.0
    ledger.refused()
    ledger.ended(0)
    clock.now_s = 53.0
    ledger.begin(0)
    assert ledger.total() == PhaseTimes(router_queue_s=3.0)
    assert ledger.computed_tokens == 0


def test_attempt_ledger_silent_attempt_has_no_phases() -> None:
    clock = Clock()
    ledger = AttemptLedger(prompt_length=PROMPT, clock=clock)
    ledger.begin(0, kv_bytes_per_token=10)
    clock.now_s = 55.0
    ledger.ended(0)
    assert ledger.total() == PhaseTimes()
    assert ledger.first is None


def test_attempt_ledger_prediction_adds_up_over_attempts() -> None:
    ledger = AttemptLedger(prompt_length=PROMPT, clock=Clock())
    ledger.begin(0)
    ledger.on_prediction(PredictionUse(2, 1))
    ledger.on_prediction(PredictionUse(5, 1))
    assert ledger.prediction == PredictionUse(5, 1)
    ledger.ended(8)
    ledger.begin(8)
    assert ledger.prediction == PredictionUse(5, 1)
    ledger.refused()
    ledger.begin(8)
    ledger.on_prediction(PredictionUse(3, 4))
    ledger.ended(20)
    assert ledger.prediction == PredictionUse(8, 5)
