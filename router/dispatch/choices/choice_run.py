"""One choice of a request under way: carries its worker's events to `ChoiceProgress`, and its orders to workers."""

import logging
from collections.abc import Sequence
from functools import partial

from router.dispatch.choices.context import DispatchContext, Post, Waiting
from router.dispatch.choices.health_reports import ChoiceHealthReporter
from router.dispatch.choices.orders import (
    UNREAD_TOKENS_PER_MESSAGE,
    block_names,
    first_route,
    next_route,
    trace_placement,
)
from router.dispatch.choices.retry import (
    ChoiceProgress,
    RetryReason,
    TokenGap,
    final_error,
    in_clients_field,
    is_final,
    is_full,
)
from router.placement.placer import Assignment
from router.placement.worker_selection import NoDecodeWorker
from router.types.requests import ChoiceDelta, ChoiceFinish, RoutedRequest
from router.types.session_events import (
    AttemptEvent,
    AttemptRefused,
    PrefillRoute,
    SubmitOrder,
    TokensArrived,
    TransferFailed,
    WorkerLost,
)
from router.types.worker_view import WorkerKey
from router.workers.registry import FAILURE_PENALTY_S
from tandem.errors import InternalError, RequestTooLarge, ServingError, Unavailable
from tandem.telemetry.logs import about
from tandem.values.ids import BlockHash, Incarnation, RequestId
from tandem.values.outputs import FinishReason

logger = logging.getLogger(__name__)

_ATTEMPTS_BITS = 16
"""A worker tells a stream's readers apart by the numbers of their attempts."""


