"""Counts the work of this worker's engine since start, for metrics. Pure."""

from bisect import bisect_left
from dataclasses import dataclass, field

from engine.types.step_output import SettledDraft, StepOutput, StepTimings
from tandem.values.step_sizes import DRAFT_PLACES, STEP_SIZES


@dataclass(slots=True)
class StepKindTotals:
    """Totals of one kind of steps."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    requests: int = 0
    """Number of requests, summed over steps."""
    draft_tokens: int = 0
    """Drafts among the tokens."""
    accepted_tokens: int = 0
    """Drafts that were right."""

    def add(self, timings: StepTimings) -> None:
        self.steps += 1
        self.seconds += timings.step_s
        self.tokens += timings.num_tokens
        self.requests += timings.num_requests
        self.draft_tokens += timings.num_draft_tokens
        self.accepted_tokens += timings.num_accepted_tokens


@dataclass(slots=True)
class DraftTotals:
    """Totals of the drafts of one source."""

    drafts: int = 0
    draft_tokens: list[int] = field(default_factory=lambda: [0] * DRAFT_PLACES)
    """Verified tokens by their place in the draft; later places count for the last one."""
    accepted_tokens: list[int] = field(default_factory=lambda: [0] * DRAFT_PLACES)
    """Those that were right."""

    def add(self, draft: SettledDraft) -> None:
        self.drafts += 1
        for totals, count in ((self.draft_tokens, draft.num_tokens), (self.accepted_tokens, draft.num_kept)):
            for place in range(min(count, DRAFT_PLACES)):
                totals[place] += 1
            totals[-1] += max(0, count - DRAFT_PLACES)


class WorkMeter:
    """Totals of all steps."""

    __slots__ = ("decode", "drafts", "preemptions", "prefill", "sizes")

    def __init__(self) -> None:
        self.prefill = StepKindTotals()
        """Steps that computed prompt tokens, perhaps among others."""
        self.decode = StepKindTotals()
        """Steps that only computed one token for each request, and drafts."""
        self.preemptions = 0
        self.sizes = [0] * (len(STEP_SIZES) + 1)
        """Number of steps by number of tokens, in buckets."""
        self.drafts: dict[str, DraftTotals] = {}
        """By source."""

    def observe(self, output: StepOutput) -> None:
        """Count a step that has ended, and preempted requests."""
        self.preemptions += len(output.preemptions)
        for draft in output.drafts:
            if (totals := self.drafts.get(draft.source)) is None:
                totals = self.drafts[draft.source] = DraftTotals()
            totals.add(draft)
        timings = output.timings
        if timings is not None:
            self.sizes[bisect_left(STEP_SIZES, timings.num_tokens)] += 1
            (self.decode if timings.is_decode else self.prefill).add(timings)
