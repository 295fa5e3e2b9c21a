"""The queue before dispatch: each request waits for its turn here. Asyncio around `FairAdmission`, which decides.

Canaries do not come this way, and a stream that is continued passes if that was promised
(`router.admission.continuations`).
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Protocol

from router.admission.continuations import Continuations
from router.admission.fair_admission import FairAdmission
from router.admission.types import AdmissionEntry, AdmissionRequest
from router.dispatch.dispatcher import OnTaken
from router.types.requests import ChoiceDelta, DeltaSink, RoutedRequest
from router.types.worker_view import WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.errors import ServingError, Unavailable
from tandem.values.ids import RequestId

_LOOK_S = 0.1
"""Between two looks at who waits in vain."""
_NO_TOKENS_RETRY_S = 5.0
"""After a refusal because no worker gives tokens: they are asked again every few seconds."""
_DELTAS_TOGETHER = 16
"""Of one request, that are charged to its tenant at once."""


class RequestRunner(Protocol):
    """What runs requests: `router.dispatch.dispatcher.Dispatcher`."""

    def generate(self, request: RoutedRequest, taken: OnTaken) -> AsyncGenerator[ChoiceDelta, None]: ...

    async def run(self, request: RoutedRequest, reader: DeltaSink, taken: OnTaken) -> None: ...

    def finish_choice(self, request_id: RequestId, choice_index: int) -> None: ...

    async def drain(self, *, most_s: float) -> None: ...


class AdmissionQueue:
    """A `router.types.requests.Generator` around another."""

    def __init__(
        self, inner: RequestRunner, admission: FairAdmission, registry: WorkerRegistry, continuations: Continuations
    ) -> None:
        self._inner = inner
        self.admission = admission
        self._continuations = continuations
        self._visits: dict[RequestId, _AdmittedRequest] = {}
        """The latest of each stream."""
        self._turns: dict[AdmissionEntry, asyncio.Future[None]] = {}
        self._entered: dict[RequestId, _AdmittedRequest] = {}
        """Of calls with several requests: those that have still to be run."""
        self._look: asyncio.TimerHandle | None = None
        self._ended = asyncio.Event()
        self._no_tokens_reason: Callable[[], str | None] = lambda: None
        registry.on_load = _after(registry.on_load, self._pump)
        registry.watch(self._pump)

    def refuse_while(self, no_tokens_reason: Callable[[], str | None]) -> None:
        """Refuse new requests at once while there is a reason; streams that are continued pass."""
        self._no_tokens_reason = no_tokens_reason

    async def drain(self, *, most_s: float) -> None:
        """Refuse new requests; those that wait here still have their turn, within the bound."""
        self.admission.closed = True
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + most_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.admission.num_inflight:
                    self._ended.clear()
                    await self._ended.wait()
        self.admission.ended = True
        await self._inner.drain(most_s=max(0.0, ends_s - loop.time()))

    async def generate(self, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """See `router.types.requests.Generator`. Raises Overloaded or Unavailable, with a time to come back, as
        well."""
        async with (
            self._inside(request) as visit,
            aclosing(self._inner.generate(visit.request, visit.on_taken)) as deltas,
        ):
            async for delta in deltas:
                self._note(visit, (delta,))
                yield delta

    async def run(self, request: RoutedRequest, reader: DeltaSink) -> None:
        """See `router.types.requests.Generator`. Raises as `generate`."""
        async with self._inside(request) as visit:
            counting = _CountingSink(reader, partial(self._note, visit))
            try:
                await self._inner.run(visit.request, counting, visit.on_taken)
            finally:
                counting.flush()

    @contextlib.asynccontextmanager
    async def _inside(self, request: RoutedRequest) -> AsyncIterator["_AdmittedRequest"]:
        """From its turn to its end."""
        visit = self._entered.pop(request.request_id, None) or self._enter([request])[0]
        try:
            await self._turn(visit.entry)
            if visit.entry.is_local:
                visit.request = replace(visit.request, is_local=True)
            # What runs it writes it into the workers' books before it waits for the first time.
            asyncio.get_running_loop().call_soon(self._placed, visit.entry)
            yield visit
        finally:
            self._end(visit)

    @contextlib.contextmanager
    def admitted(self, requests: Sequence[RoutedRequest]) -> Iterator[None]:
        visits = self._enter(requests)
        self._entered.update((visit.request.request_id, visit) for visit in visits)
        try:
            yield
        finally:
            for visit in visits:
                if self._entered.get(visit.request.request_id) is visit:
                    del self._entered[visit.request.request_id]
                    self._turns.pop(visit.entry, None)
                    self._end(visit)

    def finish_choice(self, request_id: RequestId, choice_index: int) -> None:
        self._inner.finish_choice(request_id, choice_index)

    def _enter(self, requests: Sequence[RoutedRequest]) -> "list[_AdmittedRequest]":
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
            visit = self._visits[request.request_id] = _AdmittedRequest(request, entry, promised=passes)
            visits.append(visit)
        if self._turns and self._look is None:
            self._look = loop.call_later(_LOOK_S, self._look_again)
        return visits

    def _wanted(self, request: RoutedRequest, promised: bool) -> AdmissionRequest:
        return AdmissionRequest(
            tenant=request.tenant,
            priority=request.priority,
            num_tokens=len(request.prompt_token_ids),
            max_output_tokens=request.sampling.max_tokens * _num_beginnings(request),
            deadline_s=request.deadline_s,
            promised=promised,
            # Its former reader is about to be told that the stream is another's now.
            leaving=int(request.request_id in self._visits),
        )

    def _end(self, visit: "_AdmittedRequest") -> None:
        if self._visits.get(visit.request.request_id) is visit:
            del self._visits[visit.request.request_id]
        if visit.promised:
            self._continuations.ended()
        if visit.request.resume and visit.taken:
            self._charge_again(visit)
        self.admission.end(visit.entry, taken=visit.taken)
        self._ended.set()
        self._pump()

    def _charge_again(self, visit: "_AdmittedRequest") -> None:
        """What is computed for a second time counts for a second time."""
        points = visit.request.resume
        if len(visit.adopted) == len(points):
            self.admission.adopted(visit.entry)
            return
        shown = sum(point.num_tokens for index, point in enumerate(points) if index not in visit.adopted)
        self.admission.generated(visit.entry, min(visit.passed, shown))

    async def _turn(self, entry: AdmissionEntry) -> None:
        """Return when it has had its turn. Raises what it was refused with."""
        if (turn := self._turns.get(entry)) is not None:
            try:
                await turn
            finally:
                self._turns.pop(entry, None)

    def _note(self, visit: "_AdmittedRequest", deltas: Sequence[ChoiceDelta]) -> None:
        entry = visit.entry
        if count := sum(len(delta.tokens) for delta in deltas):
            passed = min(visit.shown, count)
            visit.shown -= passed
            visit.passed += passed
            was_silent = not entry.output_tokens
            self.admission.generated(entry, count - passed)
            if was_silent:
                # Its prompt is computed: there may be room for another.
                self._pump()
        for delta in deltas:
            if delta.finish is not None:
                self.admission.cached(entry, delta.finish.cached_tokens)

    def _placed(self, entry: AdmissionEntry) -> None:
        self.admission.placed(entry)
        self._pump()

    def _pump(self) -> None:
        if not self.admission.num_waiting:
            return
        for entry in self.admission.pump():
            if (turn := self._turns.get(entry)) is not None and not turn.done():
                turn.set_result(None)

    def _look_again(self) -> None:
        self._look = None
        self._pump()
        self._refuse(self.admission.hopeless())
        if self.admission.num_waiting:
            self._look = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _refuse(self, refused: list[tuple[AdmissionEntry, ServingError]]) -> None:
        for entry, error in refused:
            if (turn := self._turns.get(entry)) is not None and not turn.done():
                turn.set_exception(error)


def _num_beginnings(request: RoutedRequest) -> int:
    """That are generated at once."""
    return request.num_choices if request.beams is None else request.beams.num_beams


class _AdmittedRequest:
    """One request from its turn to its end."""

    __slots__ = ("adopted", "entry", "passed", "promised", "request", "shown", "taken")

    def __init__(self, request: RoutedRequest, entry: AdmissionEntry, *, promised: bool) -> None:
        self.entry = entry
        self.promised = promised
        priority = entry.ticket.priority
        # What its tenant may have binds the workers' schedulers as well as the line here.
        self.request = request if priority == request.priority else replace(request, priority=priority)
        self.shown = sum(point.num_tokens for point in request.resume)
        """Tokens still to come that the client has."""
        self.passed = 0
        """Those that came."""
        self.taken = False
        self.adopted: frozenset[int] = frozenset()

    def on_taken(self, adopted: frozenset[int]) -> None:
        """A worker took it, or may have; these choices of it one still had."""
        self.taken, self.adopted = True, adopted


class _CountingSink:
    """A `DeltaSink` in front of another: what passes is counted, the first delta and each end at once."""

    def __init__(self, reader: DeltaSink, count: Callable[[Sequence[ChoiceDelta]], None]) -> None:
        self._on_delta = reader.on_delta
        self._count = count
        self._uncounted: list[ChoiceDelta] = []
        self._most = 1
        self.ready = reader.ready

    def on_delta(self, delta: ChoiceDelta) -> bool:
        self._uncounted.append(delta)
        if delta.finish is not None or len(self._uncounted) >= self._most:
            self.flush()
        return self._on_delta(delta)

    def flush(self) -> None:
        """Count what has passed."""
        self._count(self._uncounted)
        self._uncounted = []
        self._most = _DELTAS_TOGETHER


def _after(first: Callable[[WorkerSnapshot], None], then: Callable[[], None]) -> Callable[[WorkerSnapshot], None]:
    def both(worker: WorkerSnapshot) -> None:
        first(worker)
        then()

    return both
