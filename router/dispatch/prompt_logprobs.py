"""Prompt logprobs: sends a prompt to workers to score, one after another until one has done it.

Scoring has no state worth keeping: a worker that refuses or dies is excluded, and the next one begins anew.
"""

import asyncio
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from router.dispatch.choices.context import DispatchContext
from router.placement.worker_selection import choose_scoring_worker
from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt, ScoredPromptBuilder
from router.types.requests import ChoiceDelta, ChoiceFinish, DeltaSink, RoutedRequest
from router.types.session_events import (
    AttemptRefused,
    PromptScoresPart,
    PromptScoringEvent,
    PromptScoringOrder,
    WorkerLost,
    WorkerPort,
)
from router.types.worker_view import WorkerKey
from router.workers.registry import FAILURE_PENALTY_S
from tandem.errors import (
    AdapterUnavailable,
    DeadlineExceeded,
    InternalError,
    RequestTooLarge,
    ServingError,
    Unavailable,
)
from tandem.protocol.session_versions import ADAPTERS_SINCE, POOLING_SINCE
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import RequestId
from tandem.values.outputs import FinishReason, PhaseTimes
from tandem.values.roles import WorkerRole

_MOST_LOST = 2
"""Workers that may be lost during one prompt before giving up: the prompt may be what crashes them."""
_LATEST_RETRY_S = 1.0
_Excluded = dict[WorkerKey, WorkerPort | None]
"""Workers that refused or failed, with the session in which they did."""


class PromptScorer:
    def __init__(self, context: DispatchContext) -> None:
        self._context = context

    async def score(
        self,
        request: RoutedRequest,
        ask: PromptScoringRequest,
        on_sent: Callable[[], None],
        *,
        prefer: WorkerKey | None = None,
    ) -> ScoredPrompt:
        """Score the request's prompt. Cancelling ends it on the worker; `on_sent` is called for each try.

        `prefer`: the worker that has everything but the prompt's end cached.

        Raises Overloaded, Unavailable, RequestTooLarge, DeadlineExceeded, InternalError, or a worker's refusal.
        """
        left_s = None if request.deadline_s is None else max(0.0, request.deadline_s - self._context.clock())
        try:
            async with asyncio.timeout(left_s):
                return await self._until_scored(request, ask, on_sent, prefer)
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed") from None

    def pool_of(self, scored: ScoredPrompt) -> WorkerRole | None:
        """Return the role of the worker that scored the prompt; None: it has left."""
        found = None if scored.worker is None else self._context.placer.registry.of_process(scored.worker.incarnation)
        return None if found is None else found.info.role

    async def _until_scored(
        self, request: RoutedRequest, ask: PromptScoringRequest, on_sent: Callable[[], None], prefer: WorkerKey | None
    ) -> ScoredPrompt:
        excluded: _Excluded = {}
        error: ServingError | None = None
        lost = attempt = 0
        num_tokens = len(request.prompt_token_ids)
        while lost < _MOST_LOST:
            key = self._choose(request, excluded, prefer)
            if key is None:
                await self._wait_for_worker(request, excluded, error)
                continue
            attempt += 1
            num_owed = min(num_tokens, HASH_BLOCK_TOKENS) if key == prefer else num_tokens
            order = _order(request, ask, attempt, self._context.clock())
            port = self._context.placer.registry.port(key)
            found = await self._ask(order, _PendingScores(ask, num_tokens, key), num_owed, on_sent)
            if isinstance(found, ScoredPrompt):
                return found
            excluded[key] = port
            if isinstance(found, WorkerLost):
                lost += 1
                continue
            error = found
            if not error.retryable and not isinstance(error, InternalError):
                raise error
        raise Unavailable("two workers were lost while scoring this prompt", retry_after_s=_LATEST_RETRY_S)

    def _choose(self, request: RoutedRequest, excluded: _Excluded, prefer: WorkerKey | None = None) -> WorkerKey | None:
        context = self._context
        workers = context.placer.registry.snapshots()
        if request.only_worker is not None:
            workers = [worker for worker in workers if worker.info.key == request.only_worker]
        avoided = context.health.breakers.closed_to(context.clock())
        num_tokens = len(request.prompt_token_ids)
        # A worker that lost its session and is back in another one, as the same process, may be tried again.
        still = {key for key, port in excluded.items() if context.placer.registry.port(key) is port}
        ask = request.scoring
        if ask is not None and not ask.is_plain:
            workers = [worker for worker in workers if worker.info.protocol_version >= POOLING_SINCE]
        adapter_ms: Mapping[WorkerKey, float] = {}
        if request.adapter is not None:
            workers = [worker for worker in workers if worker.info.protocol_version >= ADAPTERS_SINCE]
            adapter_ms = context.placer.adapter_ms(request.adapter)
        found = choose_scoring_worker(
            workers, num_tokens, excluded=still, avoided=avoided, prefer=prefer, adapter_ms=adapter_ms
        )
        if found is None and workers and num_tokens > max(worker.info.pool_tokens for worker in workers):
            raise RequestTooLarge(
                f"prompt: {num_tokens} tokens are more than any worker's KV pool holds", param="prompt"
            )
        return None if found is None else found.info.key

    async def _wait_for_worker(self, request: RoutedRequest, excluded: _Excluded, error: ServingError | None) -> None:
        """Wait for a worker that has not been tried. Raises the last one's error, or Unavailable after a while."""
        registry, settings = self._context.placer.registry, self._context.settings
        most_s = settings.rejoin_s
        if error is not None:
            if request.only_worker is not None or registry.live_decoders():
                raise error
            # The workers that were here are leaving.
            most_s = min(settings.max_queue_s, registry.worker_due_s())
            if not most_s:
                raise error
        changed = asyncio.Event()
        registry.watch(changed.set)
        try:
            async with asyncio.timeout(most_s):
                while self._choose(request, excluded) is None:
                    changed.clear()
                    await changed.wait()
        except TimeoutError:
            bound = f" within {most_s:g} s (router.rejoin_s)" if error is None else ""
            message = f"no worker could score the prompt{bound}"
            raise Unavailable(message, retry_after_s=settings.retry_after_s) from None
        finally:
            registry.unwatch(changed.set)

    async def _ask(
        self, order: PromptScoringOrder, coming: "_PendingScores", num_owed: int, on_sent: Callable[[], None]
    ) -> ScoredPrompt | ServingError | WorkerLost:
        context, registry, key = self._context, self._context.placer.registry, coming.worker
        port = registry.port(key)
        if port is None:
            return Unavailable("the worker has left", retry_after_s=context.settings.retry_after_s)
        booked = registry.assign(key, num_owed)
        breakers = context.health.breakers
        breakers.began(key, context.clock())
        try:
            port.score_prompt(order, coming.on_event)
            if order.adapter is not None:
                context.placer.adapters.sent(order.adapter, (key,), context.clock())
            on_sent()
            found = await coming.outcome
        except Unavailable as refusal:
            breakers.released(key)
            return refusal
        except asyncio.CancelledError:
            breakers.released(key)
            raise
        finally:
            port.cancel(order.request_id, order.attempt)
            booked.end()
        if isinstance(found, ScoredPrompt):
            breakers.succeeded(key, context.clock())
        elif isinstance(found, InternalError | WorkerLost):
            breakers.failed(key, context.clock())
            registry.penalise(key, FAILURE_PENALTY_S)
        else:
            breakers.released(key)
            if isinstance(found, AdapterUnavailable) and order.adapter is not None:
                context.placer.adapters.refused(order.adapter, key, context.clock())
        return found


