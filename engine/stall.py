"""When the engine's thread hangs: in a kernel, in a driver, in a sum over ranks of which one has stopped. Pure.

Its event loop goes on and answers routers, so nobody else would notice. A step may take long and be well: the bound is
wide, and wider for a step that its tokens are expected to take long in, by this worker's own measured rates.
"""

from typing import NamedTuple

from engine.scheduler.step_rates import RateMeter

_PATIENCE = 8.0
"""How many times as long as expected a step may take: a long context, a busy machine."""
_FIRST_PATIENCE = 10.0
"""How many times the bound the first steps may take, of which nobody knows what to expect: kernels may be compiled."""


class EngineTurn(NamedTuple):
    """What the engine's thread does between two looks at what waits for it."""

    number: int
    num_tokens: int = 0
    """Of the steps that it launches or waits for."""


class EngineStalled(Exception):
    """The engine's thread has not come back from one turn for far too long."""


class StallWatch:
    """Asked regularly. Time in which this process itself did not run counts for nothing."""

    def __init__(self, *, stall_s: float | None, period_s: float, now_s: float) -> None:
        """`stall_s`: what any turn may take; None: no bound. `period_s`: how often `check` is meant to be called."""
        self._stall_s = stall_s
        self._period_s = period_s
        self._looked_s = now_s
        self._number: int | None = None
        self.age_s = 0.0
        """For how long the present turn has been seen to last."""

    def check(self, turn: EngineTurn | None, rates: RateMeter, now_s: float) -> None:
        """`turn`: the one under way, if the thread does not sleep. Raises EngineStalled."""
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * self._period_s), now_s
        if turn is None or turn.number != self._number:
            self._number, self.age_s = None if turn is None else turn.number, 0.0
            return
        self.age_s += passed_s
        if self._stall_s is not None and self.age_s >= (allowed_s := self._allowed_s(turn, rates, self._stall_s)):
            message = (
                f"a step of {turn.num_tokens} tokens has run for {self.age_s:.1f} s; it was given {allowed_s:.1f} s"
            )
            raise EngineStalled(message)

    @staticmethod
    def _allowed_s(turn: EngineTurn, rates: RateMeter, stall_s: float) -> float:
        # Without a rate of prompts: no token takes longer than a whole step of decodes.
        token_s = 1.0 / rates.prefill_tokens_per_s if rates.prefill_tokens_per_s else rates.decode_step_s
        if turn.num_tokens and not token_s:
            return _FIRST_PATIENCE * stall_s
        return max(stall_s, _PATIENCE * (rates.decode_step_s + turn.num_tokens * token_s))
