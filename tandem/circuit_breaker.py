"""Whether to try again: after failures in a row, only now and then, and never in step with others. Pure."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerPolicy:
    """How patient a breaker is."""

    max_failures: int = 2
    """In a row, until it opens."""
    first_open_s: float = 0.25
    """Doubled with each probe that fails."""
    most_open_s: float = 3.0


class CircuitBreaker:
    """Closed: try at will. Open: wait. Half open: one probe, whose outcome closes it or opens it for longer."""

    def __init__(self, rng: Random, policy: BreakerPolicy | None = None) -> None:
        self._rng = rng
        self._policy = policy or BreakerPolicy()
        self._num_failures = 0
        self._probe_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Nothing keeps anybody from trying."""
        return self._num_failures < self._policy.max_failures

    def wait_s(self, now_s: float) -> float:
        """How long until the next try is allowed; 0: now."""
        return 0.0 if self.is_closed else max(0.0, self._probe_s - now_s)

    def succeeded(self) -> None:
        """A try went well."""
        self._num_failures = 0

    def failed(self, now_s: float) -> None:
        """A try did not; half of the waiting time is at random."""
        self._num_failures += 1
        num_probes = self._num_failures - self._policy.max_failures
        if num_probes >= 0:
            open_s = min(self._policy.most_open_s, self._policy.first_open_s * 2.0 ** min(num_probes, 30))
            self._probe_s = now_s + open_s * self._rng.uniform(0.5, 1.0)
