"""Speculation as the scheduler sees it: sources of drafts, how many of them to verify, and what became of them."""

from collections.abc import Sequence

from engine.speculation.pace import SpeculationPace
from engine.speculation.proposer import Ask, Draft, Proposer, ProposerChain
from engine.speculation.sources import SOURCES
from engine.types.config import SpeculationConfig
from engine.types.request import Request
from engine.types.step_output import SettledDraft, StepTimings


class Speculation:
    """The drafts of one engine. Used by the engine's thread alone."""

    def __init__(self, config: SpeculationConfig, proposer: Proposer | None = None) -> None:
        """`proposer`: proposes instead of the configured sources."""
        self._most = config.max_draft_tokens
        self._proposer = proposer or ProposerChain([SOURCES[name]() for name in config.sources])
        self._pace = SpeculationPace(
            adaptive=config.adaptive, max_rows=config.max_draft_rows, max_draft_tokens=config.max_draft_tokens
        )
        self._pending: dict[Request, Draft] = {}
        """Drafts under way, as they are verified."""

    def max_drafts(self, num_sequences: int, *, beside_chunk: bool) -> int:
        """Most drafts of one sequence that could be of use in a step that decodes so many; 0: do not ask for any."""
        return min(self._most, self._pace.max_drafts(num_sequences, beside_chunk=beside_chunk))

    def propose(self, asks: Sequence[Ask], num_sequences: int) -> list[Draft]:
        """A draft for each ask, cut to what is worth verifying in a step that decodes `num_sequences`."""
        drafts = self._proposer.propose(asks)
        lengths = self._pace.lengths(drafts, num_sequences)
        return [Draft(draft.token_ids[:length], draft.source) for draft, length in zip(drafts, lengths, strict=True)]

    def launched(self, request: Request, draft: Draft) -> None:
        """Note that a step verifies this draft, perhaps shorter than it was proposed."""
        self._pending[request] = draft

    def settled(self, request: Request, num_kept: int, *, is_over: bool) -> SettledDraft:
        """Learn that the first `num_kept` drafts were right. `is_over`: the request ended with the token after them."""
        draft = self._pending.pop(request)
        self._pace.settled(draft, num_kept, is_over=is_over)
        self._proposer.settled(request, num_kept)
        return SettledDraft(request.request_id, draft.source, len(draft.token_ids), num_kept)

    def forget(self, request: Request) -> None:
        """Forget a request that is over."""
        self._pending.pop(request, None)
        self._proposer.forget(request)

    def observe(self, timings: StepTimings) -> None:
        """Learn from a step's duration."""
        self._pace.observe(timings)
