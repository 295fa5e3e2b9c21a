"""The queue that clients' requests wait in before `Dispatcher` runs them: an async shell around `FairAdmission`.

A continued stream skips the queue if its client was promised that (`router.admission.continuations`).
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from router.admission.continuations import Continuations
from router.admission.fair_admission import FairAdmission
from router.admission.types import AdmissionEntry, AdmissionRequest
from router.types.requests import ChoiceDelta, ChoiceFinish, DeltaSink, RoutedRequest
from router.types.worker_view import WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.errors import ServingError, Unavailable
from tandem.values.ids import RequestId

_RECHECK_S = 0.1
"""Period of checks for requests that can no longer be served in time."""
_NO_TOKENS_RETRY_S = 5.0
"""Retry-After when no worker produces tokens: workers are probed every few seconds."""
_TOKENS_TOGETHER = 16
"""Tokens of one request that are charged to its tenant together."""


class AdmittedRequest:
    """One admitted request, accounted from its turn to its end."""

    __slots__ = (
        "_count",
        "_most",
        "_num_uncounted",
        "adopted",
        "entry",
        "passed",
        "promised",
        "request_id",
        "resume",
        "shown",
        "was_taken",
    )

    def __init__(
        self,
        request: RoutedRequest,
        entry: AdmissionEntry,
        count: "Callable[[AdmittedRequest, int, ChoiceFinish | None], None]",
        *,
        promised: bool,
    ) -> None:
        self.request_id = request.request_id
        self.resume = request.resume
        self.entry = entry
        self.promised = promised
        self.shown = sum(point.num_tokens for point in request.resume)
        """Tokens that the client of a continued stream already has and that will be generated again."""
        self.passed = 0
        """Number of those that have been generated again."""
        self.was_taken = False
        self.adopted: frozenset[int] = frozenset()
        self._count = count
        self._num_uncounted = 0
        self._most = 1

    @property
    def priority(self) -> int:
        """The priority that its tenant may use, in this queue and in the workers' schedulers."""
        return self.entry.ticket.priority

    def on_taken(self, adopted: frozenset[int] = frozenset()) -> None:
        """Record that a worker accepted it, or may have; `adopted`: the choices that a worker still had."""
        self.was_taken, self.adopted = True, adopted

    def on_delta(self, delta: ChoiceDelta) -> None:
        """Charge a delta to the tenant: the first one and each end at once, others in groups of tokens."""
        self._num_uncounted += len(delta.tokens)
        if delta.finish is not None or self._num_uncounted >= self._most:
            self.flush(delta.finish)

    def on_token(self) -> None:
        """Charge a token that comes with nothing else."""
        self._num_uncounted += 1
        if self._num_uncounted >= self._most:
            self.flush()

    def flush(self, finish: ChoiceFinish | None = None) -> None:
        """Charge what was collected so far; `finish`: the end of a choice that came with it."""
        num_tokens, self._num_uncounted = self._num_uncounted, 0
        self._most = _TOKENS_TOGETHER
        self._count(self, num_tokens, finish)


class CountedSink(DeltaSink):
    """Counts deltas on their way to another sink, for sources other than `RequestRun`, which counts its own."""

    def __init__(self, sink: DeltaSink, count: Callable[[ChoiceDelta], None]) -> None:
        self._sink = sink
        self._count = count

    def on_delta(self, delta: ChoiceDelta) -> bool:
        self._count(delta)
        return self._sink.on_delta(delta)

    async def ready(self) -> None:
        await self._sink.ready()


