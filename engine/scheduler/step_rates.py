"""This worker's prefill and decode rates, measured from its own steps, from which routers predict waiting times."""

from engine.types.step_output import StepTimings

_WEIGHT = 0.2
MIN_PREFILL_TOKENS = 64
"""Minimum step size to learn from: smaller steps are dominated by their fixed cost."""


class RateMeter:
    """Exponentially weighted means; 0 before the first measurement. Pure."""

    __slots__ = ("decode_step_s", "prefill_tokens_per_s")

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0

    def observe(self, timings: StepTimings) -> None:
        """Update the rates from one step: a prefill when most of its rows are prompt tokens, else a decode step."""
        if timings.num_tokens == timings.num_requests:
            self.decode_step_s = _blend(self.decode_step_s, timings.step_s)
        elif timings.num_tokens - timings.num_requests >= MIN_PREFILL_TOKENS and timings.execute_s > 0.0:
            rate = timings.num_tokens / timings.execute_s
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, rate)


def _blend(mean: float, value: float) -> float:
    return value if mean == 0.0 else mean + _WEIGHT * (value - mean)
