"""One request of a simulation: its input, its progress, and the times."""

from array import array

from cluster.simulator.inputs.block_names import SpacedNames, own_name
from cluster.simulator.inputs.trace import TraceRequest
from engine.types.request import Request
from router.admission.types import AdmissionEntry
from router.dispatch.choices.retry import ChoiceProgress
from router.dispatch.choices.waiting_choices import WaitingPosition
from router.placement.placer import Assignment
from tandem.values.ids import BlockHash, RequestId
from tandem.values.sampling import SamplingParams

_MAX_ATTEMPTS = 4


class SimRequest:
    """Mutable state of a request, changed by the simulated router and by events of workers."""

    __slots__ = (
        "arrived_s",
        "assignment",
        "cached_tokens",
        "engine",
        "entry",
        "first_token_s",
        "is_fresh",
        "is_running",
        "key",
        "last_token_s",
        "num_output_tokens",
        "number",
        "place",
        "progress",
        "queued_s",
        "wanted",
    )

    def __init__(self, number: int, wanted: TraceRequest, arrived_s: float) -> None:
        self.number = number
        self.arrived_s = arrived_s
        self.wanted = wanted
        self.entry: AdmissionEntry | None = None
        """Entry of the admission queue while the request is there."""
        self.is_running = False
        """Whether the request was admitted and has not ended."""
        self.progress = ChoiceProgress(
            prompt_length=wanted.num_prompt_tokens,
            max_tokens=wanted.num_output_tokens,
            max_attempts=_MAX_ATTEMPTS,
        )
        self.assignment: Assignment | None = None
        self.place: WaitingPosition | None = None
        self.key = RequestId("")
        """Id of the present attempt, on every worker: events of others are stale."""
        self.num_output_tokens = 0
        """Number of tokens that the client has, according to the latest event."""
        self.cached_tokens: int | None = None
        """Cached prompt tokens that the first worker found when it started the prompt."""
        self.engine: Request | None = None
        """Request of the answering worker's engine, once it is there."""
        self.queued_s: float | None = None
        """Time from arrival at the router until computation of the prompt started."""
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.is_fresh = True
        """Whether the next token on the worker does not follow the previous one by one step."""

    @property
    def is_local(self) -> bool:
        """Whether a decode worker computes the prompt itself; see `router.types.requests.RoutedRequest`."""
        return self.entry is not None and self.entry.is_local and not self.num_output_tokens

    def begin_attempt(self) -> int:
        """Start an attempt and return its number, which is part of every id of the attempt."""
        attempt = self.progress.begin_attempt()
        self.key = RequestId(f"{self.number:09d}.{attempt}")
        return attempt

    def names(self, block_tokens: int) -> SpacedNames:
        """Return the names, for the router, of the full blocks of all tokens of the prompt and the answer so far."""
        num_full = (self.wanted.num_prompt_tokens + self.num_output_tokens) // block_tokens
        return SpacedNames(self._chain(num_full)[:num_full], block_tokens)

    def engine_request(self, now: float, block_tokens: int, *, prefill_only: bool) -> Request:
        """Build the engine's request, with all tokens so far."""
        num_prompt, num_output = self.wanted.num_prompt_tokens, self.num_output_tokens
        tokens = array("i", bytes(4 * (num_prompt + num_output)))
        num_full = num_prompt // block_tokens
        if num_full * block_tokens < num_prompt:
            tokens[num_full * block_tokens] = self.wanted.tail
        return Request(
            request_id=self.key,
            token_ids=tokens,
            num_prompt_tokens=num_prompt,
            params=SamplingParams(max_tokens=self.wanted.num_output_tokens, ignore_eos=True),
            hash_root=own_name(self.number),
            arrival_s=now,
            prefill_only=prefill_only,
            block_hashes=self._chain((num_prompt + num_output) // block_tokens),
        )

    def _chain(self, num_blocks: int) -> list[BlockHash]:
        """Return the names of at least so many blocks."""
        known = self.wanted.names
        return [*known, *(own_name(self.number, index) for index in range(len(known), num_blocks))]
