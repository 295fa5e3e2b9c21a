"""Waiting times between attempts after failures. Pure."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential waiting times, half of each random, so that processes that failed together do not retry in step."""

    first_s: float = 0.1
    most_s: float = 2.0
    growth: float = 2.0
    """Factor from one wait to the next. What returns after a time t is found within about (growth - 1) t more."""

    def wait_s(self, num_failures: int, rng: Random | None) -> float:
        """Time to wait after `num_failures` consecutive failures (from 1); without `rng` the whole of it."""
        whole_s = min(self.most_s, self.first_s * self.growth ** min(num_failures - 1, 200))
        return whole_s if rng is None else whole_s * rng.uniform(0.5, 1.0)
