"""The workers of a simulation: orders to them, and their events: tokens, KV events, preemptions, loads, losses."""

from collections.abc import Callable
from functools import partial

from cluster.simulator.model.event_queue import EventQueue
from cluster.simulator.model.gap_histogram import GapHistogram
from cluster.simulator.model.handoffs import Handoffs, release_blocks
from cluster.simulator.model.request import SimRequest
from cluster.simulator.model.router import SimRouter
from cluster.simulator.model.settings import Network
from cluster.simulator.model.worker import SimWorker, Steps
from engine.scheduler.scheduler import Scheduler
from engine.types.kv_events import Cleared, KVEventBatch, Stored
from engine.types.request import RequestState, TokenEvent
from engine.types.step_output import AdmittedSequence, StepOutput
from router.types.worker_view import PrefixChange, WorkerKey, WorkerLoad
from router.workers.registry import WorkerRegistry
from tandem.errors import ServingError
from tandem.values.ids import RequestId
from tandem.values.roles import WorkerRole


class SimWorkers:
    """All live workers of a simulation. Receives their steps (StepListener)."""

    def __init__(self, events: EventQueue, registry: WorkerRegistry, network: Network, *, has_decode: bool) -> None:
        """Without `has_decode`, a request ends with its first token, wherever that was computed."""
        self.live: dict[WorkerKey, SimWorker] = {}
        self.all: list[SimWorker] = []
        """All workers, including those that are gone."""
        self.handoffs = Handoffs(events, network, self.live)
        self.gaps = GapHistogram()
        self.num_preemptions = 0
        self._router: SimRouter | None = None
        self._events = events
        self._registry = registry
        self._network = network
        self._has_decode = has_decode

    def use(self, router: SimRouter) -> None:
        """Set the router that receives events from now on."""
        self._router = router

    @property
    def router(self) -> SimRouter:
        """Router that receives all events."""
        if self._router is None:
            raise RuntimeError("the workers have no router yet")
        return self._router

    # Orders

    def submit(self, request: SimRequest) -> None:
        """Carry out an assignment."""
        self._events.after(self._network.hop_s, partial(self._take, request, request.key))

    def _take(self, request: SimRequest, key: RequestId) -> None:
        assignment = request.assignment
        if request.key != key or assignment is None:
            return
        prefill = assignment.placement.prefill
        if not self._has_decode and prefill is not None:
            self.handoffs.call(prefill.info.key, partial(self._compute, request, key))
        elif prefill is None:
            self.handoffs.call(assignment.decode, partial(self._run, request, key))
        else:
            self.handoffs.call(assignment.decode, partial(self._reserve, request, key, prefill.info.key))

    def _run(self, request: SimRequest, key: RequestId, worker: SimWorker, scheduler: Scheduler) -> None:
        """Let the decode worker compute the prompt itself."""
        if request.key != key or request.assignment is None:
            return
        engine = request.engine_request(self._events.now, worker.info.layout.block_size, prefill_only=False)
        try:
            scheduler.add(engine)
        except ServingError as error:
            self._refuse(request, key, error)
        else:
            request.engine, request.is_fresh = engine, True

    def _compute(self, request: SimRequest, key: RequestId, worker: SimWorker, scheduler: Scheduler) -> None:
        """Send a prompt to a prefill worker."""
        if request.key != key or request.assignment is None:
            return
        engine = request.engine_request(self._events.now, worker.info.layout.block_size, prefill_only=True)
        scheduler.add(engine)
        scheduler.pin_blocks(key)

    def _refuse(self, request: SimRequest, key: RequestId, error: ServingError) -> None:
        self._notify_router(request, key, partial(self.router.refused, request, error))

    def _notify_router(self, request: SimRequest, key: RequestId, event: Callable[[], None]) -> None:
        def deliver() -> None:
            if request.key == key and request.assignment is not None:
                event()

        self._events.after(self._network.hop_s, deliver)

    def _reserve(
        self, request: SimRequest, key: RequestId, prefill: WorkerKey, worker: SimWorker, scheduler: Scheduler
    ) -> None:
        """Reserve a request on the decode worker whose prompt a prefill worker is to compute."""
        if request.key != key or request.assignment is None:
            return
        try:
            self.handoffs.reserve(request, prefill, worker, scheduler)
        except ServingError as error:
            self._refuse(request, key, error)
            return
        compute = partial(self._compute, request, key)
        self._events.after(self._network.hop_s, partial(self.handoffs.call, prefill, compute))

    # News

    def stepped(self, worker: SimWorker, output: StepOutput, steps: Steps) -> None:
        if output.kv_events.events:
            self._publish(worker, output.kv_events)
        for admission in output.admissions:
            self._admitted(admission)
        if steps.num_rows:
            self._count_gaps(worker, steps)
        for event in output.events:
            self._token(worker, event)
        for progress in output.progress:
            self.handoffs.progressed(progress)
        self.num_preemptions += len(output.preemptions)
        for preempted in output.preemptions:
            if (request := self.router.live.get(preempted)) is not None:
                request.is_fresh, request.last_token_s = True, worker.stepped_s

    def _count_gaps(self, worker: SimWorker, steps: Steps) -> None:
        """Count the gaps of steps taken at once: for new sequences, the first token is later by the hop's latency."""
        step_s, count = steps.seconds / steps.num_steps, steps.num_steps * steps.num_rows
        for request in worker.joined:
            if request.is_fresh:
                count -= 1
                self.gaps.add(self._events.now - steps.seconds + step_s - request.last_token_s)
                request.is_fresh = False
        worker.joined.clear()
        self.gaps.add(step_s, count)

    def _publish(self, worker: SimWorker, batch: KVEventBatch) -> None:
        # No cache is cleared in a simulation.
        named = [event for event in batch.events if not isinstance(event, Cleared)]
        changes = tuple([(event.name, isinstance(event, Stored)) for event in named])
        change = PrefixChange(first_sequence=batch.first_seq, snapshot=False, changes=changes)
        self._events.after(self._network.hop_s, partial(self._registry.prefix_changed, worker.info.key, change))

    def send_snapshot(self, worker: SimWorker) -> None:
        """Send a snapshot of a worker's whole prefix cache, as the router requested."""
        if worker.is_dead:
            return

        def snapshot(scheduler: Scheduler) -> None:
            next_seq, stored = scheduler.blocks.snapshot()
            changes = tuple([(event.name, True) for event in stored])
            change = PrefixChange(first_sequence=next_seq, snapshot=True, changes=changes)
            self._events.after(self._network.hop_s, partial(self._registry.prefix_changed, worker.info.key, change))

        self._events.after(self._network.hop_s, partial(worker.call, snapshot))

    def _admitted(self, admission: AdmittedSequence) -> None:
        request = self.router.live.get(admission.request_id)
        if request is None:
            return
        if request.queued_s is None:
            request.queued_s = self._events.now - request.arrived_s
        if request.cached_tokens is None:
            request.cached_tokens = admission.num_cached_tokens
        self.handoffs.offered(admission)

    def _token(self, worker: SimWorker, event: TokenEvent) -> None:
        request, now = self.router.live.get(event.request_id), self._events.now
        if request is None:
            return
        is_last = event.finish_reason is not None
        if worker.info.role is WorkerRole.PREFILL:
            self._notify_router(request, request.key, partial(self.router.prompt_computed, request))
            if event.index:
                self.gaps.add(now - request.last_token_s)
            request.last_token_s = now
            if not self._has_decode:
                self._notify_router(request, request.key, partial(self.router.finish, request))
                worker.call(partial(release_blocks, event.request_id, worker))
            return
        if event.token is not None:
            if event.index:
                self.gaps.add(now - (request.last_token_s if request.is_fresh else worker.stepped_s))
            if request.is_fresh and not is_last:
                self._notify_router(request, request.key, partial(self.router.prompt_computed, request))
            request.is_fresh, request.last_token_s = False, now
        if is_last:
            self._notify_router(request, request.key, partial(self.router.finish, request))

    # Losses

    def lost(self, key: WorkerKey) -> None:
        """Handle the router's detection of a lost worker: its requests continue elsewhere."""
        worker = self.live.pop(key)
        self.handoffs.lost(key)
        for request in self.requests_on(key):
            self._count_tokens(request, worker)
            self.router.lost(request)

    def requests_on(self, key: WorkerKey) -> list[SimRequest]:
        """Return the requests whose attempt cannot continue without the worker."""
        return [r for r in self.router.live.values() if _is_on(r, key)]

    def _count_tokens(self, request: SimRequest, worker: SimWorker) -> None:
        """Count the tokens that the client has received."""
        engine = request.engine
        num_known = 1 if request.first_token_s is not None else 0
        if engine is not None and engine.state is RequestState.RUNNING:
            num_known = max(num_known, engine.num_output_tokens + worker.num_tokens_at_end)
        request.num_output_tokens = max(request.num_output_tokens, num_known)

    # Load

    def report_load(self, worker: SimWorker) -> None:
        """Report load now, and again after every period while the worker lives."""
        if worker.is_dead:
            return
        if worker.is_frozen or not worker.has_news:
            # Without an event nothing was sent there either: the router would learn nothing new.
            self._events.in_background(self._network.load_period_s, partial(self.report_load, worker))
            return
        worker.has_news = worker.is_busy
        load = worker.scheduler.load()
        report = WorkerLoad(
            num_running=load.num_running,
            num_waiting=load.num_waiting + load.num_reservations,
            num_reserved=load.num_reservations,
            backlog_tokens=load.num_backlog_tokens,
            num_free_blocks=max(0, load.num_blocks - load.num_used_blocks - load.num_promised_blocks),
            prefill_tokens_per_s=worker.rates.settled_prefill_tokens_per_s,
            decode_step_s=worker.rates.settled_decode_step_s,
            kv_bytes_per_s=self._network.link_bytes_per_s,
        )
        self._events.in_background(self._network.hop_s, partial(self._registry.load_changed, worker.info.key, report))
        self._events.in_background(self._network.load_period_s, partial(self.report_load, worker))


def _is_on(request: SimRequest, key: WorkerKey) -> bool:
    """Return whether the attempt cannot continue without the worker."""
    assignment = request.assignment
    if assignment is None:
        return False
    prefill = assignment.placement.prefill
    awaits_prefill = request.engine is None or request.engine.state is RequestState.WAITING
    return assignment.decode == key or (awaits_prefill and prefill is not None and prefill.info.key == key)
