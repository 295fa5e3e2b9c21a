"""One generation as the engine sees it: tokens, of which some still need computing.

A request has no phase. `num_computed_tokens` trails `num_tokens` by a whole prompt when it is new, by one token
while it decodes, by everything after a preemption or a lost hand-off; the scheduler only ever closes that gap.
Everything here is touched by the engine thread alone.
"""

from array import array
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import NamedTuple

from engine.types.block_moves import BlockCopy, BlockLoad, BlockOffload
from engine.types.block_table import BlockTable
from engine.types.prompt_logprobs import PromptScoringState
from engine.types.token_guide import TokenGuide
from engine.types.windows import WindowTable
from tandem.errors import InvariantError
from tandem.values.ids import BlockHash, RequestId
from tandem.values.outputs import FinishReason as FinishReason
from tandem.values.outputs import SampledToken as SampledToken
from tandem.values.outputs import TokenLogprob as TokenLogprob
from tandem.values.sampling import SamplingParams


class BlockSeconds:
    """Integrates the number of blocks held over time."""

    __slots__ = ("_num_blocks", "_since_s", "_total")

    def __init__(self) -> None:
        self._num_blocks = 0
        self._since_s = 0.0
        self._total = 0.0

    def change(self, num_blocks: int, now_s: float) -> None:
        """Note that `num_blocks` are held from now on."""
        if self._num_blocks:
            self._total += self._num_blocks * (now_s - self._since_s)
        self._num_blocks, self._since_s = num_blocks, now_s

    def until(self, now_s: float) -> float:
        """Block-seconds up to `now_s`."""
        return self._total + self._num_blocks * (now_s - self._since_s)


class RequestState(Enum):
    """Stage of a request's life in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    HELD = "held"
    """Prefill is done and the blocks stay pinned until the hand-off ends."""
    FINISHED = "finished"


_NEXT: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.RUNNING, RequestState.FINISHED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.HELD, RequestState.FINISHED}),
    RequestState.HELD: frozenset({RequestState.FINISHED}),
    RequestState.FINISHED: frozenset(),
}


class EndRule(NamedTuple):
    """Conditions that end a request: made by `engine.scheduler.request_limits.end_rule`, checked after every token."""

    token_ids: frozenset[int]
    """Sampling one of these ends the request, once it has `min_tokens`."""
    min_tokens: int
    """Least length of the sequence, prompt and output."""
    max_tokens: int
    """Greatest length of the sequence, prompt and output."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """Mutable state of one choice of one client request."""

    request_id: RequestId
    token_ids: "array[int]"
    """Prompt, then output."""
    num_prompt_tokens: int
    params: SamplingParams
    hash_root: BlockHash
    """Parent of the first block's hash: model, adapter and tenant salt."""
    adapter_slot: int = -1
    """Slot of the request's adapter, which holds it from before the request comes until its last step; -1: none."""
    choice_index: int = 0
    arrival_s: float = 0.0
    priority: int = 0
    """Lower is sooner."""
    deadline_s: float | None = None
    """Deadline on the clock of `arrival_s`. Among waiting requests the earliest goes first; one that passes ends it."""
    prefill_only: bool = False
    """Compute the prompt, sample one token, then hold the blocks for a hand-off."""
    state: RequestState = RequestState.WAITING
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    """Tokens after these that launched steps compute; see `engine.scheduler.lookahead`."""
    num_awaited_tokens: int = 0
    """Tokens after the known ones that launched steps sample: their ids are not known yet."""
    num_in_flight_drafts: int = 0
    """Drafts that a launched step verifies: how many of them become tokens is not known yet."""
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed for this request because their KV was already here."""
    num_host_tokens: int = 0
    """Tokens that the latest admission loaded from host memory."""
    num_disk_tokens: int = 0
    """The same, from disk."""
    num_preemptions: int = 0
    held: BlockSeconds = field(default_factory=BlockSeconds)
    """Block-seconds held so far, on the block manager's clock."""
    block_table: BlockTable = field(default_factory=BlockTable)
    windows: WindowTable | None = None
    """Blocks of windowed layers, where these have their own; None: all layers share those of `block_table`."""
    block_hashes: list[BlockHash] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    guide: TokenGuide | None = None
    """Follows the answer's grammar, if it has one."""
    prediction: "array[int] | None" = None
    """Tokens of the answer that the client expects, if it has said: drafts are proposed from them."""
    scoring: PromptScoringState | None = None
    """Prompt scoring, if requested; such a request samples one token, which is discarded."""
    end_rule: EndRule | None = None
    """The scheduler's, from `params` and the model; None before it has seen the request."""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, including those of other workers."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens whose KV does not exist yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_planned_tokens(self) -> int:
        """Tokens whose KV exists once every launched step is done."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_unplanned_tokens(self) -> int:
        """Tokens, known or awaited, that no launched step computes."""
        return len(self.token_ids) + self.num_awaited_tokens - self.num_computed_tokens - self.num_in_flight_tokens

    def move_to(self, state: RequestState) -> None:
        """Change state; InvariantError for a move that the life cycle does not have."""
        if state not in _NEXT[self.state]:
            raise InvariantError(f"request {self.request_id}: {self.state} -> {state}")
        self.state = state


class BatchItem(NamedTuple):
    """One request's share of a step: the next `num_tokens` tokens after `start`, then its drafts.

    A tuple, as `TokenEvent` is: every step makes one per request, and a frozen dataclass costs five times as much.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """True when the step reaches the last known token, so that a new one is sampled."""
    drafts: tuple[int, ...] = ()
    """Tokens expected after the last known one, of an item with one token that samples. Each is computed as if it were
    known and sampled after, so that the item has `1 + len(drafts)` samples, of which some are kept
    (`engine.scheduler.settling`)."""


_DRAFTS = attrgetter("drafts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Work of one step; built by the scheduler, executed by a runner.

    Blocks are moved first (see `engine.types.block_moves` for the order), then the items' tokens are computed.
    """

    items: tuple[BatchItem, ...]
    offloads: tuple[BlockOffload, ...] = ()
    loads: tuple[BlockLoad, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    saves_free_blocks: bool = False
    """True when some offloaded blocks are already free: nothing outside the step may take them until it is done."""
    num_draft_tokens: int = field(init=False)
    """Rows that verify drafts. Counted once: most batches have none, and several loops over them ask."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_draft_tokens", sum(map(len, filter(None, map(_DRAFTS, self.items)))))

    @property
    def num_tokens(self) -> int:
        """Rows of the step's hidden states."""
        return sum([item.num_tokens for item in self.items]) + self.num_draft_tokens

    @property
    def num_samples(self) -> int:
        """Tokens that the step samples; only items that sample have drafts."""
        return sum([item.samples for item in self.items]) + self.num_draft_tokens


class TokenEvent(NamedTuple):
    """One new token of one request, or its end, or both."""

    request_id: RequestId
    index: int  # type: ignore[assignment]  # hides tuple.index, which is never called on events
    """Position of the token in the output, from 0; equals the number of outputs when the event is only an end."""
    token: SampledToken | None
    finish_reason: FinishReason | None
    num_cached_tokens: int