class ChoiceRun:
    """Drives one choice to its end, over as many workers as it takes."""

    def __init__(
        self,
        request: RoutedRequest,
        standing: ChoiceHealthReporter,
        names: list[BlockHash],
        context: DispatchContext,
        post: Post,
    ) -> None:
        """`names`: of the prompt's blocks."""
        self.done = False
        self.waiting: Waiting | None = None
        self.failure: ServingError | None = None
        """What ends the request, once the deltas that came before it are with the client."""
        self._standing = standing
        self._index, self._request = standing.index, request
        self._request_id = RequestId(f"{request.request_id}-{self._index}")
        self._prompt_names = names
        self._context = context
        self._placer = context.placer
        self._post = post
        self._progress = ChoiceProgress(
            prompt_length=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            max_attempts=context.settings.max_attempts,
            clock=context.clock,
            arrived_s=request.arrived_s,
        )
        self._progress.attempt = request.resumptions << _ATTEMPTS_BITS
        self._resume = request.resume[self._index] if request.resume else None
        self._assignment: Assignment | None = None
        self._awaited: Assignment | None = None
        """The same, until its first word came."""
        self._worker = Incarnation(0)
        self._route: PrefillRoute | None = None
        self._adopting = self._proven = False
        """Of the attempt that runs: a worker was asked to give it away; a token came of it."""

    def submit(self) -> None:
        """Start the next attempt on the best worker whose session takes it.

        When there is none, the choice is `waiting` afterwards. Raises the error that the client is told.
        """
        progress = self._progress
        self._adopt()
        while self._assignment is None:
            if self._standing.must_wait(self._request):
                self.waiting = Waiting.FOR_ROOM
                return
            started_s = self._context.clock()
            try:
                assignment = self._choose()
            except NoDecodeWorker as none:
                self.waiting = self._to_wait_for(self.waiting)
                if self.waiting is not None:
                    return
                raise self.final_error() from none
            number = progress.begin_attempt(assignment.placement.decode.info.kv_bytes_per_token)
            self._route = first_route(self._request_id, number, assignment, self._context.rng)
            self._trace(assignment, started_s)
            try:
                assignment.port.submit(self._order(number, assignment), partial(self._post, self._index, number))
            except Unavailable as error:
                self._note_failure(assignment, error)
                if not progress.may_retry(RetryReason.REFUSED, error, self._context.budget):
                    raise self.final_error() from error
                self._context.observer.retried(RetryReason.REFUSED.value)
                continue
            self._assignment = self._awaited = assignment
            self.waiting, self._proven = None, False
            self._standing.placed(self, self._workers(assignment))
            if self._request.only_worker is None:
                self._placer.record(assignment, self._request_id, self._request.tenant, self._request.pins)
            self._context.observer.placed(assignment.placement.reason.value)

    def _choose(self) -> Assignment:
        """The best workers for the next attempt. Raises NoDecodeWorker, or RequestTooLarge for every one of them."""
        excluded, shunned = self._excluded(), self._standing.shunned()
        if (only := self._request.only_worker) is not None:
            excluded |= {worker.info.key for worker in self._placer.registry.snapshots()} - {only}
        try:
            return self._assign(excluded | shunned)
        except NoDecodeWorker:
            if not shunned:
                raise
            # Better one that may fail than none.
            return self._assign(excluded)

    def _excluded(self) -> set[WorkerKey]:
        return self._progress.still_excluded(self._placer.registry.port)

    def _assign(self, excluded: set[WorkerKey]) -> Assignment:
        request, progress = self._request, self._progress
        try:
            return self._placer.assign(
                num_tokens=progress.prompt_length + len(progress.token_ids),
                names=block_names(request, self._prompt_names, progress.token_ids, self._context.hasher),
                excluded=frozenset(excluded),
                pool_tokens_above=progress.pool_tokens_above,
                is_local=request.is_local and not progress.token_ids,
            )
        except RequestTooLarge as computed:
            # The worker that refused it for its size has said more precisely why.
            refused = progress.last_error
            raise refused if isinstance(refused, RequestTooLarge) else computed from None

    def _to_wait_for(self, waiting: Waiting | None) -> Waiting | None:
        """No worker can be asked at the moment: what changes that, or None when nothing is expected to.

        `waiting`: what it has waited for until now.
        """
        full, live = self._progress.full, self._placer.registry.live_decoders()
        if live & full:
            return Waiting.FOR_ROOM
        # Those it waited for have left: that is a loss like any other.
        if waiting is not None:
            return Waiting.FOR_WORKER
        # Those that serve have failed it, and another would hardly do better. Who is full and not live is leaving.
        if live and not full and self._progress.last_error is not None:
            return None
        if self._request.only_worker is None and self._placer.registry.worker_due_s() > 0.0:
            return Waiting.FOR_WORKER
        return None

    def _adopt(self) -> None:
        """Ask the worker for it that ran it last, if this stream is one that is continued."""
        point, self._resume = self._resume, None
        if point is None:
            return
        num_tokens = self._progress.prompt_length + point.num_tokens
        assignment = self._placer.adopt(point.worker, num_tokens=num_tokens, names=self._prompt_names)
        if assignment is None:
            return
        number = self._progress.begin_attempt()
        deliver = partial(self._post, self._index, number)
        try:
            assignment.port.adopt(self._request_id, number, num_shown=point.num_tokens, deliver=deliver)
        except Unavailable:
            self._progress.was_refused()
            self._placer.release(assignment)
            return
        self._assignment = self._awaited = assignment
        self._adopting = True
        self._context.observer.placed(assignment.placement.reason.value)

    @property
    def has_tokens(self) -> bool:
        """Whether the client has any."""
        return bool(self._progress.token_ids)

    @property
    def worker(self) -> WorkerKey | None:
        """Who decodes it at the moment."""
        return None if self._assignment is None else self._assignment.decode

    @property
    def was_taken(self) -> bool:
        """Whether a worker took it, or may have: then it is not new."""
        return self._progress.was_taken

    def runs(self, attempt: int) -> bool:
        """Whether an attempt is the one under way."""
        return self._assignment is not None and attempt == self._progress.attempt

    def submit_beside(self, other: "ChoiceRun", *, apart: int) -> None:
        """As `submit`, on another worker than `other` has, with attempts numbered `apart` from its."""
        self._progress.attempt = other._progress.attempt + apart
        if (assignment := other._assignment) is not None:
            self._progress.excluded[assignment.decode] = assignment.port
        self.submit()

    def let_go(self) -> None:
        """Forget what runs without ending it: another reader has it."""
        self.waiting = None
        self._standing.left(self)
        if (assignment := self._assignment) is not None:
            self._assignment = None
            self._placer.release(assignment)

    def mourn(self) -> None:
        """Its worker died, and the choice's other run goes on. Raises Unavailable as `on_event` does then."""
        if self._assignment is not None:
            self._standing.lost(self, self._assignment.decode, self._request)

    def on_event(self, attempt: int, event: AttemptEvent) -> Sequence[ChoiceDelta]:
        """What the client gets of an event; nothing of an earlier attempt's. Raises the error that it is told."""
        assignment = self._assignment
        if assignment is None or attempt != self._progress.attempt:
            return []
        match event:
            case TokensArrived():
                return self.on_tokens(attempt, event)
            case AttemptRefused():
                return self._on_refusal(assignment, event.error)
            case WorkerLost():
                self._warn("its worker was lost: %s", event.reason)
                self._mourn(assignment.decode)
                return self._retry(assignment, RetryReason.WORKER_LOST, Unavailable("the worker was lost"))
            case TransferFailed():
                self._reroute(assignment, event)
        return []

    def abandon(self) -> None:
        """Cancel whatever runs for this choice."""
        self.waiting = None
        assignment = self._assignment
        taken_back = () if assignment is None or self._proven else self._workers(assignment)
        self._standing.left(self, taken_back, was_taken=self._progress.was_taken)
        if assignment is not None:
            self._assignment = None
            assignment.port.cancel(self._request_id, self._progress.attempt)
            self._placer.release(assignment)

    def finish_early(self, reason: FinishReason) -> ChoiceDelta:
        """The end, by the router's own decision."""
        return self._finish(self._progress.finish_early(reason))

    def final_error(self) -> ServingError:
        """What the client is told when nothing more can be tried."""
        error = final_error(self._progress.last_error, retry_after_s=self._context.settings.retry_after_s)
        return in_clients_field(error, self._request.grammar_param)

    def on_tokens(self, attempt: int, arrived: TokensArrived) -> Sequence[ChoiceDelta]:
        """As `on_event`, of the commonest event."""
        assignment = self._assignment
        if assignment is None or attempt != self._progress.attempt:
            return ()
        try:
            tokens = self._progress.accept(arrived)
        except TokenGap as gap:
            self._warn("%s", gap, level=logging.ERROR)
            assignment.port.cancel(self._request_id, self._progress.attempt)
            return self._retry(assignment, RetryReason.WORKER_FAULT, InternalError("tokens were lost"))
        if self._awaited is assignment:
            self._begun(assignment, arrived)
        if tokens and not self._proven:
            self._proven = True
            self._standing.answered(self)
        finished = arrived.finished
        deltas = (ChoiceDelta(self._index, tokens, None, self._worker, None, arrived.cached_tokens),) if tokens else ()
        if finished is None:
            return deltas
        if finished.failure is not None or finished.reason in {FinishReason.ABORT, FinishReason.ERROR}:
            error = finished.failure or Unavailable("the worker gave the request up")
            try:
                return (*deltas, *self._retry(assignment, RetryReason.WORKER_FAULT, error))
            except ServingError as told:
                # These tokens count as the client's, so it must have them before the error.
                self.failure = told
                return deltas
        return (self._finish(self._progress.finish(finished))._replace(tokens=tokens, worker=self._worker),)

    def _begun(self, assignment: Assignment, arrived: TokensArrived) -> None:
        """The first word of an attempt that runs."""
        self._standing.was_adopted |= self._adopting
        self._awaited, self._adopting = None, False
        self._progress.was_read(self._placer.prompt_computed(assignment))
        if arrived.started is not None:
            self._placer.found_cached(assignment, arrived.started.cached_tokens)
        self._worker = assignment.decode.incarnation

    def _retry(self, assignment: Assignment, reason: RetryReason, error: ServingError) -> list[ChoiceDelta]:
        """The attempt has ended on its worker before the choice has: continue elsewhere, or raise."""
        self._note_failure(assignment, error)
        if self._progress.is_complete:
            return [self.finish_early(FinishReason.LENGTH)]
        if not self._progress.may_retry(reason, error, self._context.budget):
            raise self.final_error()
        self._context.observer.retried(reason.value)
        self.waiting = Waiting.FOR_WORKER if reason is RetryReason.WORKER_LOST else None
        self.submit()
        return []

    def _on_refusal(self, assignment: Assignment, error: ServingError) -> list[ChoiceDelta]:
        """A full worker costs no attempt: another is asked if retries are not too many, else the choice waits."""
        if self._adopting:
            # It had it no more, which is no fault: the answer is generated again, from the same seed.
            self._adopting, self._assignment = False, None
            self._progress.was_refused()
            self._placer.release(assignment)
            self.submit()
            return []
        if not is_full(error):
            return self._retry(assignment, RetryReason.REFUSED, error)
        self._note_failure(assignment, error)
        self._progress.was_full(assignment.decode, error)
        self._context.observer.retried(RetryReason.REFUSED.value)
        if self._context.budget.spend():
            self.submit()
        else:
            self.waiting = Waiting.FOR_ROOM
        return []

    def wait_for_room_s(self) -> float:
        """How long to wait before `come_back`, unless room shows earlier."""
        return self._progress.wait_for_room_s(self._context.rng)

    def come_back(self) -> None:
        """Ask the workers again that were full. Raises as `submit`."""
        if self.waiting is Waiting.FOR_ROOM:
            self._progress.try_full_again()
            self.submit()

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV a worker must have room for, at least."""
        return self._progress.prompt_length + len(self._progress.token_ids) + 1

    def _workers(self, assignment: Assignment) -> tuple[WorkerKey, ...]:
        """Who could have been ended by it."""
        return (assignment.decode,) if self._route is None else (assignment.decode, self._route.worker)

    def _mourn(self, key: WorkerKey) -> None:
        """Raises Unavailable when the request is taken to have ended it."""
        if not self._progress.is_complete:
            self._standing.lost(self, key, self._request)

    def _note_failure(self, assignment: Assignment, error: ServingError) -> None:
        self._assignment = None
        self._placer.release(assignment)
        self._progress.excluded[assignment.decode] = assignment.port
        standing, ours = self._standing, is_full(error) or is_final(error) or isinstance(error, RequestTooLarge)
        at_fault = not ours and self._placer.registry.port(assignment.decode) is assignment.port
        (standing.failed if at_fault else standing.refused)(self, assignment.decode)
        if isinstance(error, RequestTooLarge):
            self._progress.pool_tokens_above = assignment.placement.decode.info.pool_tokens
        elif error.retryable or isinstance(error, InternalError):
            pause_s = FAILURE_PENALTY_S if error.retry_after_s is None else error.retry_after_s
            self._placer.registry.penalise(assignment.decode, pause_s)

    def _order(self, attempt: int, assignment: Assignment) -> SubmitOrder:
        request, route = self._request, self._route
        left_s = None if request.deadline_s is None else max(0.0, request.deadline_s - self._context.clock())
        return SubmitOrder(
            request_id=self._request_id,
            attempt=attempt,
            choice_index=self._index,
            prompt_token_ids=request.prompt_token_ids,
            generated_token_ids=tuple(self._progress.token_ids),
            sampling=request.sampling,
            hash_root=request.hash_root,
            priority=request.priority,
            timeout_s=left_s,
            prefill=route,
            holder=assignment.holder if route is None else None,
            tokens_per_message=0 if request.reads_along else UNREAD_TOKENS_PER_MESSAGE,
            trace=None if request.span is None else request.span.context,
        )

    def _reroute(self, assignment: Assignment, failed: TransferFailed) -> None:
        route, progress = self._route, self._progress
        if route is None:
            # Adopted while its prompt was under way.
            assignment.port.reroute(self._request_id, progress.attempt, None)
            return
        if failed.transfer_id != route.transfer_id:
            return
        self._warn("hand-off from %s failed: %s", route.worker.worker_id, failed.reason)
        error = failed.error
        if error is not None and is_final(error):
            raise in_clients_field(error, self._request.grammar_param)
        self._standing.mourn(self, self._request)
        self._note_prefill_failure(route.worker)
        if not isinstance(error, RequestTooLarge):
            asked_s = None if error is None else error.retry_after_s
            self._placer.registry.penalise(route.worker, FAILURE_PENALTY_S if asked_s is None else asked_s)
        if self._standing.is_in_doubt():
            assignment.port.cancel(self._request_id, progress.attempt)
            self._assignment, self.waiting = None, Waiting.FOR_ROOM
            self._placer.release(assignment)
            self._standing.refused(self, assignment.decode)
            return
        started_s = self._context.clock()
        prefill = None
        if progress.may_reroute() and self._context.budget.spend():
            prefill = self._placer.reassign_prefill(assignment, frozenset(self._excluded() | self._standing.shunned()))
        else:
            self._placer.compute_locally(assignment)
        self._route = next_route(route, prefill, assignment)
        self._trace(assignment, started_s)
        self._standing.placed(self, self._workers(assignment))
        self._context.observer.retried(RetryReason.TRANSFER_FAILED.value)
        assignment.port.reroute(self._request_id, progress.attempt, self._route)

    def _note_prefill_failure(self, key: WorkerKey) -> None:
        if (port := self._placer.registry.port(key)) is None:
            self._mourn(key)
        else:
            self._progress.excluded[key] = port
            self._standing.failed(self, key)

    def _warn(self, text: str, *values: object, level: int = logging.WARNING) -> None:
        """In the log; this may be a session's turn, whose context knows no request."""
        trace = "" if (span := self._request.span) is None else f" trace {span.trace_id}"
        logger.log(level, f"request %s%s: {text}", self._request_id, trace, *values, extra=about(self._request_id))

    def _trace(self, assignment: Assignment, started_s: float) -> None:
        choice, between_s = (self._index, self._progress.attempt), (started_s, self._context.clock())
        trace_placement(self._request, choice, assignment, self._route, between_s)

    def _finish(self, finish: ChoiceFinish) -> ChoiceDelta:
        self.done, self.waiting = True, None
        if self._assignment is not None:
            self._placer.release(self._assignment)
            self._assignment = None
        return ChoiceDelta(choice_index=self._index, finish=finish)
