"""Which choices of a whole answer are shown, where more were generated: `best_of`, and `n` with `vote`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from router.api.answer.choice_text import TextDelta
from router.api.request.choice_selection import ChoiceSelection, VoteResult, elect, likeliest
from router.api.request.client_request import PreparedRequest
from router.sandbox.pattern_search import PatternSearch
from tandem.errors import InvalidRequest

_PATTERN = "vote_pattern"
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedChoices:
    """The choices that are shown, numbered anew."""

    prepared: list[PreparedRequest]
    """As if no more had been generated."""
    choices: list[TextDelta]
    votes: tuple[VoteResult, ...] = ()
    """One for each choice, if they were elected."""


def parse_selection(
    *, n: int | None, best_of: int | None, vote: bool, vote_pattern: str | None, streams: bool, shows_logprobs: bool
) -> ChoiceSelection | None:
    """None: all that is generated is shown. Raises InvalidRequest for what cannot be combined."""
    keep = n if n is not None else 1
    if vote_pattern is not None and not vote:
        raise InvalidRequest("vote_pattern needs vote: true", param=_PATTERN)
    if vote:
        if best_of not in (None, keep):
            raise InvalidRequest("best_of: not together with vote", param="best_of")
        if streams:
            raise InvalidRequest(
                "vote: which answer is shown is known at the end; not together with stream", param="vote"
            )
        return ChoiceSelection(candidates=keep, keep=1, votes=True, pattern=vote_pattern)
    if best_of in (None, keep):
        return None
    if keep < 1:
        raise InvalidRequest(f"n must be at least 1, got {keep}", param="n")
    if best_of < keep:
        raise InvalidRequest(f"best_of must be at least n ({keep}), got {best_of}", param="best_of")
    if streams:
        raise InvalidRequest("best_of: the best are known at the end; not together with stream", param="best_of")
    return ChoiceSelection(candidates=best_of, keep=keep, shows_logprobs=shows_logprobs)


def logprobs_needed(ask: ChoiceSelection | None, num_logprobs: int | None) -> int | None:
    """What is asked of workers where the client asked for `num_logprobs`: the likeliest are chosen by them."""
    return 0 if num_logprobs is None and ask is not None and not ask.votes else num_logprobs


async def check_selection(
    ask: ChoiceSelection | None, prepared: Sequence[PreparedRequest], patterns: PatternSearch
) -> None:
    """Raises InvalidRequest for a vote on answers that may be calls of tools, or by a pattern that is none."""
    if ask is not None and ask.pattern is not None:
        await patterns.check(ask.pattern, _PATTERN, prepared[0].request.tenant)
    if ask is not None and ask.votes and any(one.calling is not None for one in prepared):
        raise InvalidRequest("vote: answers that call tools are not compared", param="vote")


async def select(
    ask: ChoiceSelection | None, prepared: list[PreparedRequest], choices: Sequence[TextDelta], patterns: PatternSearch
) -> SelectedChoices:
    """Of each prompt's choices those that are shown. Raises InvalidRequest for a pattern that takes too long."""
    if ask is None:
        return SelectedChoices(prepared=prepared, choices=list(choices))
    shown: list[TextDelta] = []
    votes: list[VoteResult] = []
    answers: list[str | None] = []
    if ask.votes:
        reasoning = prepared[0].reasoning
        texts = [choice.text if reasoning is None else reasoning.answer_in(choice.text) for choice in choices]
        found: Sequence[str | None] = texts
        if ask.pattern is not None:
            found = await patterns.find(ask.pattern, texts, _PATTERN, prepared[0].request.tenant)
        answers = [None if text is None else text.strip() for text in found]
    for first in range(0, len(choices), ask.candidates):
        group = choices[first : first + ask.candidates]
        if ask.votes:
            votes.append(elect(answers[first : first + ask.candidates]))
            kept = [votes[-1].winner]
        else:
            kept = likeliest([choice.tokens for choice in group], ask.keep)
        for index in kept:
            choice = group[index] if ask.shows_logprobs else _without_logprobs(group[index])
            shown.append(choice._replace(choice_index=len(shown)))
    fewer = [replace(one, request=replace(one.request, num_choices=ask.keep)) for one in prepared]
    return SelectedChoices(prepared=fewer, choices=shown, votes=tuple(votes))


def _without_logprobs(choice: TextDelta) -> TextDelta:
    return choice._replace(tokens=tuple(token._replace(logprob=None, top_logprobs=()) for token in choice.tokens))


def renumbered(ask: ChoiceSelection | None, by_first_choice: Mapping[int, _R]) -> dict[int, _R]:
    """What is known of prompts by the index of their first choice, for the choices that are shown."""
    if ask is None:
        return dict(by_first_choice)
    return {index // ask.candidates * ask.keep: value for index, value in by_first_choice.items()}
