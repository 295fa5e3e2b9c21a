"""The queue that clients' requests wait in before `Dispatcher` runs them: an async shell around `FairAdmission`.

A continued stream skips the queue if its client was promised that (`router.admission.continuations`).
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from msgspec import Struct

from router.admission.continuations import Continuations
from router.admission.fair_admission import FairAdmission
from router.admission.types import AdmissionEntry, AdmissionRequest
from router.types.requests import ChoiceDelta, DeltaSink, ResumePoint, RoutedRequest
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


class AdmittedRequest(Struct, kw_only=True, eq=False):
    """One admitted request, accounted until its end. An async context manager: inside, it has its turn."""

    queue: "AdmissionQueue"
    request_id: RequestId
    resume: tuple[ResumePoint, ...]
    entry: AdmissionEntry
    priority: int
    """The priority that its tenant may use, in this queue and in the workers' schedulers."""
    promised: bool
    shown: int
    """Tokens that the client of a continued stream already has and that will be generated again."""
    passed: int = 0
    """Number of those that have been generated again."""
    was_taken: bool = False
    adopted: frozenset[int] = frozenset()
    num_tokens: int = 0
    """Tokens that are not charged yet."""
    most_tokens: int = 1
    """Number of tokens that are charged at once."""

    async def __aenter__(self) -> Self:
        """Wait for its turn. Raises the error that it was refused with."""
        turns = self.queue.turns
        if (turn := turns.get(self.entry)) is not None:
            try:
                await turn
            except BaseException:
                turns.pop(self.entry, None)
                self.queue.end(self)
                raise
            finally:
                # It holds its error, the error's traceback this frame, and the frame it: see `_enter`.
                del turn
            turns.pop(self.entry, None)
        # The run counts itself at its workers before its first await.
        asyncio.get_running_loop().call_soon(self.queue.placed, self.entry)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.queue.end(self)

    def on_taken(self, adopted: frozenset[int] = frozenset()) -> None:
        """Record that a worker accepted it, or may have; `adopted`: the choices that a worker still had."""
        self.was_taken, self.adopted = True, adopted

    def on_delta(self, delta: ChoiceDelta) -> None:
        """Charge a delta to the tenant: the first one and each end at once, others in groups of tokens."""
        self.num_tokens += len(delta.tokens)
        if delta.finish is not None:
            self.queue.charge(self)
            self.queue.admission.cached(self.entry, delta.finish.cached_tokens)
        elif self.num_tokens >= self.most_tokens:
            self.queue.charge(self)

    def on_token(self, count: int = 1) -> None:
        """Charge tokens that come with nothing else."""
        self.num_tokens += count
        if self.num_tokens >= self.most_tokens:
            self.queue.charge(self)


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
        self.turns: dict[AdmissionEntry, asyncio.Future[None]] = {}
        """The turns of requests that had to wait, until they run; while it is empty, none waits."""
        self._entered: dict[RequestId, AdmittedRequest] = {}
        """Requests of multi-request calls that have not run yet."""
        self._recheck_timer: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._no_tokens_reason: Callable[[], str | None] = lambda: None
        self._on_load_before = registry.on_load
        registry.on_load = self._on_load
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

    def turn(self, request: RoutedRequest) -> AdmittedRequest:
        """Enter the queue, unless `admitted` has; the result is a context manager, in which the request has its turn.

        Raises Overloaded or Unavailable with a Retry-After, as entering the result does.
        """
        return self._entered.pop(request.request_id, None) or self._enter([request])[0]

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
                    self.turns.pop(visit.entry, None)
                    self.end(visit)

    def placed(self, entry: AdmissionEntry) -> None:
        """Count a request as its workers' from now on, and give turns to others if that makes room."""
        self.admission.placed(entry)
        if self.turns:
            self._pump()

    def charge(self, visit: AdmittedRequest) -> None:
        """Charge the tokens collected so far."""
        count, visit.num_tokens = visit.num_tokens, 0
        visit.most_tokens = _TOKENS_TOGETHER
        if count:
            entry = visit.entry
            passed = min(visit.shown, count)
            visit.shown -= passed
            visit.passed += passed
            was_silent = not entry.output_tokens
            self.admission.generated(entry, count - passed)
            if was_silent and self.turns:
                # Its prompt is computed, so there may be room for another one.
                self._pump()

    def end(self, visit: AdmittedRequest) -> None:
        """End a request, whether or not it had its turn."""
        if visit.num_tokens:
            self.charge(visit)
        if self._visits.get(visit.request_id) is visit:
            del self._visits[visit.request_id]
        if visit.promised:
            self._continuations.ended()
        if visit.resume and visit.was_taken:
            self._charge_again(visit)
        self.admission.end(visit.entry, taken=visit.was_taken)
        if self.admission.closed:
            self._ended.set()
        if self.turns:
            self._pump()

    def _enter(self, requests: Sequence[RoutedRequest]) -> list[AdmittedRequest]:
        call: list[AdmissionRequest] = []
        all_promised = True
        for request in requests:
            wanted = self._wanted(request)
            call.append(wanted)
            all_promised = all_promised and wanted.promised
        if not all_promised and (reason := self._no_tokens_reason()) is not None:
            raise Unavailable(reason, retry_after_s=_NO_TOKENS_RETRY_S)
        entered = self.admission.enter_call(call)
        if entered.evicted:
            self._refuse(entered.evicted)
        if (refusal := entered.refusal) is not None:
            try:
                raise refusal.with_traceback(None)
            finally:
                # The error's traceback holds this frame: a refused request would live until the next garbage
                # collection, which takes 15 ms for a hundred of them (docs/extend/measurements.md).
                del entered, refusal
        loop = asyncio.get_running_loop()
        visits = []
        for request, entry, wanted in zip(requests, entered.entries, call, strict=True):
            if wanted.promised:
                self._continuations.on_begin(request.request_id)
            if entry.waiting:
                self.turns[entry] = loop.create_future()
            visit = AdmittedRequest(
                queue=self,
                request_id=request.request_id,
                resume=request.resume,
                entry=entry,
                priority=entry.ticket.priority,
                promised=wanted.promised,
                shown=sum(point.num_tokens for point in request.resume) if request.resume else 0,
            )
            self._visits[request.request_id] = visit
            visits.append(visit)
        if self.turns and self._recheck_timer is None:
            self._recheck_timer = loop.call_later(_RECHECK_S, self._recheck)
        return visits

    def _wanted(self, request: RoutedRequest) -> AdmissionRequest:
        beams = request.beams
        # Sequences that it generates at the same time.
        num_beginnings = request.num_choices if beams is None else beams.num_beams
        return AdmissionRequest(
            tenant=request.tenant,
            priority=request.priority,
            num_tokens=len(request.prompt_token_ids),
            max_output_tokens=request.sampling.max_tokens * num_beginnings,
            deadline_s=request.deadline_s,
            promised=bool(request.resume) and self._continuations.is_promised(request.request_id),
            # The stream's former reader is about to be superseded.
            leaving=1 if request.request_id in self._visits else 0,
        )

    def _charge_again(self, visit: AdmittedRequest) -> None:
        """Charge again for tokens that have to be computed a second time."""
        points = visit.resume
        if len(visit.adopted) == len(points):
            self.admission.adopted(visit.entry)
            return
        shown = sum(point.num_tokens for index, point in enumerate(points) if index not in visit.adopted)
        self.admission.generated(visit.entry, min(visit.passed, shown))

    def _on_load(self, worker: WorkerSnapshot) -> None:
        self._on_load_before(worker)
        if self.turns:
            self._pump()

    def _pump(self) -> None:
        for entry in self.admission.pump():
            if (turn := self.turns.get(entry)) is not None and not turn.done():
                turn.set_result(None)

    def _recheck(self) -> None:
        self._recheck_timer = None
        self._pump()
        self._refuse(self.admission.end_hopeless())
        if self.admission.num_waiting:
            self._recheck_timer = asyncio.get_running_loop().call_later(_RECHECK_S, self._recheck)

    def _refuse(self, refused: list[tuple[AdmissionEntry, ServingError]]) -> None:
        for entry, error in refused:
            if (turn := self.turns.get(entry)) is not None and not turn.done():
                turn.set_exception(error)
