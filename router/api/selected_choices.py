"""Selects the choices of an unstreamed answer to show where more were generated: `best_of`, and `n` with `vote`."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from router.api.answer.choice_text import TextDelta
from router.api.request.choice_selection import ChoiceSelection, VoteResult, elect, likeliest
from router.api.request.client_request import PreparedRequest
from router.sandbox.pattern_search import PatternSearch
from tandem.errors import InvalidRequest

_PATTERN = "vote_pattern"
_R = TypeVar("_R")


class SelectedChoices(Struct, frozen=True, kw_only=True):
    """The choices to show, renumbered."""

    prepared: list[PreparedRequest]
    """The requests, as if only the shown choices had been generated."""
    choices: list[TextDelta]
    votes: tuple[VoteResult, ...] = ()
    """One vote result per shown choice, if they were elected."""


def parse_selection(
    *, n: int | None, best_of: int | None, vote: bool, vote_pattern: str | None, streams: bool, shows_logprobs: bool
) -> ChoiceSelection | None:
    """Parse the selection; None: everything generated is shown. Raises InvalidRequest for what cannot be combined."""
    keep = n if n is not None else 1
    if vote_pattern is not None and not vote:
        raise InvalidRequest("vote_pattern needs vote: true", param=_PATTERN)
    if vote:
        if best_of not in (None, keep):
            raise InvalidRequest("best_of cannot be combined with vote", param="best_of")
        if streams:
            raise InvalidRequest("vote cannot be streamed: the winning answer is known only at the end", param="vote")
        return ChoiceSelection(candidates=keep, keep=1, votes=True, pattern=vote_pattern)
    if best_of in (None, keep):
        return None
    if keep < 1:
        raise InvalidRequest(f"n must be at least 1, got {keep}", param="n")
    if best_of < keep:
        raise InvalidRequest(f"best_of must be at least n ({keep}), got {best_of}", param="best_of")
    if streams:
        raise InvalidRequest("best_of cannot be streamed: the best answers are known only at the end", param="best_of")
    return ChoiceSelection(candidates=best_of, keep=keep, shows_logprobs=shows_logprobs)


def logprobs_needed(wanted: ChoiceSelection | None, num_logprobs: int | None) -> int | None:
    """Return the `num_logprobs` to request of workers: choosing the likeliest answers needs at least the tokens'
    own."""
    return 0 if num_logprobs is None and wanted is not None and not wanted.votes else num_logprobs


async def check_selection(
    wanted: ChoiceSelection | None, prepared: Sequence[PreparedRequest], patterns: PatternSearch
) -> None:
    """Check a selection. Raises InvalidRequest for a vote on answers that may call tools, or with an invalid
    pattern."""
    if wanted is not None and wanted.pattern is not None:
        await patterns.check(wanted.pattern, _PATTERN, prepared[0].request.tenant)
    if wanted is not None and wanted.votes and any(one.calling is not None for one in prepared):
        raise InvalidRequest("vote cannot be combined with tools", param="vote")


async def select(
    wanted: ChoiceSelection | None,
    prepared: list[PreparedRequest],
    choices: Sequence[TextDelta],
    patterns: PatternSearch,
) -> SelectedChoices:
    """Select the choices to show for each prompt. Raises InvalidRequest for a pattern that takes too long."""
    if wanted is None:
        return SelectedChoices(prepared=prepared, choices=list(choices))
    shown: list[TextDelta] = []
    votes: list[VoteResult] = []
    answers: list[str | None] = []
    if wanted.votes:
        reasoning = prepared[0].reasoning
        texts = [choice.text if reasoning is None else reasoning.answer_in(choice.text) for choice in choices]
        found: Sequence[str | None] = texts
        if wanted.pattern is not None:
            found = await patterns.find(wanted.pattern, texts, _PATTERN, prepared[0].request.tenant)
        answers = [None if text is None else text.strip() for text in found]
    for first in range(0, len(choices), wanted.candidates):
        group = choices[first : first + wanted.candidates]
        if wanted.votes:
            votes.append(elect(answers[first : first + wanted.candidates]))
            kept = [votes[-1].winner]
        else:
            kept = likeliest([choice.tokens for choice in group], wanted.keep)
        for index in kept:
            choice = group[index] if wanted.shows_logprobs else _without_logprobs(group[index])
            shown.append(replace(choice, choice_index=len(shown)))
    fewer = [replace(one, request=replace(one.request, num_choices=wanted.keep)) for one in prepared]
    return SelectedChoices(prepared=fewer, choices=shown, votes=tuple(votes))


def _without_logprobs(choice: TextDelta) -> TextDelta:
    return replace(choice, tokens=tuple(token._replace(logprob=None, top_logprobs=()) for token in choice.tokens))


def renumbered(wanted: ChoiceSelection | None, by_first_choice: Mapping[int, _R]) -> dict[int, _R]:
    """Map values by first generated choice of each prompt to its first shown choice."""
    if wanted is None:
        return dict(by_first_choice)
    return {index // wanted.candidates * wanted.keep: value for index, value in by_first_choice.items()}
