"""How many prompt tokens a step may compute while somebody reads along, so that its next token comes in time.

A step beside decodes is predicted to take a decode step's time and, for each prompt token, a token's time. Both are
read off the last steps that computed a chunk: each one's time is split between its decodes and its chunk in the
proportion of what they take on average, so that a machine that has slowed down is taken to do everything more slowly.
Of the last steps the one that allows least decides. So one slow step shortens the next chunk, and chunks grow again
only when as many steps as are remembered have been faster.
"""

from collections import deque
from collections.abc import Iterable

from engine.rates import MIN_PREFILL_TOKENS, RateMeter
from engine.request import BatchItem
from engine.step import StepTimings

MIN_CHUNK_TOKENS = 64
"""A chunk so small adds little to a step, which reads all weights for its decodes alone; smaller ones would only
multiply the steps of a prompt."""
_CHUNK_STEP = 32
"""Chunks are multiples of this: kernels compute whole panels of rows."""
_NUM_REMEMBERED = 4
"""Steps with a chunk: a slow one is soon forgotten again, since shorter chunks cost those who wait for their first
token."""
_AIM = 0.95
"""Part of the bound that is planned for: a straight line through few measurements misses by some percent."""


def has_decodes(items: Iterable[BatchItem]) -> bool:
    """Whether a step computes the newest token of a sequence that is being generated: somebody waits for the next.

    The last token of a prompt is none, and nobody reads along with a prefill for a hand-off. O(1) where decodes come
    first, as in planned steps.
    """
    for request, start, num_tokens, _ in items:
        if num_tokens == 1 and start >= request.num_prompt_tokens and not request.prefill_only:
            return True
    return False


class ChunkPace:
    """Bounds the chunk of a step beside decodes by time. Pure: time is told, never read."""

    __slots__ = ("_decode_in_tokens", "_last", "_max_step_s", "_max_tokens", "_rates")

    def __init__(self, rates: RateMeter, *, max_step_s: float | None, max_tokens: int) -> None:
        """`rates`: told of every step by its owner, after this. `max_step_s`: None for no bound but `max_tokens`."""
        self._rates = rates
        self._max_step_s = max_step_s
        self._max_tokens = max_tokens
        self._decode_in_tokens = 0.0
        """How many prompt tokens are computed in the time of a decode step."""
        self._last: deque[tuple[float, float]] = deque(maxlen=_NUM_REMEMBERED)
        """Of each remembered step, the seconds of a decode step and of a prompt token."""

    def observe(self, timings: StepTimings, *, beside_decodes: bool) -> None:
        """Learn from a step. One with a short chunk and no decodes is passed over: the fixed cost that rules it would
        have been paid by decodes anyway.
        """
        if timings.num_tokens == timings.num_requests:
            # Only now: while one chunk follows another the mean decode step is of another time than the mean chunk.
            self._decode_in_tokens = self._rates.decode_step_s * self._rates.prefill_tokens_per_s
            return
        # Exact for one prompt, a token less for each further one.
        chunk_tokens = timings.num_tokens - timings.num_requests + 1
        least = MIN_PREFILL_TOKENS if beside_decodes else max(MIN_PREFILL_TOKENS, self._max_tokens // 2)
        if chunk_tokens < least or timings.step_s <= 0.0:
            return
        if not self._decode_in_tokens:
            self._decode_in_tokens = self._rates.decode_step_s * timings.num_tokens / timings.step_s
        token_s = timings.step_s / (chunk_tokens + (self._decode_in_tokens if beside_decodes else 0.0))
        self._last.append((self._decode_in_tokens * token_s, token_s))

    def chunk_tokens(self) -> int:
        """Most prompt tokens of the next step, if it has decodes: `max_tokens` while no rate is known. O(1)."""
        rate = self._rates.prefill_tokens_per_s
        if self._max_step_s is None or rate <= 0.0:
            return self._max_tokens
        time_s, usual_s = _AIM * self._max_step_s, self._rates.decode_step_s
        fitting = min(
            [(time_s - max(usual_s, decode_s)) / token_s for decode_s, token_s in self._last],
            default=(time_s - usual_s) * rate,
        )
        return min(self._max_tokens, max(MIN_CHUNK_TOKENS, int(fitting) // _CHUNK_STEP * _CHUNK_STEP))