class ScoredPromptSink(DeltaSink):
    """A `DeltaSink` for what is generated after its prompt was scored: the scoring computed it for this very request.

    So it counts as no cache hit, but its time and tokens count.
    """

    def __init__(self, sink: DeltaSink, scored: ScoredPrompt) -> None:
        self._sink = sink
        self._times = scored.times
        self._num_computed = scored.num_computed

    async def ready(self) -> None:
        await self._sink.ready()

    def on_delta(self, delta: ChoiceDelta) -> bool:
        if (finish := delta.finish) is not None:
            # What the router counts as waiting for a worker began when the request arrived, before the scoring.
            waited_s = max(0.0, finish.times.router_queue_s - self._times.total_s)
            # Computed once for all choices.
            num_computed = self._num_computed if delta.choice_index == 0 else 0
            finish = replace(
                finish,
                cached_tokens=0,
                times=self._times.plus(finish.times._replace(router_queue_s=waited_s)),
                computed_tokens=finish.computed_tokens + num_computed,
                needed_tokens=finish.needed_tokens + num_computed,
            )
            delta = replace(delta, finish=finish)
        return self._sink.on_delta(delta)


def finish_scored_choices(request: RoutedRequest, scored: ScoredPrompt, sink: DeltaSink, now_s: float) -> None:
    """Finish all choices of a request that generates nothing; the first accounts for the computed tokens."""
    times = scored.times
    if request.arrived_s is not None:
        times = times._replace(router_queue_s=max(0.0, now_s - request.arrived_s - times.total_s))
    finish = ChoiceFinish(
        reason=FinishReason.LENGTH,
        cached_tokens=times.cached.total,
        times=times,
        computed_tokens=scored.num_computed,
        needed_tokens=scored.num_computed,
    )
    for index in range(request.num_choices):
        sink.on_delta(ChoiceDelta(index, finish=finish))
        finish = replace(finish, times=PhaseTimes(), computed_tokens=0, needed_tokens=0)


class _PendingScores:
    """One scoring order at one worker, assembled as its parts arrive."""

    def __init__(self, ask: PromptScoringRequest, num_tokens: int, worker: WorkerKey) -> None:
        self.worker = worker
        self.outcome: asyncio.Future[ScoredPrompt | ServingError | WorkerLost] = (
            asyncio.get_running_loop().create_future()
        )
        self._parts = ScoredPromptBuilder(ask, num_tokens)

    def on_event(self, event: PromptScoringEvent) -> None:
        """Handle an event of the worker or of its session."""
        if self.outcome.done():
            return
        match event:
            case PromptScoresPart():
                self._parts.add(
                    logprobs=event.logprobs,
                    ranks=event.ranks,
                    top_ids=event.top_ids,
                    top_logprobs=event.top_logprobs,
                    mean=event.mean,
                )
                if event.times is not None:
                    whole = self._parts.whole(event.times, self.worker)
                    wrong = InternalError("a worker's scores do not match the request")
                    self.outcome.set_result(wrong if whole is None else whole)
            case AttemptRefused():
                self.outcome.set_result(event.error)
            case WorkerLost():
                self.outcome.set_result(event)


def _order(request: RoutedRequest, ask: PromptScoringRequest, attempt: int, now_s: float) -> PromptScoringOrder:
    return PromptScoringOrder(
        request_id=RequestId(f"{request.request_id}/prompt"),
        attempt=attempt,
        prompt_token_ids=request.prompt_token_ids,
        num_top=None if ask.continues else ask.num_top,
        num_next=ask.num_top if ask.continues else None,
        hash_root=request.hash_root,
        priority=request.priority,
        timeout_s=None if request.deadline_s is None else max(0.0, request.deadline_s - now_s),
        pooling=() if ask.is_plain else ask.pooling,
        num_skipped=ask.num_skipped,
        through_head=ask.through_head,
        label_token_ids=ask.label_token_ids,
        adapter=request.adapter,
    )
