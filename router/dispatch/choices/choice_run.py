"""Runs one choice of a request: feeds its worker's events to `ChoiceProgress` and sends orders to workers."""

import logging
from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from router.dispatch.choices.context import DispatchContext, NewReader, Waiting
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
from tandem.errors import AdapterUnavailable, InternalError, RequestTooLarge, ServingError, Unavailable
from tandem.telemetry.logs import about
from tandem.values.ids import BlockHash, Incarnation, RequestId
from tandem.values.outputs import FinishReason

logger = logging.getLogger(__name__)

_ATTEMPTS_BITS = 16
"""Low bits of an attempt number, which count within one reader; the higher bits tell workers a stream's readers
apart."""
MAX_RESUMPTIONS = (1 << 32 - _ATTEMPTS_BITS) - 1
"""Attempt numbers are unsigned numbers of 32 bits."""


class ChoiceRun:
    """Drives one choice to its end, on as many workers as that takes."""

    def __init__(
        self,
        request: RoutedRequest,
        health: ChoiceHealthReporter,
        prompt: "array[int]",
        names: list[BlockHash],
        context: DispatchContext,
        new_reader: NewReader,
    ) -> None:
        """`prompt`: the request's token ids; `names`: the hashes of their blocks."""
        self.done = False
        self.waiting: Waiting | None = None
        self.failure: ServingError | None = None
        """The error that ends the request once the client has the deltas that came before it."""
        self._health = health
        self._index, self._request = health.index, request
        self._request_id = RequestId(f"{request.request_id}-{self._index}")
        self._prompt = prompt
        self._prompt_names = names
        self._context = context
        self._placer = context.placer
        self._new_reader = new_reader
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
        """The current assignment until its first event arrives, then None."""
        self._worker = Incarnation(0)
        self._route: PrefillRoute | None = None
        self._adopting = self._proven = False
        """State of the running attempt: it adopts a stream that its worker still has; a token has arrived."""

    def submit(self) -> None:
        """Start the next attempt on the best worker whose session accepts it.

        If there is none, the choice is `waiting` afterwards. Raises the error to return to the client.
        """
        progress = self._progress
        self._adopt()
        while self._assignment is None:
            if self._health.must_wait(self._request):
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
            if self._request.span is not None:
                self._trace(assignment, started_s)
            try:
                assignment.port.submit(self._order(number, assignment), self._new_reader(self._index, number))
            except Unavailable as error:
                self._note_failure(assignment, error)
                if not progress.record_failure(RetryReason.REFUSED, error, self._context.budget):
                    raise self.final_error() from error
                self._context.observer.retried(RetryReason.REFUSED.value)
                continue
            except BaseException:
                self._placer.release(assignment)
                raise
            self._assignment = self._awaited = assignment
            self.waiting, self._proven = None, False
            self._health.placed(self, self._workers(assignment))
            if self._request.only_worker is None:
                self._placer.record(assignment, self._request_id, self._request.tenant, self._request.pins)
            self._context.observer.placed(assignment.placement.reason.value)

    def _choose(self) -> Assignment:
        """Choose the best workers for the next attempt. Raises NoDecodeWorker, or RequestTooLarge for every one of
        them."""
        excluded, avoided = self._excluded(), self._health.avoided()
        try:
            return self._assign(excluded | avoided)
        except NoDecodeWorker:
            if not avoided:
                raise
            # A worker that may fail is better than none.
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
                only=request.only_worker,
                pool_tokens_above=progress.pool_tokens_above,
                is_local=request.is_local and not progress.token_ids,
                adapter=request.adapter,
            )
        except RequestTooLarge as computed:
            # The worker that refused the request for its size gave the more precise reason.
            refused = progress.last_error
            raise refused if isinstance(refused, RequestTooLarge) else computed from None

    def _to_wait_for(self, waiting: Waiting | None) -> Waiting | None:
        """Return what to wait for while no worker can take the choice; None when nothing is expected to change that.

        `waiting`: what the choice has waited for until now.
        """
        full, live = self._progress.full, self._placer.registry.live_decoders()
        if live & full:
            return Waiting.FOR_ROOM
        # The workers it waited for have left: treat that like any other loss.
        if waiting is not None:
            return Waiting.FOR_WORKER
        # The live workers have failed it, and another would hardly do better. Full workers that are not live are
        # draining.
        if live and not full and self._progress.last_error is not None:
            return None
        if self._request.only_worker is None and self._placer.registry.worker_due_s() > 0.0:
            return Waiting.FOR_WORKER
        return None

    def _adopt(self) -> None:
        """Adopt a continued stream from the worker that ran it last, if that worker still has it."""
        point, self._resume = self._resume, None
        if point is None:
            return
        num_tokens = self._progress.prompt_length + point.num_tokens
        assignment = self._placer.adopt(point.worker, num_tokens=num_tokens, names=self._prompt_names)
        if assignment is None:
            return
        number = self._progress.begin_attempt()
        reader = self._new_reader(self._index, number)
        try:
            assignment.port.adopt(self._request_id, number, num_shown=point.num_tokens, reader=reader)
        except Unavailable:
            self._progress.record_refusal()
            self._placer.release(assignment)
            return
        except BaseException:
            self._placer.release(assignment)
            raise
        self._assignment = self._awaited = assignment
        self._adopting = True
        self._context.observer.placed(assignment.placement.reason.value)

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens that the client has received."""
        return self._progress.token_ids

    @property
    def worker(self) -> WorkerKey | None:
        """The worker that is decoding the choice now."""
        return None if self._assignment is None else self._assignment.decode

    @property
    def was_taken(self) -> bool:
        """Whether a worker accepted the choice, or may have."""
        return self._progress.was_taken

    def runs(self, attempt: int) -> bool:
        """Whether `attempt` is the one under way."""
        return self._assignment is not None and attempt == self._progress.attempt

    def submit_hedge(self, other: "ChoiceRun", *, apart: int) -> None:
        """Like `submit`, but on another worker than that of `other`, with attempt numbers offset by `apart` from
        its."""
        self._progress.attempt = other._progress.attempt + apart
        if (assignment := other._assignment) is not None:
            self._progress.excluded[assignment.decode] = assignment.port
        self.submit()

    def detach(self) -> None:
        """Stop following the attempt, which another run has begun to continue: cancel it unless that has adopted it."""
        self.waiting = None
        self._health.left(self)
        if (assignment := self._assignment) is not None:
            self._assignment = None
            # The session knows no such attempt any more where the other run's is at the same worker.
            assignment.port.cancel(self._request_id, self._progress.attempt)
            self._placer.release(assignment)

    def report_worker_lost(self) -> None:
        """Record the loss of its worker while the choice's other run continues. Raises what `on_event` then raises."""
        if self._assignment is not None:
            self._health.lost(self, self._assignment.decode, self._request)

    def on_event(self, attempt: int, event: AttemptEvent) -> Sequence[ChoiceDelta]:
        """Handle an event and return deltas for the client; ignores earlier attempts. Raises the error to return to the
        client."""
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
                self._report_lost(assignment.decode)
                return self._retry(assignment, RetryReason.WORKER_LOST, Unavailable("the worker was lost"))
            case TransferFailed():
                self._reroute(assignment, event)
        return []

    def abandon(self) -> None:
        """Cancel the attempt that runs for this choice, if any."""
        self.waiting = None
        assignment = self._assignment
        taken_back = () if assignment is None or self._proven else self._workers(assignment)
        self._health.left(self, taken_back, was_taken=self._progress.was_taken)
        if assignment is not None:
            self._assignment = None
            assignment.port.cancel(self._request_id, self._progress.attempt)
            self._placer.release(assignment)

    def finish_early(self, reason: FinishReason) -> ChoiceDelta:
        """End the choice by the router's own decision; return the last delta."""
        return self._finish(self._progress.finish_early(reason))

    def final_error(self) -> ServingError:
        """Return the error for the client when no attempt is left."""
        error = final_error(self._progress.last_error, retry_after_s=self._context.settings.retry_after_s)
        return in_clients_field(error, self._request.grammar_param)

    def accept_token(self, attempt: int, index: int, token_id: int) -> bool:
        """Accept a token that follows those of the running attempt and needs nothing else; return whether it does.

        Where it does not, it has to go through `on_tokens`.
        """
        if not self.expects(attempt, index):
            return False
        self._progress.token_ids.append(token_id)
        return True

    def expects(self, attempt: int, index: int) -> bool:
        """Whether a token at this position of the running attempt's output is next, and needs nothing else."""
        progress = self._progress
        if not self._proven or self._assignment is None or attempt != progress.attempt:
            return False
        # With excluded workers it is progress, after which they may be tried again.
        return index == len(progress.token_ids) and not progress.excluded

    def on_written(self, token_ids: Sequence[int]) -> None:
        """Record tokens that the session has written to the client itself, as `accept_token` would have."""
        self._progress.token_ids += token_ids

    def on_tokens(self, attempt: int, arrived: TokensArrived) -> Sequence[ChoiceDelta]:
        """Handle the most frequent event, as `on_event` does."""
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
            self._health.answered(self)
        finished = arrived.finished
        deltas: tuple[ChoiceDelta, ...] = ()
        if tokens:
            cached = None if (started := arrived.started) is None else started.cached_tokens
            deltas = (ChoiceDelta(self._index, tokens, None, self._worker, None, cached),)
        if finished is None:
            return deltas
        reason = finished.reason
        if finished.failure is not None or reason is FinishReason.ABORT or reason is FinishReason.ERROR:
            error = finished.failure or Unavailable("the worker gave up on the request")
            try:
                return (*deltas, *self._retry(assignment, RetryReason.WORKER_FAULT, error))
            except ServingError as final:
                # These tokens are counted as sent, so the client must receive them before the error.
                self.failure = final
                return deltas
        return (replace(self._finish(self._progress.finish(finished)), tokens=tokens, worker=self._worker),)

    def _begun(self, assignment: Assignment, arrived: TokensArrived) -> None:
        """Handle the first event of the running attempt."""
        self._health.was_adopted |= self._adopting
        self._awaited, self._adopting = None, False
        self._progress.record_prefilled_by(self._placer.prompt_computed(assignment))
        if arrived.started is not None:
            self._placer.found_cached(assignment, arrived.started.cached_tokens)
        self._worker = assignment.decode.incarnation

    def _retry(self, assignment: Assignment, reason: RetryReason, error: ServingError) -> list[ChoiceDelta]:
        """Handle an attempt that ended before its choice did: continue elsewhere, or raise the final error."""
        self._note_failure(assignment, error)
        if self._progress.is_complete:
            return [self.finish_early(FinishReason.LENGTH)]
        is_last = isinstance(error, AdapterUnavailable) and self._lacks_adapter_everywhere()
        if not self._progress.record_failure(reason, error, self._context.budget, is_last=is_last):
            raise self.final_error()
        self._context.observer.retried(reason.value)
        self.waiting = Waiting.FOR_WORKER if reason is RetryReason.WORKER_LOST else None
        self.submit()
        return []

    def _on_refusal(self, assignment: Assignment, error: ServingError) -> list[ChoiceDelta]:
        """Handle a refusal. A full worker costs no attempt: try another if the retry budget allows, else wait for
        room."""
        if self._adopting:
            # The worker no longer has the stream, which is no failure: generate the answer again, from the same seed.
            self._adopting, self._assignment = False, None
            self._progress.record_refusal()
            self._placer.release(assignment)
            self.submit()
            return []
        if not is_full(error):
            return self._retry(assignment, RetryReason.REFUSED, error)
        self._note_failure(assignment, error)
        self._progress.record_full_worker(assignment.decode, error)
        self._context.observer.retried(RetryReason.REFUSED.value)
        if self._context.budget.spend():
            self.submit()
        else:
            self.waiting = Waiting.FOR_ROOM
        return []

    def wait_for_room_s(self) -> float:
        """Seconds to wait before `retry_full_workers`, unless room appears earlier."""
        return self._progress.wait_for_room_s(self._context.rng)

    def retry_full_workers(self) -> None:
        """Try the workers that were full again. Raises as `submit`."""
        if self.waiting is Waiting.FOR_ROOM:
            self._progress.try_full_again()
            self.submit()

    @property
    def num_tokens(self) -> int:
        """Minimum number of tokens whose KV a worker must have room for."""
        return self._progress.prompt_length + len(self._progress.token_ids) + 1

    def _workers(self, assignment: Assignment) -> tuple[WorkerKey, ...]:
        """Return the workers that compute the attempt, which it could crash."""
        return (assignment.decode,) if self._route is None else (assignment.decode, self._route.worker)

    def _report_lost(self, key: WorkerKey) -> None:
        """Report a lost worker. Raises Unavailable when the request is judged to have crashed it."""
        if not self._progress.is_complete:
            self._health.lost(self, key, self._request)

    def _note_failure(self, assignment: Assignment, error: ServingError) -> None:
        self._assignment, self._adopting = None, False
        self._placer.release(assignment)
        self._progress.excluded[assignment.decode] = assignment.port
        health, is_blameless = self._health, is_full(error) or is_final(error)
        is_blameless |= isinstance(error, (RequestTooLarge, AdapterUnavailable))
        at_fault = not is_blameless and self._placer.registry.port(assignment.decode) is assignment.port
        (health.failed if at_fault else health.refused)(self, assignment.decode)
        if isinstance(error, RequestTooLarge):
            self._progress.pool_tokens_above = assignment.placement.decode.info.pool_tokens
        elif isinstance(error, AdapterUnavailable):
            self._note_adapter_refused(assignment.decode)
        elif error.retryable or isinstance(error, InternalError):
            pause_s = FAILURE_PENALTY_S if error.retry_after_s is None else error.retry_after_s
            self._placer.registry.penalise(assignment.decode, pause_s)

    def _note_adapter_refused(self, worker: WorkerKey) -> None:
        """Leave out a worker that lacks the adapter's files, and all that did lately: a retry would be wasted there."""
        if (adapter := self._request.adapter) is None:
            return
        holders, now_s, registry = self._placer.adapters, self._context.clock(), self._placer.registry
        holders.refused(adapter, worker, now_s)
        for key in holders.refused_by(adapter, now_s):
            if (port := registry.port(key)) is not None:
                self._progress.excluded.setdefault(key, port)

    def _lacks_adapter_everywhere(self) -> bool:
        """Whether no live worker is left that may have the adapter's files, be it full."""
        return self._placer.registry.live_decoders() <= self._excluded() - self._progress.full

    def _order(self, attempt: int, assignment: Assignment) -> SubmitOrder:
        request, route = self._request, self._route
        left_s = None if request.deadline_s is None else max(0.0, request.deadline_s - self._context.clock())
        return SubmitOrder(
            request_id=self._request_id,
            attempt=attempt,
            choice_index=self._index,
            prompt_token_ids=self._prompt,
            generated_token_ids=tuple(self._progress.token_ids),
            sampling=request.sampling,
            hash_root=request.hash_root,
            priority=request.priority,
            timeout_s=left_s,
            prefill=route,
            holder=assignment.holder if route is None else None,
            tokens_per_message=0 if request.reads_along else UNREAD_TOKENS_PER_MESSAGE,
            trace=None if request.span is None else request.span.context,
            prediction=request.prediction,
            adapter=request.adapter,
        )

    def _reroute(self, assignment: Assignment, failed: TransferFailed) -> None:
        route, progress = self._route, self._progress
        if route is None:
            # Adopted while its prompt was being computed.
            assignment.port.reroute(self._request_id, progress.attempt, None)
            return
        if failed.transfer_id != route.transfer_id:
            return
        self._warn("hand-off from %s failed: %s", route.worker.worker_id, failed.reason)
        error = failed.error
        if error is not None and is_final(error):
            raise in_clients_field(error, self._request.grammar_param)
        self._health.recheck_failed_workers(self, self._request)
        self._note_prefill_failure(route.worker, error)
        if not isinstance(error, (RequestTooLarge, AdapterUnavailable)):
            pause_s = None if error is None else error.retry_after_s
            self._placer.registry.penalise(route.worker, FAILURE_PENALTY_S if pause_s is None else pause_s)
        if self._health.is_in_doubt():
            assignment.port.cancel(self._request_id, progress.attempt)
            self._assignment, self.waiting = None, Waiting.FOR_ROOM
            self._placer.release(assignment)
            self._health.refused(self, assignment.decode)
            return
        started_s = self._context.clock()
        prefill = None
        if progress.try_reroute(self._context.budget):
            prefill = self._placer.reassign_prefill(assignment, frozenset(self._excluded() | self._health.avoided()))
        else:
            self._placer.compute_locally(assignment)
        self._route = next_route(route, prefill, assignment)
        self._trace(assignment, started_s)
        self._health.placed(self, self._workers(assignment))
        self._context.observer.retried(RetryReason.TRANSFER_FAILED.value)
        assignment.port.reroute(self._request_id, progress.attempt, self._route)

    def _note_prefill_failure(self, key: WorkerKey, error: ServingError | None) -> None:
        if (port := self._placer.registry.port(key)) is None:
            self._report_lost(key)
            return
        self._progress.excluded[key] = port
        if isinstance(error, AdapterUnavailable):
            self._note_adapter_refused(key)
            self._health.refused(self, key)
        else:
            self._health.failed(self, key)

    def _warn(self, text: str, *values: object, level: int = logging.WARNING) -> None:
        """Log with the request's id: the caller may be a session, whose logging context has none."""
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
