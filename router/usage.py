"""What one client call used: tokens, cached tokens, and time by phase. Both doors report it."""

from collections.abc import Sequence

from router.asked import Prepared
from router.requests import ChoiceFinish
from router.text_stream import TextDelta
from tandem.outputs import PhaseTimes


class Usage:
    """A running count over all prompts and choices of a call."""

    def __init__(self, prepared: Sequence[Prepared]) -> None:
        self.prompt_tokens = sum(len(one.request.prompt_token_ids) for one in prepared)
        self.completion_tokens = sum(has.num_tokens for one in prepared for has in one.has)
        self._choices = prepared[0].request.num_choices
        self._expected = self._choices * len(prepared)
        self._finishes: dict[int, ChoiceFinish] = {}

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self._finishes) == self._expected

    def add(self, delta: TextDelta) -> None:
        """Count one delta."""
        self.completion_tokens += len(delta.tokens)
        if delta.finish is not None:
            self._finishes[delta.choice_index] = delta.finish

    @property
    def cached_tokens(self) -> int:
        """A prompt counts once however many choices it has: what none of them had to compute."""
        least: dict[int, int] = {}
        for index, finish in self._finishes.items():
            prompt = index // self._choices
            least[prompt] = min(least.get(prompt, finish.cached_tokens), finish.cached_tokens)
        return sum(least.values())

    def times(self) -> PhaseTimes:
        """Phase by phase, the longest of all choices."""
        times = [finish.times for finish in self._finishes.values()] or [PhaseTimes()]
        return PhaseTimes(
            prefill_queue_s=max(t.prefill_queue_s for t in times),
            prefill_s=max(t.prefill_s for t in times),
            transfer_s=max(t.transfer_s for t in times),
            decode_queue_s=max(t.decode_queue_s for t in times),
            decode_s=max(t.decode_s for t in times),
        )
