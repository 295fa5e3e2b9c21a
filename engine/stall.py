"""Detects a hung engine thread: in a kernel, a driver, or a collective in which one rank has stopped. Pure.

The worker's event loop still answers routers, so nothing else would notice. A healthy step may take long: the bound is
wide, and wider for a step whose tokens should take long at the rates measured on this worker.
"""

from typing import NamedTuple

from engine.scheduler.step_rates import RateMeter

_PATIENCE = 8.0
"""Multiple of its expected duration that a step may take: contexts may be long, machines busy."""
_FIRST_PATIENCE = 10.0
"""Multiple of `stall_s` that the first steps may take: no rates are known yet, and kernels may be compiled."""


class EngineTurn(NamedTuple):
    """One turn of the engine's thread: the work between two checks of its queue."""

    number: int
    num_tokens: int = 0
    """Tokens of the steps that it launches or waits for."""


class EngineStalled(Exception):
    """The engine's thread has not come back from one turn for far too long."""


class StallWatch:
    """Checks the engine's thread regularly. Time in which this process itself did not run does not count."""

    def __init__(self, *, stall_s: float | None, period_s: float, now_s: float) -> None:
        """`stall_s`: shortest bound on a turn; None: no bound. `period_s`: how often `check` is meant to be called."""
        self._stall_s = stall_s
        self._period_s = period_s
        self._checked_s = now_s
        self._number: int | None = None
        self.age_s = 0.0
        """Duration of the present turn so far."""

    def check(self, turn: EngineTurn | None, rates: RateMeter, now_s: float) -> None:
        """Check `turn`, the present one; None while the thread sleeps. Raises EngineStalled."""
        passed_s, self._checked_s = min(now_s - self._checked_s, 2 * self._period_s), now_s
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
