"""Bounds the prompt tokens of a step that also decodes, to keep inter-token latency within its limit.

A step with decodes is predicted to take the time of its chunk, plus that of as many tokens as its decodes are worth.
The decodes' worth, drafts included, follows from steps with and without a chunk, the time per token from the last steps
with a chunk: both are medians, so that one stalled step has no effect. A machine that slows down is assumed to slow
down evenly. Of an even number of steps the slower middle one counts: chunks shorten after two slow steps and grow again
after three that were faster.
"""

from collections import deque
from collections.abc import Iterable
from statistics import median, median_high

from engine.scheduler.step_rates import MIN_PREFILL_TOKENS
from engine.types.request import BatchItem
from engine.types.step_output import StepTimings

MIN_CHUNK_TOKENS = 64
"""Smallest chunk. It adds little to a step, which reads all weights for its decodes alone; smaller chunks would only
multiply the steps of a prompt.
"""
_CHUNK_STEP = 32
"""Granularity of chunk sizes: kernels compute whole panels of rows."""
_NUM_REMEMBERED = 4
"""Window of steps with a chunk. Short, so that a slow step is soon forgotten: smaller chunks raise TTFT."""
_NUM_TYPICAL = 5
"""Window of steps without a chunk, whose median is the time of decodes."""
_AIM = 0.95
"""Fraction of the bound to plan for: a linear fit of few measurements is off by some percent."""


def has_decodes(items: Iterable[BatchItem]) -> bool:
    """Whether a step decodes: computes the newest token of a sequence that is being generated.

    The last token of a prompt does not count, nor does a prefill for a hand-off. O(1) where decodes come
    first, as in planned steps.
    """
    for request, start, num_tokens, samples, _ in items:
        if samples and num_tokens == 1 and start >= request.num_prompt_tokens and not request.prefill_only:
            return True
    return False


class ChunkSizer:
    """Bounds by time the chunk of a step with decodes. Pure: durations are passed in, no clock is read."""

    __slots__ = ("_decodes", "_decodes_in_tokens", "_is_unweighed", "_max_step_s", "_max_tokens", "_token_s")

    def __init__(self, *, max_step_s: float | None, max_tokens: int) -> None:
        """`max_step_s`: None for no bound but `max_tokens`."""
        self._max_step_s = max_step_s
        self._max_tokens = max_tokens
        self._decodes: deque[float] = deque(maxlen=_NUM_TYPICAL)
        """Durations, in seconds, of steps that only decoded."""
        self._decodes_in_tokens = 0.0
        """Prompt tokens that could be computed in the time that decodes take."""
        self._is_unweighed = False
        """True when `_decodes_in_tokens` is stale. Computed on demand: most steps only decode and never need it."""
        self._token_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        """Seconds per prompt token, from steps with a chunk."""

    def observe(self, timings: StepTimings, *, beside_decodes: bool) -> None:
        """Record a step's duration. A step with a short chunk and no decodes is ignored: its dominant fixed cost would
        have been paid by decodes anyway.
        """
        if timings.is_decode:
            self._decodes.append(timings.step_s)
            self._is_unweighed = True
            return
        # Exact for one prompt, a token less for each further one.
        chunk_tokens = timings.num_tokens - timings.num_draft_tokens - timings.num_requests + 1
        least = MIN_PREFILL_TOKENS if beside_decodes else max(MIN_PREFILL_TOKENS, self._max_tokens // 2)
        if chunk_tokens < least or timings.step_s <= 0.0:
            return
        self._weigh_if_needed()
        self._token_s.append(timings.step_s / (chunk_tokens + (self._decodes_in_tokens if beside_decodes else 0.0)))
        if beside_decodes and self._decodes and median(self._decodes) > timings.step_s:
            # Decodes alone take no longer than decodes with a chunk: the earlier ones were held up.
            self._decodes.clear()
            self._decodes.append(timings.step_s)
            self._weigh_decodes()
        elif not self._decodes_in_tokens:
            self._weigh_decodes()

    def chunk_tokens(self) -> int:
        """Maximum number of prompt tokens in the next step with decodes; `max_tokens` until a rate is known. O(1)."""
        if self._max_step_s is None or not self._token_s:
            return self._max_tokens
        self._weigh_if_needed()
        fitting = _AIM * self._max_step_s / median_high(self._token_s) - self._decodes_in_tokens
        return min(self._max_tokens, max(MIN_CHUNK_TOKENS, int(fitting) // _CHUNK_STEP * _CHUNK_STEP))

    def _weigh_if_needed(self) -> None:
        if self._is_unweighed:
            self._weigh_decodes()

    def _weigh_decodes(self) -> None:
        self._is_unweighed = False
        # Not between successive chunks: old times of decodes would be compared with new times of tokens.
        if self._decodes and self._token_s:
            self._decodes_in_tokens = median(self._decodes) / median(self._token_s)