class AdmissionQueue:
    """Gives requests their turns, and charges tenants for what they generate."""

    def __init__(self, admission: FairAdmission, registry: WorkerRegistry, continuations: Continuations) -> None:
        self.admission = admission
        self._continuations = continuations
        self._visits: dict[RequestId, AdmittedRequest] = {}
        """The latest request of each stream."""
        self._turns: dict[AdmissionEntry, asyncio.Future[None]] = {}
        self._entered: dict[RequestId, AdmittedRequest] = {}
        """Requests of multi-request calls that have not run yet."""
        self._recheck_timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._no_tokens_reason: Callable[[], str | None] = lambda: None
        registry.on_load = _after(registry.on_load, self._pump)
        registry.watch(self._pump)

    def refuse_while(self, no_tokens_reason: Callable[[], str | None]) -> None:
        """Refuse new requests while there is a reason; continued streams pass."""
        self._no_tokens_reason = no_tokens_reason

    async def drain(self, *, most_s: float) -> None:
        """Refuse new requests, and wait up to `most_s` for those that are queued or running."""
        self.admission.closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.admission.num_inflight:
                    self._ended.clear()
                    await self._ended.wait()
        self.admission.ended = True

    @contextlib.asynccontextmanager
    async def turn(self, request: RoutedRequest) -> AsyncIterator[AdmittedRequest]:
        """Wait for the request's turn; end it on exit. Raises Overloaded or Unavailable with a Retry-After."""
        visit = self._entered.pop(request.request_id, None) or self._enter([request])[0]
        try:
            await self._wait_for_turn(visit.entry)
            # The run counts itself at its workers before its first await.
            asyncio.get_running_loop().call_soon(self._placed, visit.entry)
            yield visit
        finally:
            visit.flush()
            self._end(visit)

    @contextlib.contextmanager
    def admitted(self, requests: Sequence[RoutedRequest]) -> Iterator[None]:
        """Enter the queue with all requests of one call; see `router.types.requests.Generator`."""
        visits = self._enter(requests)
        self._entered.update((visit.request_id, visit) for visit in visits)
        try:
            yield
        finally:
            for visit in visits:
                if self._entered.get(visit.request_id) is visit:
                    del self._entered[visit.request_id]
                    self._turns.pop(visit.entry, None)
                    self._end(visit)

    def _enter(self, requests: Sequence[RoutedRequest]) -> list[AdmittedRequest]:
        promised = [bool(one.resume) and self._continuations.is_promised(one.request_id) for one in requests]
        if not all(promised) and (reason := self._no_tokens_reason()) is not None:
            raise Unavailable(reason, retry_after_s=_NO_TOKENS_RETRY_S)
        entered = self.admission.enter_call([self._wanted(*each) for each in zip(requests, promised, strict=True)])
        self._refuse(entered.evicted)
        if entered.refusal is not None:
            raise entered.refusal
        loop = asyncio.get_running_loop()
        visits = []
        for request, entry, passes in zip(requests, entered.entries, promised, strict=True):
            if passes:
                self._continuations.begun(request.request_id)
            if entry.waiting:
                self._turns[entry] = loop.create_future()
            visit = AdmittedRequest(request, entry, self._note, promised=passes)
            self._visits[request.request_id] = visit
            visits.append(visit)
        if self._turns and self._recheck_timer is None:
            self._recheck_timer = loop.call_later(_RECHECK_S, self._recheck)
        return visits

    def _wanted(self, request: RoutedRequest, promised: bool) -> AdmissionRequest:
        return AdmissionRequest(
            tenant=request.tenant,
            priority=request.priority,
            num_tokens=len(request.prompt_token_ids),
            max_output_tokens=request.sampling.max_tokens * _num_beginnings(request),
            deadline_s=request.deadline_s,
            promised=promised,
            # The stream's former reader is about to be superseded.
            leaving=int(request.request_id in self._visits),
        )

    def _end(self, visit: AdmittedRequest) -> None:
        if self._visits.get(visit.request_id) is visit:
            del self._visits[visit.request_id]
        if visit.promised:
            self._continuations.ended()
        if visit.resume and visit.was_taken:
            self._charge_again(visit)
        self.admission.end(visit.entry, taken=visit.was_taken)
        self._ended.set()
        self._pump()

    def _charge_again(self, visit: AdmittedRequest) -> None:
        """Charge again for tokens that have to be computed a second time."""
        points = visit.resume
        if len(visit.adopted) == len(points):
            self.admission.adopted(visit.entry)
            return
        shown = sum(point.num_tokens for index, point in enumerate(points) if index not in visit.adopted)
        self.admission.generated(visit.entry, min(visit.passed, shown))

    async def _wait_for_turn(self, entry: AdmissionEntry) -> None:
        """Wait for the entry's turn. Raises the error that it was refused with."""
        if (turn := self._turns.get(entry)) is not None:
            try:
                await turn
            finally:
                self._turns.pop(entry, None)

    def _note(self, visit: AdmittedRequest, num_tokens: int, finish: ChoiceFinish | None) -> None:
        entry = visit.entry
        if num_tokens:
            passed = min(visit.shown, num_tokens)
            visit.shown -= passed
            visit.passed += passed
            was_silent = not entry.output_tokens
            self.admission.generated(entry, num_tokens - passed)
            if was_silent:
                # Its prompt is computed, so there may be room for another one.
                self._pump()
        if finish is not None:
            self.admission.cached(entry, finish.cached_tokens)

    def _placed(self, entry: AdmissionEntry) -> None:
        self.admission.placed(entry)
        self._pump()

    def _pump(self) -> None:
        if not self.admission.num_waiting:
            return
        for entry in self.admission.pump():
            if (turn := self._turns.get(entry)) is not None and not turn.done():
                turn.set_result(None)

    def _recheck(self) -> None:
        self._recheck_timer = None
        self._pump()
        self._refuse(self.admission.end_hopeless())
        if self.admission.num_waiting:
            self._recheck_timer = asyncio.get_running_loop().call_later(_RECHECK_S, self._recheck)

    def _refuse(self, refused: list[tuple[AdmissionEntry, ServingError]]) -> None:
        for entry, error in refused:
            if (turn := self._turns.get(entry)) is not None and not turn.done():
                turn.set_exception(error)


def _num_beginnings(request: RoutedRequest) -> int:
    """Sequences that the request generates at the same time."""
    return request.num_choices if request.beams is None else request.beams.num_beams


def _after(first: Callable[[WorkerSnapshot], None], then: Callable[[], None]) -> Callable[[WorkerSnapshot], None]:
    def both(worker: WorkerSnapshot) -> None:
        first(worker)
        then()

    return both
