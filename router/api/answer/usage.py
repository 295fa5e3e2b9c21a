"""Usage of one client call: tokens, cached tokens, time by phase, and cost. Both servers report it."""

from collections.abc import Callable, Collection, Sequence

from router.api.answer.choice_text import TextDelta
from router.api.request.client_request import PreparedRequest
from router.tenants.prices import PriceTable, Spent
from router.text.reasoning import ReasoningTokens
from router.types.requests import ChoiceFinish
from tandem.values.outputs import NO_PREDICTION_USE, CachedTokens, PhaseTimes, PredictionUse


class CallUsage:
    """Running usage over all prompts and choices of a call."""

    def __init__(
        self,
        prepared: Sequence[PreparedRequest],
        clock: Callable[[], float] = lambda: 0.0,
        prices: PriceTable | None = None,
    ) -> None:
        """`clock`: the clock of the requests' `arrived_s`."""
        self.prices = prices or PriceTable()
        self._clock = clock
        self._arrived_s = prepared[0].request.arrived_s
        self.elapsed_s = 0.0
        """Seconds from the call's arrival until every choice had ended."""
        self.prompt_tokens = self.completion_tokens = 0
        self._choices = prepared[0].request.num_choices
        self._expected = self._choices * len(prepared)
        self._finishes: dict[int, ChoiceFinish] = {}
        self._thoughts: dict[int, ReasoningTokens] = {}
        index = 0
        for one in prepared:
            self.prompt_tokens += len(one.request.prompt_token_ids)
            for has in one.has:
                self.completion_tokens += has.num_tokens
            if one.reasoning is not None:
                for i in range(index, index + one.request.num_choices):
                    self._thoughts[i] = one.reasoning.new_counter()
            index += one.request.num_choices

    @property
    def is_single(self) -> bool:
        """Whether the call has one choice in all."""
        return self._expected == 1

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self._finishes) == self._expected

    def add_token(self, choice_index: int, token_id: int) -> None:
        """Count a token that comes with nothing else."""
        self.completion_tokens += 1
        if (thoughts := self._thoughts.get(choice_index)) is not None and not thoughts.has_ended:
            thoughts.add([token_id])

    def thinks(self, choice_index: int) -> bool:
        """Whether the choice's tokens may still be reasoning, so that each has to be looked at."""
        thoughts = self._thoughts.get(choice_index)
        return thoughts is not None and not thoughts.has_ended

    def add(self, delta: TextDelta) -> None:
        """Count a delta's tokens, and at its choice's end what the choice cost."""
        self.completion_tokens += len(delta.tokens)
        if (thoughts := self._thoughts.get(delta.choice_index)) is not None and not thoughts.has_ended:
            thoughts.add([token.token_id for token in (*delta.passed, *delta.tokens)])
        if delta.finish is not None:
            self._finishes[delta.choice_index] = delta.finish
            if len(self._finishes) == self._expected and self._arrived_s is not None:
                self.elapsed_s = self._clock() - self._arrived_s

    @property
    def reasoning_tokens(self) -> int:
        """Answer tokens up to the end of reasoning."""
        found = 0
        for thoughts in self._thoughts.values():
            found += thoughts.count
        return found

    @property
    def prediction(self) -> PredictionUse:
        """What became of the request's prediction, in the choices that have ended."""
        found = NO_PREDICTION_USE
        for finish in self._finishes.values():
            if finish.prediction != NO_PREDICTION_USE:
                found = found.plus(finish.prediction)
        return found

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that no choice had to compute; a prompt counts once however many choices it has."""
        found = 0
        for finish in self._least_cached():
            found += finish.cached_tokens
        return found

    def cached_by_source(self) -> CachedTokens:
        """The cached prompt tokens by where their KV was found."""
        found = [finish.times.cached for finish in self._least_cached()]
        if len(found) == 1:
            return found[0]
        return CachedTokens(*(sum(counts) for counts in zip(*found, strict=True)))

    def _least_cached(self) -> Collection[ChoiceFinish]:
        """The choice of each prompt that found least in the cache."""
        if len(self._finishes) == 1:
            return self._finishes.values()
        least: dict[int, ChoiceFinish] = {}
        for index, finish in self._finishes.items():
            other = least.setdefault(index // self._choices, finish)
            if finish.cached_tokens < other.cached_tokens:
                least[index // self._choices] = finish
        return least.values()

    def times(self) -> PhaseTimes:
        """Phase times of the slowest choice: its phases follow each other, while choices run in parallel."""
        times = [finish.times for finish in self._finishes.values()] or [PhaseTimes()]
        return max(times, key=lambda one: one.total_s)

    def spent(self) -> Spent:
        """Usage of all choices that have ended."""
        whole = Spent(
            requests=1,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
        )
        for finish in self._finishes.values():
            whole = whole.with_choice(
                finish.times, computed_tokens=finish.computed_tokens, needed_tokens=finish.needed_tokens
            )
        return whole
