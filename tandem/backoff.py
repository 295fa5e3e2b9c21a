"""How long to wait before what failed is tried again. Pure."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Exponential waiting times; half of each is at random, so that those who failed together do not return in step."""

    first_s: float = 0.1
    most_s: float = 2.0

    def wait_s(self, num_failures: int, rng: Random | None) -> float:
        """Time to wait after so many failures in a row (from 1); without `rng` the whole of it."""
        whole_s = min(self.most_s, self.first_s * 2.0 ** min(num_failures - 1, 30))
        return whole_s if rng is None else whole_s * rng.uniform(0.5, 1.0)
