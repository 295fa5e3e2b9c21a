"""Draft tokens: who may propose them, and in which order.

The next token of a request is a function of its logits and of (seed, choice, position) alone
(`engine.sampling.sampler`), so a draft is verified by equality: a step computes the newest token and its drafts,
samples every row with the row's own noise, and keeps samples for as long as draft and sample agree
(`engine.scheduler.settling`). The text is the same with any proposer, or none ("drafter-invariant": Daliri, Musco,
Suresh, 2024, arXiv 2408.07978). So all state here is soft: it may be missing, stale or wrong, after a preemption or on
another worker, and only speed changes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.types.request import Request


class Ask(NamedTuple):
    """A request that could verify drafts in the next step; all of its tokens are known."""

    request: Request
    most: int
    """Most tokens that are of use; at least 1."""


class Draft(NamedTuple):
    """Tokens expected right after a request's last one."""

    token_ids: tuple[int, ...]
    source: str
    """Name of the proposer, by which acceptance is counted."""


NO_DRAFT = Draft((), "")


class Proposer(Protocol):
    """Proposes drafts. Used by the engine's thread between two steps, so it must take microseconds a request."""

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        """One draft for each ask, of at most `most` tokens; `NO_DRAFT` for want of an idea."""
        ...

    def settled(self, request: Request, num_kept: int) -> None:
        """Learn that the first `num_kept` tokens of the request's latest draft were right and are now its own."""
        ...

    def forget(self, request: Request) -> None:
        """Drop what is remembered of a request that is over."""
        ...


class ProposerChain:
    """Asks several proposers by priority: each for the requests of which those before it had no idea."""

    def __init__(self, proposers: Sequence[Proposer]) -> None:
        self._proposers = tuple(proposers)

    def propose(self, asks: Sequence[Ask]) -> Sequence[Draft]:
        drafts = [NO_DRAFT] * len(asks)
        places: Sequence[int] = range(len(asks))
        for proposer in self._proposers:
            if not places:
                break
            found = proposer.propose([asks[i] for i in places])
            for i, draft in zip(places, found, strict=True):
                drafts[i] = draft
            places = [i for i in places if not drafts[i].token_ids]
        return drafts

    def settled(self, request: Request, num_kept: int) -> None:
        for proposer in self._proposers:
            proposer.settled(request, num_kept)

    def forget(self, request: Request) -> None:
        for proposer in self._proposers:
            proposer.forget(request)
