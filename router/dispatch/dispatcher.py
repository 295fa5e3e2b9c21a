"""Runs requests on workers: admitted, placed, submitted, streamed, continued elsewhere, ended.

`Dispatcher` is the servers' `Generator`. It makes a request wait for its turn; a `RequestRun` does the rest.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from random import Random

from msgspec.structs import replace

from router.admission.types import RefusedMemory
from router.dispatch.adapter_use import AdapterUse
from router.dispatch.admission_queue import AdmissionQueue, AdmittedRequest, CountedSink
from router.dispatch.beam_run import BeamRun
from router.dispatch.choices.choice_run import MAX_RESUMPTIONS
from router.dispatch.choices.context import DispatchContext, DispatchSettings
from router.dispatch.choices.hedging import Hedging
from router.dispatch.choices.observer import DispatchObserver, SilentObserver
from router.dispatch.choices.retry import RetryBudget
from router.dispatch.choices.waiting_choices import WaitingChoices
from router.dispatch.prompt_logprobs import PromptScorer, ScoredPromptSink, finish_scored_choices
from router.dispatch.request_run import RequestRun
from router.placement.placer import Placer
from router.types.requests import ChoiceDelta, DeltaSink, RoutedRequest, TokenAccount
from router.workers.health import WorkerHealth
from tandem.errors import InvalidRequest, InvariantError
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import RequestId


class Dispatcher:
    """Streams the answers to requests; see `router.types.requests.Generator`."""

    def __init__(
        self,
        *,
        placer: Placer,
        hasher: BlockHasher,
        settings: DispatchSettings,
        clock: Callable[[], float],
        rng: Random,
        observer: DispatchObserver | None = None,
    ) -> None:
        hedging = settings.hedging
        self.hedging = None if hedging is None else Hedging(quantile=hedging.quantile, budget=hedging.budget)
        self.health = WorkerHealth(clock=clock)
        self.placer = placer
        self._room = room = WaitingChoices()
        self._registry = registry = placer.registry
        registry.on_load = room.on_load
        registry.watch(self._workers_changed)
        self._context = DispatchContext(
            placer=placer,
            hasher=hasher,
            budget=RetryBudget(),
            observer=observer or SilentObserver(),
            clock=clock,
            rng=rng,
            room=room,
            settings=settings,
            health=self.health,
            hedging=self.hedging,
        )
        # Canaries are not clients' requests, so they are not counted.
        self._unseen = dataclasses.replace(self._context, observer=SilentObserver())
        self._scorer = PromptScorer(self._context)
        self._runs: dict[RequestId, RequestRun] = {}
        self.queue: AdmissionQueue | None = None
        """The queue in which requests wait for their turn; without one they run at once."""
        self.on_answer: Callable[[RoutedRequest, Sequence[int]], None] | None = None
        """Called with the tokens of the first choice when a client's request has ended well, unless it was continued
        from another connection."""
        self.adapters = AdapterUse()
        self.num_inflight = 0
        """Requests that have begun and not ended: zero when a drain is complete."""
        self._ended = asyncio.Event()

    @property
    def num_waiting_for_room(self) -> int:
        """Accepted choices that every worker was too full for."""
        return len(self._room)

    def memory_waited_for(self) -> RefusedMemory:
        """Return what these choices wait for; there is at least one."""
        return self._room.memory()

    async def drain(self, *, most_s: float) -> None:
        """Refuse new requests from now on, on all servers; wait until accepted ones have ended, or for `most_s`."""
        ends_s = self._context.clock() + most_s
        if self.queue is not None:
            await self.queue.drain(most_s=most_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, ends_s - self._context.clock())):
                while self.num_inflight:
                    self._ended.clear()
                    await self._ended.wait()

    def admitted(self, requests: Sequence[RoutedRequest]) -> contextlib.AbstractContextManager[None]:
        """Enter the queue with all requests of one call; see `router.types.requests.Generator`."""
        return contextlib.nullcontext() if self.queue is None else self.queue.admitted(requests)

    async def generate(self, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """Stream all choices, interleaved. Closing the iterator early cancels the request on every worker.

        Raises Overloaded, Unavailable, RequestTooLarge, DeadlineExceeded or InternalError, or the worker's refusal.
        Supports neither prompt scoring nor beam search.
        """
        if request.scoring is not None or request.beams is not None:
            raise InvariantError(f"request {request.request_id}: only `run` can score prompts")
        async with self._turn(request) as visit:
            request = _as_admitted(request, visit)
            self._count_in(request)
            try:
                run, former = self._register(request, visit)
                try:
                    self._start(run, former)
                    while not run.done:
                        for delta in await run.step():
                            yield delta
                    self._note_answer(run)
                finally:
                    self._end(run, visit)
            finally:
                self._count_out()

    async def run(self, request: RoutedRequest, sink: DeltaSink) -> None:
        """Send all choices to `sink`, interleaved. Cancelling it cancels the request on every worker.

        Raises as `generate`, and what the sink raises.
        """
        async with self._turn(request) as visit:
            request = _as_admitted(request, visit)
            self._count_in(request)
            try:
                if request.scoring is None and request.beams is None:
                    await self._follow(request, sink, visit, visit)
                else:
                    await self._run_scored(request, sink, visit)
            finally:
                self._count_out()

    async def _run_scored(self, request: RoutedRequest, sink: DeltaSink, visit: AdmittedRequest | None) -> None:
        """Run a request whose prompt workers score, before the answer or instead of it."""
        on_sent: Callable[[], None] = _uncounted
        if visit is not None:
            sink, on_sent = CountedSink(sink, visit.on_delta), visit.on_taken
        if (ask := request.scoring) is not None:
            scored = await self._scorer.score(request, ask, on_sent)
            sink.on_delta(ChoiceDelta(0, scored=scored))
            if ask.only:
                finish_scored_choices(request, scored, sink, self._context.clock())
                return
            sink = ScoredPromptSink(sink, scored)
        if request.beams is not None:
            await BeamRun(self._scorer, request, request.beams, self._context.clock).search(sink, on_sent)
            return
        await self._follow(request, sink, visit, None)

    async def _follow(
        self, request: RoutedRequest, sink: DeltaSink, visit: AdmittedRequest | None, account: TokenAccount | None
    ) -> None:
        """Run the request into the sink. `account`: None where the sink counts what its client gets."""
        run, former = self._register(request, account)
        try:
            self._start(run, former)
            await run.follow(sink)
            self._note_answer(run)
        finally:
            self._end(run, visit)

    def _turn(self, request: RoutedRequest) -> contextlib.AbstractAsyncContextManager[AdmittedRequest | None]:
        """Return the context in which the request has its turn. Probes skip the queue."""
        if self.queue is None or request.only_worker is not None:
            turn: contextlib.AbstractAsyncContextManager[AdmittedRequest | None] = contextlib.nullcontext()
        else:
            turn = self.queue.turn(request)
        return turn if request.adapter is None else self.adapters.counted(request.adapter.name, turn)

    def _count_in(self, request: RoutedRequest) -> None:
        """Count the request in flight. Raises Unavailable when it has crashed workers before."""
        self.health.check(request)
        self.num_inflight += 1

    def _count_out(self) -> None:
        self.num_inflight -= 1
        if not self.num_inflight:
            self._ended.set()

    def _workers_changed(self) -> None:
        self.health.keep(self._registry.keys())

    def _register(self, request: RoutedRequest, account: TokenAccount | None) -> tuple[RequestRun, RequestRun | None]:
        """Make the request's run; return it with the stream's former one, whose place it takes.

        There is one where a client reconnects before this router has noticed that it disconnected. Raises
        InvalidRequest when that has happened too often.
        """
        former = self._runs.get(request.request_id)
        if former is not None and not request.resume:
            raise InvariantError(f"request id {request.request_id} is in use")
        if former is not None and former.resumptions >= request.resumptions:
            # The same id again, from a client whose former connection is half open: attempt numbers continue from
            # there.
            if former.resumptions >= MAX_RESUMPTIONS:
                raise InvalidRequest(f"this stream has been continued {MAX_RESUMPTIONS} times")
            request = replace(request, resumptions=former.resumptions + 1)
        context = self._context if request.only_worker is None else self._unseen
        context.budget.earn()
        run = self._runs[request.request_id] = RequestRun(request, context, account)
        return run, former

    def _end(self, run: RequestRun, visit: AdmittedRequest | None) -> None:
        if self._runs.get(run.request_id) is run:
            del self._runs[run.request_id]
        run.close()
        if visit is not None and run.was_taken:
            visit.on_taken(run.adopted)

    def _note_answer(self, run: RequestRun) -> None:
        if self.on_answer is not None and run.is_whole_answer:
            self.on_answer(run.request, run.first_answer)

    @staticmethod
    def _start(run: RequestRun, former: RequestRun | None) -> None:
        """Start `run` and hand it the stream of `former`; if it cannot start, end `former` too."""
        try:
            run.start()
        except BaseException:
            if former is not None:
                former.supersede(is_over=True)
            raise
        if former is not None:
            former.supersede()

    def finish_choice(self, request_id: RequestId, choice_index: int) -> None:
        """Stop generating one choice early; its ChoiceFinish still follows. No-op once the request has ended."""
        if (run := self._runs.get(request_id)) is not None:
            run.stop_choice(choice_index)


def _as_admitted(request: RoutedRequest, visit: AdmittedRequest | None) -> RoutedRequest:
    """Return the request with the priority that its tenant may use, and where its prompt is computed."""
    if visit is None or not (visit.entry.is_local or visit.priority != request.priority):
        return request
    return replace(request, is_local=visit.entry.is_local, priority=visit.priority)


def _uncounted() -> None:
    """Charge no tenant: probes are not counted."""
