"""One request of a simulation: what it wants, what it has got so far, and when."""

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
    """Mutable; touched by the simulated router and by workers' news of it."""

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
        """Of admission, while it is there."""
        self.is_running = False
        """Whether it had its turn and has not ended."""
        self.progress = ChoiceProgress(
            prompt_length=wanted.num_prompt_tokens,
            max_tokens=wanted.num_output_tokens,
            max_attempts=_MAX_ATTEMPTS,
        )
        self.assignment: Assignment | None = None
        self.place: WaitingPosition | None = None
        self.key = RequestId("")
        """Of the attempt under way, on every worker: news of another one are stale."""
        self.num_output_tokens = 0
        """That the client has, as of the last news."""
        self.cached_tokens: int | None = None
        """Of the prompt, as the first worker that began to compute it found."""
        self.engine: Request | None = None
        """On the worker that answers, once it is there."""
        self.queued_s: float | None = None
        """From its arrival at the router until its prompt began to be computed."""
        self.first_token_s: float | None = None
        self.last_token_s = 0.0
        self.is_fresh = True
        """Its next token on the worker is not one step after the one before."""

    @property
    def is_local(self) -> bool:
        """Whether a decode worker is to read its prompt itself; see `router.types.requests.RoutedRequest`."""
        return self.entry is not None and self.entry.is_local and not self.num_output_tokens

    def begin_attempt(self) -> int:
        """Its number, which every name of the attempt bears."""
        attempt = self.progress.begin_attempt()
        self.key = RequestId(f"{self.number:09d}.{attempt}")
        return attempt

    def names(self, block_tokens: int) -> SpacedNames:
        """Of the full blocks of all tokens that the client and the prompt have, for the router."""
        num_full = (self.wanted.num_prompt_tokens + self.num_output_tokens) // block_tokens
        return SpacedNames(self._chain(num_full)[:num_full], block_tokens)

    def engine_request(self, now: float, block_tokens: int, *, prefill_only: bool) -> Request:
        """The request as an engine gets it, with all tokens that there are."""
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
        """Names of at least so many blocks."""
        known = self.wanted.names
        return [*known, *(own_name(self.number, index) for index in range(len(known), num_blocks))]
