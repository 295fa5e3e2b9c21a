"""Prompt logprobs as values: what a client may request about its prompt itself, and what workers report."""

from array import array
from collections.abc import Sequence

from msgspec import Struct, field

from router.types.worker_view import WorkerKey
from tandem.values.outputs import PhaseTimes
from tandem.values.pooling import PoolingMode


class PromptScoringRequest(Struct, frozen=True, kw_only=True):
    """A request to score the prompt before anything is generated."""

    num_top: int | None
    """Alternatives per token, returned with the log probabilities; None: return pooled hidden states instead."""
    only: bool = False
    """Whether nothing is generated."""
    continues: bool = False
    """Whether to return only the `num_top` most likely tokens after the prompt."""
    label_token_ids: tuple[int, ...] = ()
    """Return only the log probabilities of these tokens after the prompt; `num_top` is then 0."""
    pooling: tuple[PoolingMode, ...] = (PoolingMode.MEAN,)
    """How hidden states are pooled, where `num_top` is None."""
    num_skipped: int = 0
    """Leading tokens that are not pooled."""
    through_head: bool = False
    """Whether what is pooled passes through the layers that the model has behind its pooling."""
    is_relevance: bool = False
    """Whether a pair of texts is scored, by a model made for that."""

    @property
    def is_small(self) -> bool:
        """Whether the result does not grow with the prompt."""
        return self.num_top is None or self.continues or bool(self.label_token_ids)

    @property
    def is_plain(self) -> bool:
        """Whether workers of the version before know how to do it."""
        mean = (PoolingMode.MEAN,)
        return not (self.label_token_ids or self.num_skipped or self.through_head) and self.pooling == mean


class ScoredPrompt(Struct, frozen=True, kw_only=True):
    """The scores of one prompt; log probabilities start at its second token, or are those of labels after it."""

    num_top: int = 0
    logprobs: Sequence[float] = ()
    ranks: Sequence[int] = ()
    """Rank of each token; 1: no other token was more likely."""
    top_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()
    """Log probabilities of the `num_top` most likely tokens in place of each token, the most likely first."""
    mean: Sequence[float] = ()
    """The pooled hidden states."""
    times: PhaseTimes = field(default_factory=PhaseTimes)
    num_computed: int = 0
    """Prompt tokens that had to be computed."""
    worker: WorkerKey | None = None
    """The worker that scored it."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def top(self, index: int) -> list[tuple[int, float]]:
        """Return the most likely tokens at one position."""
        place = slice(index * self.num_top, (index + 1) * self.num_top)
        return list(zip(self.top_ids[place], self.top_logprobs[place], strict=True))


class ScoredPromptBuilder:
    """Assembles a scored prompt from a worker's messages."""

    def __init__(self, ask: PromptScoringRequest, num_tokens: int) -> None:
        self._num_top = ask.num_top
        self._continues = ask.continues
        self._num_tokens = num_tokens
        self._num_labels = len(ask.label_token_ids)
        self._logprobs, self._top_logprobs = array("f"), array("f")
        self._ranks, self._top_ids = array("i"), array("i")
        self._mean = array("f")

    def add(
        self,
        *,
        logprobs: Sequence[float],
        ranks: Sequence[int],
        top_ids: Sequence[int],
        top_logprobs: Sequence[float],
        mean: Sequence[float],
    ) -> None:
        self._logprobs.extend(logprobs)
        self._ranks.extend(ranks)
        self._top_ids.extend(top_ids)
        self._top_logprobs.extend(top_logprobs)
        self._mean.extend(mean)

    def whole(self, times: PhaseTimes, worker: WorkerKey) -> ScoredPrompt | None:
        """Return the whole result; None when it does not match the request."""
        num_scored = 0 if self._num_top is None or self._continues else self._num_labels or self._num_tokens - 1
        num_top = (1 if self._continues else num_scored) * (self._num_top or 0)
        sizes = (len(self._logprobs), len(self._ranks), len(self._top_ids), len(self._top_logprobs))
        if sizes != (num_scored, num_scored, num_top, num_top) or bool(self._mean) != (self._num_top is None):
            return None
        return ScoredPrompt(
            num_top=self._num_top or 0,
            logprobs=self._logprobs,
            ranks=self._ranks,
            top_ids=self._top_ids,
            top_logprobs=self._top_logprobs,
            mean=self._mean,
            times=times,
            num_computed=max(0, self._num_tokens - times.cached.total),
            worker=worker,
        )
