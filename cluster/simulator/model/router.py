"""The router of a simulation: real admission, queue, placement, registry, prefix map, waiting room and retry policy.

The dispatch between them is written anew here, without sessions and text: `router.dispatch.choices.choice_run` handles
single tokens, of which a simulation has too many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from cluster.simulator.inputs.trace import TraceRequest
from cluster.simulator.model.admission import SimAdmission
from cluster.simulator.model.event_queue import EventQueue
from cluster.simulator.model.finished import FinishedRequests
from cluster.simulator.model.request import SimRequest
from router.admission.fair_admission import FairAdmission
from router.admission.rate_limits import RateLimiter
from router.admission.types import AdmissionPolicy
from router.dispatch.choices.retry import RetryBudget, RetryReason, is_full
from router.dispatch.choices.waiting_choices import WaitingChoices
from router.placement.placer import Placer
from router.placement.worker_selection import NoDecodeWorker
from router.types.worker_view import WorkerSnapshot
from router.workers.registry import FAILURE_PENALTY_S
from tandem.config.admission import LimitsConfig
from tandem.errors import RequestTooLarge, ServingError


@dataclass(slots=True, kw_only=True)
class Outcomes:
    """All requests of a simulation by result. Changed by its router alone."""

    finished: FinishedRequests
    num_rejected: int = 0
    """Requests rejected by admission, at once or after waiting."""
    num_failed: int = 0
    """Requests that were admitted and ended with an error."""
    num_retries: int = 0

    @property
    def num_ended(self) -> int:
        """Number of requests that have ended, with any result."""
        return len(self.finished) + self.num_rejected + self.num_failed


Submit = Callable[[SimRequest], None]
"""Function that sends an attempt to the workers of its assignment."""


class SimRouter:
    """Router on the virtual clock."""

    def __init__(
        self,
        events: EventQueue,
        placer: Placer,
        policy: AdmissionPolicy,
        rng: Random,
        block_tokens: int,
        submit: Submit,
    ) -> None:
        self.outcomes = Outcomes(finished=FinishedRequests())
        self.room = WaitingChoices()
        self.live: dict[str, SimRequest] = {}
        """Requests in progress by the key of their present attempt."""
        self.on_end: Callable[[], None] = _nobody
        """Called when a request has ended, with any result."""
        self._events = events
        self._placer = placer
        self._num_running = 0
        self._rng = rng
        self._budget = RetryBudget()
        self._block_tokens = block_tokens
        self._send = submit
        fair = FairAdmission(
            view=placer.registry.view,
            num_running=lambda: self._num_running,
            num_refused=lambda: len(self.room),
            refused=self.room.memory,
            limiter=RateLimiter(LimitsConfig(), clock=events.clock),
            policy=policy,
            clock=events.clock,
        )
        self.admission = SimAdmission(events, fair, run=self._run, refused=self._refused)
        placer.registry.on_load = self._on_load_report
        placer.registry.watch(self.admission.pump)

    def arrive(self, number: int, wanted: TraceRequest) -> None:
        self.admission.enter(SimRequest(number, wanted, self._events.now))

    def _run(self, request: SimRequest) -> None:
        """Run an admitted request. It always has a slot: admission bounds the number of requests."""
        request.is_running = True
        self._num_running += 1
        self._budget.earn()
        self.submit(request)

    def _refused(self, _request: SimRequest) -> None:
        self.outcomes.num_rejected += 1
        self.on_end()

    def _on_load_report(self, worker: WorkerSnapshot) -> None:
        self.room.on_load(worker)
        self.admission.pump()

    def submit(self, request: SimRequest) -> None:
        """Start the next attempt, or wait for room."""
        progress = request.progress
        try:
            assignment = self._placer.assign(
                num_tokens=progress.prompt_length + request.num_output_tokens,
                names=request.names(self._block_tokens),
                excluded=frozenset(progress.excluded),
                pool_tokens_above=progress.pool_tokens_above,
                is_local=request.is_local,
            )
        except NoDecodeWorker:
            self._wait(request)
            return
        except RequestTooLarge as error:
            self.fail(request, error)
            return
        request.begin_attempt()
        request.assignment = assignment
        self.live[request.key] = request
        self._send(request)

    def prompt_computed(self, request: SimRequest) -> None:
        """Handle the first token of the attempt."""
        if request.assignment is not None:
            self._placer.prompt_computed(request.assignment)
            self._placer.registry.answered(request.assignment.decode)
        request.progress.excluded.clear()
        request.progress.full.clear()
        if request.first_token_s is None:
            request.first_token_s = self._events.now
        self.admission.answered(request)

    def finish(self, request: SimRequest) -> None:
        """Handle the last token of the request."""
        self.release(request)
        self.outcomes.finished.add(request, self._events.now)
        self._leave(request, request.wanted.num_output_tokens)

    def fail(self, request: SimRequest, _error: ServingError) -> None:
        """End the request with an error."""
        self.release(request)
        self.outcomes.num_failed += 1
        self._leave(request, request.num_output_tokens)

    def _leave(self, request: SimRequest, num_tokens: int) -> None:
        self._num_running -= request.is_running
        request.is_running = False
        self.admission.end(request, num_tokens=num_tokens)
        self.on_end()

    def release(self, request: SimRequest) -> None:
        """End the attempt: any later event of it is stale."""
        self.live.pop(request.key, None)
        request.engine = None
        if request.assignment is not None:
            self._placer.release(request.assignment)
            request.assignment = None

    def refused(self, request: SimRequest, error: ServingError) -> None:
        """Handle a decode worker's rejection: it has no room now, or will never have."""
        assignment, progress = request.assignment, request.progress
        if assignment is None:
            return
        self.release(request)
        progress.excluded[assignment.decode] = assignment.port
        self.outcomes.num_retries += 1
        if isinstance(error, RequestTooLarge):
            progress.pool_tokens_above = assignment.placement.decode.info.pool_tokens
            self.submit(request)
            return
        pause_s = FAILURE_PENALTY_S if error.retry_after_s is None else error.retry_after_s
        self._placer.registry.penalise(assignment.decode, pause_s)
        if is_full(error):
            progress.record_full_worker(assignment.decode, error)
            if self._budget.spend():
                self.submit(request)
            else:
                self._wait(request)
        elif progress.record_failure(RetryReason.REFUSED, error, self._budget):
            self.submit(request)
        else:
            self.fail(request, error)

    def lost(self, request: SimRequest) -> None:
        """Handle the loss of the decode worker: another one continues after the tokens that the client has."""
        self.release(request)
        self.outcomes.num_retries += 1
        self.submit(request)

    def _wait(self, request: SimRequest) -> None:
        """Wait until a load report shows room, or some time has passed."""
        if request.place is None:
            request.place = self.room.new_place(0)
        place, num_tokens = request.place, request.wanted.num_prompt_tokens + request.num_output_tokens + 1
        woken = False

        def come_back() -> None:
            nonlocal woken
            if not woken:
                woken = True
                self.room.leave(place)
                request.progress.try_full_again()
                self.submit(request)

        self.room.enter(place, num_tokens, partial(self._events.after, 0.0, come_back))
        self._events.after(request.progress.wait_for_room_s(self._rng), come_back)


def _nobody() -> None:
    """Ignore the end of a request, by default."""
