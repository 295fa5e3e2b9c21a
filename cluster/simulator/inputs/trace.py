"""Requests of a load: arrival times, lengths, and the names of the blocks that they share."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from tandem.values.ids import BlockHash


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    """Number of output tokens, at least 1."""
    names: tuple[BlockHash, ...]
    """Names of the full blocks of prompt and output, in order; those of the output may be missing if not shared."""
    tail: int = 0
    """Identifies what follows the blocks: prompts with equal blocks and equal tails are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    block_tokens: int
    """Tokens of a named block: a multiple of the hash block."""
    requests: tuple[TraceRequest, ...]

    @property
    def span_s(self) -> float:
        """Time from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s if self.requests else 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.num_prompt_tokens for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.num_output_tokens for request in self.requests)

    def first(self, num_requests: int) -> "Trace":
        return replace(self, requests=self.requests[:num_requests])

    def stretched(self, factor: float) -> "Trace":
        """Return the same requests, `factor` times as far apart, starting at time 0."""
        start_s = self.requests[0].arrival_s if self.requests else 0.0
        return self._with(replace(r, arrival_s=(r.arrival_s - start_s) * factor) for r in self.requests)

    def spread(self) -> "Trace":
        """Return the same requests, with those of one instant spread evenly up to the next instant.

        The clock of some traces is coarse: requests that share an instant for that reason would do so at any rate,
        however far the trace is stretched.
        """
        times = sorted({request.arrival_s for request in self.requests})
        gaps = {time: after - time for time, after in pairwise(times)}
        last_s = gaps[times[-2]] if gaps else 0.0
        numbers, sizes = Counter[float](), Counter(request.arrival_s for request in self.requests)
        spread = []
        for request in self.requests:
            at_s = request.arrival_s
            later_s = gaps.get(at_s, last_s) * numbers[at_s] / sizes[at_s]
            numbers[at_s] += 1
            spread.append(replace(request, arrival_s=at_s + later_s))
        return self._with(spread)

    def prompts_only(self) -> "Trace":
        """Return the same prompts, each answered by one token."""
        return self._with(replace(r, num_output_tokens=1) for r in self.requests)

    def _with(self, requests: Iterable[TraceRequest]) -> "Trace":
        return replace(self, requests=tuple(requests))
