"""The results of an engine step for the worker: values only, safe to pass to another thread.

What every step makes is a tuple: a frozen dataclass takes five times as long to make.
"""

from dataclasses import dataclass
from typing import NamedTuple

from engine.types.kv_events import KVEventBatch
from engine.types.request import TokenEvent
from engine.types.tier_counts import TierCounts
from tandem.values.ids import BlockId, RequestId
from tandem.values.outputs import CachedTokens
from tandem.values.prefix_pin import PinKey, PinTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedSequence:
    """A request left the queue for the first time."""

    request_id: RequestId
    queued_s: float
    """Time since its arrival, on the clock of `arrival_s`."""
    num_prompt_tokens: int
    num_cached_tokens: int
    prefill_only: bool
    num_host_tokens: int = 0
    """Tokens loaded from host memory: some of the cached ones, and perhaps output that followed them."""
    num_disk_tokens: int = 0

    def cached(self, num_fetched_tokens: int) -> CachedTokens:
        """The cached tokens by source; `num_fetched_tokens` of those in the pool had come from a peer."""
        pool = max(0, self.num_cached_tokens - self.num_host_tokens - self.num_disk_tokens)
        fetched = min(num_fetched_tokens, pool)
        host = min(self.num_host_tokens, self.num_cached_tokens - pool)
        return CachedTokens(
            prefill_pool=pool - fetched if self.prefill_only else 0,
            decode_pool=0 if self.prefill_only else pool - fetched,
            fetched=fetched,
            host=host,
            disk=self.num_cached_tokens - pool - host,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillProgress:
    """Source blocks of a `prefill_only` request that got their final content in this step.

    Over a request's life these cover its table once, in order, blocks of its prefix hit first.
    """

    request_id: RequestId
    num_computed_tokens: int
    first_block_index: int
    """Index in the request's table of the first of `block_ids`."""
    block_ids: tuple[BlockId, ...]
    window_ids: tuple[tuple[BlockId, ...], ...]
    """The same for each group of windowed layers, where these have blocks of their own; before the prompt's window they
    mean nothing."""
    is_complete: bool
    """The prompt is computed; the last block may be partly filled."""


class PromptInStep(NamedTuple):
    """A `prefill_only` request in a step under way."""

    request_id: RequestId
    num_computed_tokens: int
    """Tokens whose KV was complete in all layers before the step."""
    num_coming_tokens: int
    """The same once the step is done."""
    block_ids: tuple[BlockId, ...]
    """All blocks of the request's table."""
    window_ids: tuple[tuple[BlockId, ...], ...] = ()
    """See PrefillProgress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersDone:
    """Progress within a step: the KV of its tokens is in the pool, on all ranks, for the first `num_layers` layers."""

    num_layers: int
    prompts: tuple[PromptInStep, ...]


class Load(NamedTuple):
    """A worker's occupation after the step."""

    num_running: int
    num_waiting: int
    num_held: int
    """Finished prefills whose blocks wait for a hand-off."""
    num_reservations: int
    num_backlog_tokens: int
    """Known tokens still to compute, of waiting and running requests."""
    num_blocks: int
    num_used_blocks: int
    num_evictable_blocks: int
    num_promised_blocks: int
    num_quarantined_blocks: int
    tiers: tuple[TierCounts, ...] = ()
    """Tiers below the pool, the nearest first."""
    pins: PinTotals = PinTotals()


class StepTimings(NamedTuple):
    """Time that one step spent in each phase, and the number of tokens it computed, drafts included."""

    schedule_s: float
    execute_s: float
    commit_s: float
    num_tokens: int
    num_requests: int
    is_overlapped: bool = False
    """Scheduling and committing were done while the device computed."""
    num_draft_tokens: int = 0
    """Drafts among the tokens."""
    num_accepted_tokens: int = 0
    """Drafts that were right, and have become tokens of their requests."""

    @property
    def is_decode(self) -> bool:
        """Whether each request computed one token, drafts aside."""
        return self.num_tokens - self.num_draft_tokens == self.num_requests

    @property
    def step_s(self) -> float:
        """Time from one step to the next when the same step is repeated."""
        return self.execute_s if self.is_overlapped else self.schedule_s + self.execute_s + self.commit_s


class SettledDraft(NamedTuple):
    """What became of one request's draft in one step."""

    request_id: RequestId
    source: str
    """Who proposed it: a name of `tandem.values.step_sizes.DRAFT_SOURCES`."""
    num_tokens: int
    """Tokens that the step verified."""
    num_kept: int
    """The first of them, which were right and have become tokens of the request."""


class StepOutput(NamedTuple):
    """Everything that happened since the previous output."""

    events: tuple[TokenEvent, ...]
    admissions: tuple[AdmittedSequence, ...]
    progress: tuple[PrefillProgress, ...]
    preemptions: tuple[RequestId, ...]
    kv_events: KVEventBatch
    load: Load
    timings: StepTimings | None = None
    """None when nothing was executed, for example after an abort of the last request."""
    lost_pins: tuple[PinKey, ...] = ()
    """Pinned prefixes that were given up."""
    num_accepted_tokens: int = 0
    """Drafts of the step that were right."""
    drafts: tuple[SettledDraft, ...] = ()
    """The step's drafts by request, without those of requests that ended meanwhile."""
