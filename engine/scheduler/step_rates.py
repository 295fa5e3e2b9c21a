"""Measures this worker's prefill and decode rates from its own steps; routers predict waiting times from them."""

from statistics import median_high, median_low

from engine.types.step_output import StepTimings

_WEIGHT = 0.2
_MOST_TIMES = 2.0
"""Factor to which one measurement's deviation from the mean is clipped, up and down."""
MIN_PREFILL_TOKENS = 64
"""Fewest prompt tokens of a step to learn from: smaller steps are dominated by their fixed cost."""
NUM_FIRST = 3
"""Measurements of a rate before it is reported to routers.

A single one may be of a step during which another program had the processor. A router that believed it would send an
idle cluster's prompts to the worker's peers, as long as their queues are short, and so the worker would never measure
again. Until then routers use the mean of its pool, or a prior; the worker itself decides by what it has measured.
"""


class RateMeter:
    """The median of the first measurements, then an exponentially weighted mean; 0 before the first one. Pure.

    A single step says little, however far it is off: it may have been held up, or seem to have taken no time
    because the end of the previous step was noticed late.
    """

    __slots__ = ("_decode_steps_s", "_prefill_rates", "decode_step_s", "prefill_tokens_per_s")

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_step_s = 0.0
        self._prefill_rates: list[float] = []
        self._decode_steps_s: list[float] = []

    @property
    def settled_prefill_tokens_per_s(self) -> float:
        """The prefill rate once `NUM_FIRST` steps have been measured, 0 before."""
        return self.prefill_tokens_per_s if len(self._prefill_rates) == NUM_FIRST else 0.0

    @property
    def settled_decode_step_s(self) -> float:
        """The decode step once `NUM_FIRST` of them have been measured, 0 before."""
        return self.decode_step_s if len(self._decode_steps_s) == NUM_FIRST else 0.0

    def observe(self, timings: StepTimings) -> None:
        """Update the rates from one step: a prefill when most of its rows are prompt tokens, else a decode step."""
        if timings.is_decode:
            if timings.step_s <= 0.0:
                return
            # Time between two tokens of a sequence: a step may bring some of them several.
            token_s = timings.step_s * timings.num_requests / (timings.num_requests + timings.num_accepted_tokens)
            if len(self._decode_steps_s) < NUM_FIRST:
                self._decode_steps_s.append(token_s)
                self.decode_step_s = median_low(self._decode_steps_s)
            else:
                self.decode_step_s = _blend(self.decode_step_s, token_s)
        elif (
            timings.num_tokens - timings.num_draft_tokens - timings.num_requests >= MIN_PREFILL_TOKENS
            and timings.execute_s > 0.0
        ):
            rate = timings.num_tokens / timings.execute_s
            if len(self._prefill_rates) < NUM_FIRST:
                self._prefill_rates.append(rate)
                self.prefill_tokens_per_s = median_high(self._prefill_rates)
            else:
                self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, rate)


def _blend(mean: float, value: float) -> float:
    return mean + _WEIGHT * (min(max(value, mean / _MOST_TIMES), mean * _MOST_TIMES) - mean)
