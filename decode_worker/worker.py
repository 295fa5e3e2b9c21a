"""The decode worker: accepts orders from routers, has prompts computed here or elsewhere, streams tokens back.

Life of a task: order → (reserve → hand-off → commit | queue) → engine → tokens → end. A task that has ended is removed
from the index at once; anything that still arrives for it is dropped.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Coroutine
from itertools import count
from typing import Any

from decode_worker.handoffs import HandoffReceiver
from decode_worker.orders import holder_of, request_from_pb, route_from_pb
from decode_worker.phase_times import admitted, computed_here, fetched
from decode_worker.reports import StepReports, ask_for_route, refuse, refuse_order
from decode_worker.spans import begin_span, trace_first_step, trace_own_prefill
from decode_worker.takeover import Takeovers
from decode_worker.task import DecodeTask, SentTokens, TaskPhase
from decode_worker.task_index import TaskIndex
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Request, SampledToken, TokenEvent
from engine.types.step_output import StepOutput
from engine.types.token_guide import unusable
from kv_transfer.protocol.messages import PrefillJob
from kv_transfer.session.peer import Route
from tandem.errors import DeadlineExceeded, InternalError, ServingError, Unavailable
from tandem.protocol.wire import adapter_from_pb
from tandem.telemetry.logs import about
from tandem.telemetry.tracing import NoTracer, Tracer
from tandem.v1 import session_pb2 as pb
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import BlockHash, RequestId
from tandem.values.outputs import FinishReason, PhaseTimes, PredictionUse
from tandem.values.step_sizes import PREDICTION_SOURCE
from tandem.values.worker_identity import WorkerIdentity
from worker.drain import MigrationSource
from worker.engine_host import EngineHost
from worker.kv_exchange.service import Fabric
from worker.prefix_pins import PinService
from worker.prompt_logprobs import PromptScoringOrders
from worker.session_port import SessionPort
from worker.wire import hello_to_pb

_log = logging.getLogger(__name__)


class DecodeWorker:
    """Handles sessions (worker.sessions.SessionHandler). On the event loop's thread."""

    def __init__(
        self,
        identity: WorkerIdentity,
        host: EngineHost,
        tasks: asyncio.TaskGroup,
        tracer: Tracer | None = None,
        *,
        takeover_s: float = 0.0,
    ) -> None:
        """`takeover_s`: how long a stream continues after its router has gone, for another router to take over."""
        self.identity = identity
        self.tracer = tracer or NoTracer()
        self.fabric: Fabric | None = None
        self.migration_source: MigrationSource | None = None
        self._host = host
        self._pins = PinService(host)
        self._group = tasks
        self._serial = count(1)
        self._reports = StepReports(time.monotonic, block_bytes=host.parts.layout.worker_block_bytes)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks = TaskIndex(self._idle.set)
        self._scoring = PromptScoringOrders(host, in_prefill_pool=False)
        self._takeovers = Takeovers(self._tasks, keep_s=takeover_s, cancel=self._cancel, go_on_here=self._go_on_here)
        self.handoffs = HandoffReceiver(
            host,
            self._tasks,
            self._reports,
            spawn=self._spawn,
            ask_for_route=self._ask_for_route,
            clock=time.monotonic,
        )

    def use(self, fabric: Fabric) -> None:
        """Use `fabric`: from now on prompts may be computed by prefill workers."""
        self.handoffs.hub = fabric.receiver_hub
        self.fabric = fabric

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._group.create_task(coroutine)

    # SessionHandler

    def hello(self) -> pb.WorkerHello:
        return hello_to_pb(self._host.parts, self.identity, self.fabric.transports if self.fabric else ())

    def opened(self, port: SessionPort) -> None:
        self._pins.opened(port)
        self._takeovers.router_joined(port)
        if port.wants_events:
            self._host.send_snapshot(port)

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None:
        """Handle an order about a request, a cache migration, a pin or the prefix cache."""
        if self._scoring.handle(port, message):
            return
        kind = message.WhichOneof("kind")
        if kind == "submit":
            self._submit(port, message.submit)
        elif kind == "cancel":
            task = self._tasks.of_order(port, message.cancel.request_id, message.cancel.attempt)
            if task is not None:
                self._cancel(task)
        elif kind == "take_over":
            self._takeovers.take_over(port, message.take_over)
        elif kind == "reroute":
            self._reroute(port, message.reroute)
        elif kind == "fetch_cache" and self.fabric is not None:
            self.fabric.migration_target.migrate(port, message.fetch_cache)
        elif kind == "cache_offer_ended" and self.migration_source is not None:
            self.migration_source.migration_ended(port)
        elif kind == "resync":
            self._host.send_snapshot(port)
        else:
            self._pins.order(port, message)

    def closed(self, port: SessionPort) -> None:
        """Handle a router's end: its requests continue for a while, for another router to take over."""
        self._pins.closed(port)
        self._takeovers.router_left(port)
        self._scoring.closed(port)

    async def load(self) -> pb.LoadSnapshot:
        hub = self.handoffs.hub
        if hub is not None:
            self._host.kv_bytes_per_s = hub.stats.bytes_per_s
        load = await self._host.load()
        if self.fabric is not None:
            load.transfers.CopyFrom(self.fabric.report())
        return load

    # Orders

    def _submit(self, port: SessionPort, submit: pb.Submit) -> None:
        now_s = time.monotonic()
        engine_id = RequestId(f"{next(self._serial)}:{submit.request_id}")
        try:
            if self._draining:
                raise Unavailable("this worker is draining", retry_after_s=1.0)
            request = request_from_pb(submit, engine_id, self._host.parts, now_s)
            transfer_id, route = route_from_pb(submit.prefill) if submit.HasField("prefill") else (None, None)
            task = DecodeTask(
                port=port,
                request_id=RequestId(submit.request_id),
                attempt=submit.attempt,
                request=request,
                route=route if self.handoffs.hub is not None else None,
                transfer_id=transfer_id,
                adapter=adapter_from_pb(submit.adapter) if submit.HasField("adapter") else None,
                holder=holder_of(submit),
                arrived_s=now_s,
                sent=SentTokens(submit.generated_token_ids),
                handle=submit.handle,
                tokens_per_message=max(1, submit.tokens_per_message),
                next_index=len(submit.generated_token_ids),
                span=begin_span(self.tracer, submit, now_s, num_prompt_tokens=request.num_prompt_tokens),
            )
            self._tasks.add(task)
        except ServingError as error:
            refuse_order(port, submit.request_id, submit.attempt, error)
            return
        self._idle.clear()
        # Wherever a task is removed, the end of its request is posted in the same turn, unless the engine has ended it.
        task.when_done.append(lambda: self._host.release(request))
        if task.next_index:
            details = submit.request_id, submit.attempt, task.next_index
            _log.info("request %s: attempt %d continues here after %d tokens", *details, extra=about(task.request_id))
        if request.deadline_s is not None:
            timer = asyncio.get_running_loop().call_later(max(0.0, request.deadline_s - now_s), self._time_out, task)
            task.when_done.append(timer.cancel)  # otherwise it would keep the task's tokens alive until it fires
        self._spawn(self._begin(task))

    async def _begin(self, task: DecodeTask) -> None:
        if task.is_over:
            return
        try:
            await self._host.prepare(task.request, task.adapter)
            if task.is_over:
                self._host.release(task.request)
                return
            if task.route is None:
                await self._queue(task)
            else:
                await self._hand_off(task, task.route)
        except ServingError as error:
            if not task.is_over:
                self._tasks.remove(task, error)
                refuse(task, error)

    async def _queue(self, task: DecodeTask) -> None:
        """Compute the prompt here, after fetching the part that a peer has."""
        if task.holder is not None and self.fabric is not None:
            begun_s = time.monotonic()
            gained = await self.fabric.fetcher.fetch(task.request, task.holder, task.trace)
            fetched(task, gained, time.monotonic() - begun_s)
            if task.is_over:
                return
        await self._host.call(lambda scheduler: scheduler.add(task.request))

    async def _hand_off(self, task: DecodeTask, route: Route) -> None:
        """Reserve blocks, then request the prefill. Without room the request is refused: others may have some."""
        key, hub = task.next_reservation(), self.handoffs.hub
        task.phase = TaskPhase.HANDOFF
        grant = await self._host.call(lambda scheduler: scheduler.reservations.reserve(key, task.request))
        if task.is_over or hub is None or task.transfer_id is None:
            return  # cancelled meanwhile: `abandon` was posted after the reservation
        task.held_tokens = task.found_tokens = grant.num_held_tokens
        token_ids = tuple(task.request.token_ids)
        reserved_s = time.monotonic()
        task.times = PhaseTimes(decode_queue_s=reserved_s - task.arrived_s)
        if task.span is not None:
            task.span.interval("tandem.reserve", task.arrived_s, reserved_s, **{"tandem.held_tokens": task.held_tokens})
        job = PrefillJob(
            transfer_id=task.transfer_id,
            request_id=task.engine_id,
            token_ids=token_ids,
            num_prompt_tokens=task.request.num_prompt_tokens,
            held_tokens=grant.num_held_tokens,
            sampling=task.request.params,
            hash_root=task.request.hash_root,
            choice_index=task.request.choice_index,
            priority=task.request.priority,
            timeout_s=_time_left_s(task.request),
            tail_hash=self._tail_hash(task, token_ids),
            adapter=task.adapter,
            holder=task.holder,
            trace=task.trace,
        )
        try:
            hub.start(job, route)
        except ServingError:
            self._host.post(lambda scheduler: scheduler.reservations.cancel(key))
            raise

    def _tail_hash(self, task: DecodeTask, token_ids: tuple[int, ...]) -> BlockHash | None:
        if len(token_ids) < HASH_BLOCK_TOKENS:
            return None
        chain: list[BlockHash] = []
        self._host.parts.hasher.extend(task.request.hash_root, chain, token_ids)
        return chain[-1]

    def _ask_for_route(self, task: DecodeTask, why: ServingError) -> None:
        if task.port.closed:
            self._go_on_here(task)
        else:
            ask_for_route(task, why)

    def _reroute(self, port: SessionPort, reroute: pb.Reroute) -> None:
        task = self._tasks.of_order(port, reroute.request_id, reroute.attempt)
        hub = self.handoffs.hub
        if task is None or task.phase is not TaskPhase.REROUTING or task.transfer_id is None or hub is None:
            return
        if reroute.HasField("prefill") and task.reservation is not None:
            try:
                _, route = route_from_pb(reroute.prefill)
                hub.reroute(task.transfer_id, route, holder_of(reroute))
            except ServingError as error:
                _log.info(
                    "%s: computing the prompt here: %s", task.transfer_id, error.message, extra=about(task.request_id)
                )
            else:
                task.route, task.phase = route, TaskPhase.HANDOFF
                return
        self._go_on_here(task)

    def _go_on_here(self, task: DecodeTask) -> None:
        """Compute the prompt on this worker; no further prefill worker is tried."""
        if self.handoffs.hub is not None and task.transfer_id is not None:
            self.handoffs.hub.cancel(task.transfer_id)
        task.phase = TaskPhase.ENGINE
        self._spawn(self._entered(task, self._compute_here(task)))

    def _compute_here(self, task: DecodeTask) -> Awaitable[None]:
        """Queue the request with what landed as its prefix; the rest is computed. Posted before this returns."""
        key, held_tokens = task.reservation, task.held_tokens
        if task.cached_tokens is None:
            # What landed was computed for this request, so it is not a cache hit.
            task.cached_tokens = min(task.found_tokens, task.request.num_prompt_tokens)
        first = task.first_token.token_id if task.first_token is not None else None

        def run_here(scheduler: Scheduler) -> None:
            if key is not None:
                reservations = scheduler.reservations
                reservations.commit_partial(key, held_tokens, first_token=first, writer_is_quiet=True)
                return
            if first is not None:
                task.request.token_ids.append(first)
            scheduler.add(task.request)

        return self._host.call(run_here)

    async def _entered(self, task: DecodeTask, entry: Awaitable[None]) -> None:
        """Refuse the request if the engine does not accept it."""
        try:
            await entry
        except ServingError as error:
            if not task.is_over:
                self._tasks.remove(task, error)
                refuse(task, error)

    # Ends

    def _cancel(self, task: DecodeTask) -> None:
        if task.is_over:
            return
        self._tasks.remove(task)
        self.handoffs.abandon(task)
        if task.holder is not None and self.fabric is not None:
            self.fabric.fetcher.abandon(task.engine_id)

    def _time_out(self, task: DecodeTask) -> None:
        if task.is_over:
            return
        error = DeadlineExceeded("the request's time ran out")
        self._reports.failure(task, error)
        self._reports.send()
        self._cancel(task)

    def on_output(self, output: StepOutput) -> None:
        self._scoring.on_output(output)
        now_s = time.monotonic()
        for admission in output.admissions:
            task = self._tasks.of_engine(admission.request_id)
            if task is not None:
                admitted(task, admission)
        for draft in output.drafts:
            if draft.source == PREDICTION_SOURCE and (task := self._tasks.of_engine(draft.request_id)) is not None:
                used = PredictionUse(draft.num_kept, draft.num_tokens - draft.num_kept)
                task.prediction = task.prediction.plus(used)
        for event in output.events:
            task = self._tasks.of_engine(event.request_id)
            if task is not None:
                self._on_event(task, event, now_s)
        self._reports.send()
        self._pins.lost(output.lost_pins)

    def _on_event(self, task: DecodeTask, event: TokenEvent, now_s: float) -> None:
        if task.cached_tokens is None:
            task.cached_tokens = event.num_cached_tokens
        if not task.decoding_since_s:
            computed_here(task, now_s)
            trace_own_prefill(task, now_s)
        elif task.awaits_step_since_s is not None:
            trace_first_step(task, now_s)
        reason = event.finish_reason
        if reason is FinishReason.DEADLINE:
            self._reports.failure(task, DeadlineExceeded("the request's time ran out in the queue"))
        elif reason is FinishReason.ERROR:
            self._reports.failure(task, unusable(task.request.guide))
        elif reason is FinishReason.ABORT:
            self._reports.failure(task, InternalError("the engine ended the request"))
        else:
            token: SampledToken | None = event.token
            self._reports.token(task, event.index, token, reason)
        if reason is not None:
            self._tasks.remove(task)

    async def finish(self) -> None:
        """Accept no new work, and wait for the current work."""
        self._draining = True
        await self._scoring.finish()
        await self._idle.wait()
        if self.fabric is not None:
            await self.fabric.finish()


def _time_left_s(request: Request) -> float | None:
    return None if request.deadline_s is None else max(0.0, request.deadline_s - time.monotonic())
