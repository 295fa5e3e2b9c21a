"""The router's half of a request's life from its turn on: placed, submitted, streamed, continued elsewhere, ended.

`Dispatcher` counts what runs; a `RequestRun` does the rest. Who runs is decided before (`router.admission`).
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from functools import partial
from random import Random

from router.dispatch.beam_run import BeamRun
from router.dispatch.choices.context import DispatchContext, DispatchSettings
from router.dispatch.choices.hedging import Hedging
from router.dispatch.choices.observer import DispatchObserver, SilentObserver
from router.dispatch.choices.retry import RetryBudget
from router.dispatch.choices.waiting_choices import WaitingChoices
from router.dispatch.prompt_scoring import PromptScorer, ScoredPromptSink, finish_scored_choices
from router.dispatch.request_run import RequestRun
from router.placement.placer import Placer
from router.types.requests import ChoiceDelta, DeltaSink, RoutedRequest
from router.workers.health import WorkerHealth
from tandem.errors import InvariantError
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import RequestId

OnTaken = Callable[[frozenset[int]], None]
"""Called at the end of a request if a worker took anything of it, or may have; with the choices of a continued stream
that a worker still had."""


def _unheard(_adopted: frozenset[int]) -> None:
    """For callers that keep no accounts."""


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
        asked = settings.hedging
        self.hedging = None if asked is None else Hedging(quantile=asked.quantile, budget=asked.budget)
        self.health = WorkerHealth(clock=clock)
        self.placer = placer
        self._room = room = WaitingChoices()
        self._registry = registry = placer.registry
        registry.on_load = room.look
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
        # Canaries are no requests of clients, so nothing of them is counted.
        self._unseen = replace(self._context, observer=SilentObserver())
        self._reads = PromptScorer(self._context)
        self._runs: dict[RequestId, RequestRun] = {}
        self._ended = asyncio.Event()
        self.num_inflight = 0
        """Requests begun and not yet ended: zero when a drain is complete."""

    @property
    def num_waiting_for_room(self) -> int:
        """Accepted choices that every worker was too full for."""
        return len(self._room)

    async def drain(self, *, most_s: float) -> None:
        """Wait until all requests have ended, or for `most_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                while self.num_inflight:
                    self._ended.clear()
                    await self._ended.wait()

    async def generate(self, request: RoutedRequest, taken: OnTaken = _unheard) -> AsyncGenerator[ChoiceDelta, None]:
        """Stream all choices, interleaved. Closing the iterator early cancels the request on every worker.

        Raises Unavailable, RequestTooLarge, DeadlineExceeded or InternalError, or what a worker found wrong
        with the request. Reads no prompts and searches with no beams.
        """
        if request.reads is not None or request.beams is not None:
            raise InvariantError(f"request {request.request_id}: only `run` has prompts read")
        with self._running(request, taken) as run:
            while not run.done:
                for delta in await run.step():
                    yield delta

    async def run(self, request: RoutedRequest, reader: DeltaSink, taken: OnTaken = _unheard) -> None:
        """Give `reader` all choices, interleaved. Cancelling it cancels the request on every worker.

        Raises as `generate`, and what the reader raises.
        """
        if request.reads is None and request.beams is None:
            with self._running(request, taken) as run:
                await run.follow(reader)
            return
        sent = partial(taken, frozenset())
        with self._counted(request):
            if (ask := request.reads) is not None:
                reading = await self._reads.read(request, ask, sent)
                reader.on_delta(ChoiceDelta(0, reading=reading))
                if ask.only:
                    finish_scored_choices(request, reading, reader, self._context.clock())
                    return
                reader = ScoredPromptSink(reader, reading)
            if request.beams is not None:
                await BeamRun(self._reads, request, request.beams, self._context.clock).tell(reader, sent)
                return
            with self._under_way(request, taken) as run:
                await run.follow(reader)

    @contextlib.contextmanager
    def _running(self, request: RoutedRequest, taken: OnTaken) -> Iterator[RequestRun]:
        with self._counted(request), self._under_way(request, taken) as run:
            yield run

    @contextlib.contextmanager
    def _counted(self, request: RoutedRequest) -> Iterator[None]:
        """In flight while inside."""
        self.health.check(request)
        self.num_inflight += 1
        try:
            yield
        finally:
            self.num_inflight -= 1
            self._ended.set()

    @contextlib.contextmanager
    def _under_way(self, request: RoutedRequest, taken: OnTaken) -> Iterator[RequestRun]:
        former = self._former(request)
        if former is not None and former.resumptions >= request.resumptions:
            # The same id again, from a client whose former connection is half open: attempts are numbered on.
            request = replace(request, resumptions=former.resumptions + 1)
        context = self._context if request.only_worker is None else self._unseen
        context.budget.earn()
        run = self._runs[request.request_id] = RequestRun(request, context)
        try:
            self._start(run, former)
            yield run
        finally:
            if self._runs.get(request.request_id) is run:
                del self._runs[request.request_id]
            run.close()
            if run.was_taken:
                taken(run.adopted)

    def _workers_changed(self) -> None:
        self.health.keep({worker.info.key for worker in self._registry.snapshots()})

    def _former(self, request: RoutedRequest) -> RequestRun | None:
        """A client that continues its stream here may come before this router has seen it leave."""
        former = self._runs.get(request.request_id)
        if former is not None and not request.resume:
            raise InvariantError(f"request id {request.request_id} is in use")
        return former

    @staticmethod
    def _start(run: RequestRun, former: RequestRun | None) -> None:
        """Whoever had the stream has it until somebody else does; if nobody can, nobody generates it any more."""
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
