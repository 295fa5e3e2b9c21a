"""The progress of one choice across its attempts: which tokens its client has, and what follows a failure.

After a refusal or the loss of a worker, another worker continues after the tokens that the client already has (sampling
noise depends on seed, choice and position only, so the text is that of an undisturbed run). After a failed hand-off,
another prefill worker is tried, then the decode worker computes the prompt. When every worker is full, the choice waits
for room. Bounds: `max_attempts` in a row without progress, the router's retry budget, and the request's deadline.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from random import Random

from router.dispatch.choices.attempt_ledger import AttemptLedger
from router.types.requests import ChoiceFinish
from router.types.session_events import AttemptFinished, AttemptStarted, TokensArrived, WorkerPort
from router.types.worker_view import WorkerKey
from tandem.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    RequestTooLarge,
    ServingError,
    StreamTaken,
    Unavailable,
)
from tandem.values.outputs import FinishReason, SampledToken
from tandem.values.roles import WorkerRole

MAX_REROUTES = 2
"""Prefill workers tried after the first one, before the decode worker computes the prompt itself."""
LEAST_WAIT_S = 0.1
MAX_WAIT_DOUBLINGS = 3
_OF_GRAMMAR = "grammar: "
"""The prefix of workers' errors about a grammar: sessions do not carry the name of the client's field."""


class RetryReason(Enum):
    """Reason for another attempt; a label of the retry metric."""

    REFUSED = "refused"
    WORKER_LOST = "worker_lost"
    WORKER_FAULT = "worker_fault"
    """The worker ended the attempt with an error of its own, or broke the protocol."""
    TRANSFER_FAILED = "transfer_failed"


class TokenGap(Exception):
    """Tokens are missing between those that the client has and those that arrived."""


class RetryBudget:
    """Keeps retries a small share of requests, so that they do not overload a cluster that is already failing.

    Each request earns `share` of a retry, up to `most`; the budget starts full. Streams of a dead worker are exempt:
    their continuation was promised, and their number is bounded by what that worker ran.
    """

    def __init__(self, *, share: float = 0.1, most: float = 64.0) -> None:
        self._share = share
        self._most = most
        self._left = most

    def earn(self) -> None:
        """Add the share that an accepted request earns."""
        self._left = min(self._most, self._left + self._share)

    def spend(self) -> bool:
        """Take one retry; False when none is left."""
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


def is_full(error: ServingError) -> bool:
    """Whether the worker is healthy and only lacks room now: its error carries a Retry-After."""
    return error.retryable and error.retry_after_s is not None


def is_final(error: ServingError) -> bool:
    """Whether no other worker would answer differently: the request is invalid, late, or its stream was taken over."""
    return isinstance(error, (InvalidRequest, DeadlineExceeded, StreamTaken)) and not isinstance(error, RequestTooLarge)


def in_clients_field(error: ServingError, grammar_param: str | None) -> ServingError:
    """Reword a worker's error about a grammar to name the client's field that the grammar was made from."""
    if grammar_param is None or not isinstance(error, InvalidRequest) or not error.message.startswith(_OF_GRAMMAR):
        return error
    return type(error)(f"{grammar_param}: {error.message.removeprefix(_OF_GRAMMAR)}", param=grammar_param)


@dataclass(slots=True, kw_only=True)
class ChoiceProgress:
    """The tokens, attempts and excluded workers of one choice."""

    prompt_length: int
    max_tokens: int
    max_attempts: int
    token_ids: list[int] = field(default_factory=list)
    """Output that the client has, or is about to get; authoritative."""
    attempt: int = 0
    num_reroutes: int = 0
    """Failed hand-offs of this attempt."""
    excluded: dict[WorkerKey, WorkerPort] = field(default_factory=dict)
    """Workers that failed or refused since the last progress, with the session in which they did."""
    full: set[WorkerKey] = field(default_factory=set)
    """Excluded workers that were only full and gave a Retry-After."""
    num_waits: int = 0
    """Waits for room since the last progress."""
    pool_tokens_above: int = 0
    last_error: ServingError | None = None
    clock: Callable[[], float] = lambda: 0.0
    """Measures how long attempts take; by default they take no time."""
    arrived_s: float | None = None
    prefilled_by: WorkerRole | None = None
    """The pool whose worker computed the prompt for the first attempt that began."""
    ledger: AttemptLedger = field(init=False)
    _num_taken: int = 0
    _num_failures: int = 0

    def __post_init__(self) -> None:
        self.ledger = AttemptLedger(prompt_length=self.prompt_length, clock=self.clock, arrived_s=self.arrived_s)

    def begin_attempt(self, kv_bytes_per_token: int = 0) -> int:
        """Begin the next attempt and return its number, from 1; its worker's tokens take so many bytes each."""
        self.ledger.begin(len(self.token_ids), kv_bytes_per_token)
        self.attempt += 1
        self._num_taken += 1
        self.num_reroutes = 0
        return self.attempt

    @property
    def was_taken(self) -> bool:
        """Whether a worker accepted an attempt, or may have; one that refused has computed nothing for it."""
        return self._num_taken > 0

    def record_prefilled_by(self, role: WorkerRole | None) -> None:
        """Record the pool that computed the prompt; `role`: see `ChoiceFinish.prefilled_by`."""
        self.prefilled_by = self.prefilled_by or role

    def record_refusal(self) -> None:
        """Count the attempt as not accepted."""
        self.ledger.refused()
        self._num_taken -= 1

    def accept(self, arrived: TokensArrived) -> tuple[SampledToken, ...]:
        """Accept arrived tokens and return those that are new to the client. Raises TokenGap."""
        first, new = arrived.first_index, arrived.tokens
        token_ids = self.token_ids
        num_due = len(token_ids)
        if first != num_due:
            if first > num_due:
                raise TokenGap(f"token {first} arrived, expected {num_due}")
            new = new[num_due - first :]
        if arrived.started is not None:
            self.ledger.on_started(arrived.started)
        if arrived.prediction is not None:
            self.ledger.on_prediction(arrived.prediction)
        if new:
            token_ids += [token.token_id for token in new]
            if self._num_failures or self.num_waits or self.excluded:
                self._num_failures = self.num_waits = 0
                self.excluded.clear()
                self.full.clear()
        return new

    def record_failure(
        self, reason: RetryReason, error: ServingError, budget: RetryBudget, *, is_last: bool = False
    ) -> bool:
        """End the attempt with this failure, which `last_error` keeps; return whether to make another one.

        `is_last`: there is no worker for another one. The failure counts towards `max_attempts`. Another attempt spends
        a retry of the budget, except after the loss of a worker; nothing is spent where the error is final or no
        attempt is left.
        """
        self.last_error = error
        if reason is RetryReason.REFUSED:
            self.record_refusal()
        self.ledger.ended(len(self.token_ids))
        self._num_failures += 1
        if is_last or is_final(error) or self._num_failures >= self.max_attempts:
            return False
        return reason is RetryReason.WORKER_LOST or budget.spend()

    def record_full_worker(self, worker: WorkerKey, error: ServingError) -> None:
        """Record that the worker has no room now: that is no failure, so it costs no attempt."""
        self.record_refusal()
        self.last_error = error
        self.full.add(worker)

    def wait_for_room_s(self, rng: Random) -> float:
        """Return the seconds to back off when all workers are full: their Retry-After, doubled each time, with
        jitter."""
        retry_after_s = None if self.last_error is None else self.last_error.retry_after_s
        self.num_waits += 1
        growth = 2.0 ** min(self.num_waits - 1, MAX_WAIT_DOUBLINGS)
        return max(LEAST_WAIT_S, retry_after_s or 0.0) * growth * rng.uniform(1.0, 1.5)

    def try_full_again(self) -> None:
        """Consider the full workers again: the wait for room is over."""
        for worker in self.full:
            self.excluded.pop(worker, None)
        self.full.clear()

    def still_excluded(self, port_of: Callable[[WorkerKey], WorkerPort | None]) -> set[WorkerKey]:
        """Return the workers not to try: one that was lost and has come back in a new session may be tried."""
        if not self.excluded:
            return set()
        return {worker for worker, port in self.excluded.items() if port_of(worker) is port}

    def try_reroute(self, budget: RetryBudget) -> bool:
        """Count a failed hand-off of this attempt, and spend a retry of the budget on another prefill worker.

        Return whether to try one; False: the decode worker computes the prompt itself, because `MAX_REROUTES` were
        tried, in which case nothing is spent, or because no retry is left.
        """
        self.num_reroutes += 1
        return self.num_reroutes <= MAX_REROUTES and budget.spend()

    @property
    def is_complete(self) -> bool:
        """Whether all tokens have arrived and only the end of the attempt was lost."""
        return len(self.token_ids) >= self.max_tokens

    def finish(self, finished: AttemptFinished) -> ChoiceFinish:
        """End as a worker reported. A continued choice has the first attempt's cached count and all attempts' times.

        The cached count is what the client's prompt hit when it arrived; later attempts also hit what earlier ones
        computed.
        """
        if self.ledger.first is None:
            self.ledger.on_started(AttemptStarted(cached_tokens=finished.cached_tokens, times=finished.times))
        self.ledger.ended(len(self.token_ids), finished.times)
        return self._finish(finished.reason)

    def finish_early(self, reason: FinishReason) -> ChoiceFinish:
        """End by the router's decision, with the figures known since the first token."""
        self.ledger.ended(len(self.token_ids))
        return self._finish(reason)

    def _finish(self, reason: FinishReason) -> ChoiceFinish:
        first, ledger = self.ledger.first, self.ledger
        cached = 0 if first is None else min(first.cached_tokens, self.prompt_length)
        return ChoiceFinish(
            reason=reason,
            cached_tokens=cached,
            times=ledger.total(),
            computed_tokens=ledger.computed_tokens,
            needed_tokens=self.prompt_length - cached + len(self.token_ids),
            prediction=ledger.prediction,
            prefilled_by=self.prefilled_by,
        )


def final_error(last: ServingError | None, *, retry_after_s: float) -> ServingError:
    """Return the error for the client when no attempt is left: the worker's own where it helps."""
    if last is None:
        return Unavailable("no decode worker is available", retry_after_s=retry_after_s)
    if last.retryable:
        return last if last.retry_after_s is not None else type(last)(last.message, retry_after_s=retry_after_s)
    if is_final(last) or isinstance(last, RequestTooLarge):
        return last
    return InternalError("the workers failed on this request")
