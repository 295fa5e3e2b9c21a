"""Hand-offs of prompts from a prefill worker to a decode worker.

Reserving, late binding, committing, releasing and cancelling are the engine's real operations, in the real order.
Messages and bytes are latencies: nothing is lost or damaged here (that is covered by `tests.explore` and
`tests.faults`). Blocks leave as each step has computed them, as `PrefillProgress` reports, after everything both
network cards already have to send.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from cluster.simulator.model.event_queue import EventQueue
from cluster.simulator.model.request import SimRequest
from cluster.simulator.model.settings import Network
from cluster.simulator.model.worker import TOKEN, SimWorker
from engine.scheduler.scheduler import Scheduler
from engine.types.step_output import AdmittedSequence, PrefillProgress
from router.types.worker_view import WorkerKey
from tandem.values.ids import RequestId, TransferId

WorkerCall = Callable[[SimWorker, Scheduler], None]
"""Function that runs on a worker between two steps."""


@dataclass(slots=True, kw_only=True)
class Handoff:
    """State of one hand-off, changed only by the simulated workers."""

    request: SimRequest
    transfer_id: TransferId
    decode: WorkerKey
    prefill: WorkerKey
    num_held_blocks: int
    """Blocks that the decode worker already has, which are not sent."""
    is_bound: bool = False
    """Whether the decode worker has bound its blocks and reported them."""
    num_computed_blocks: int = 0
    is_computed: bool = False
    """Whether the whole prompt is computed."""
    _num_sent_blocks: int = 0

    def take_computed(self) -> int:
        """Return the number of blocks that may leave now, each counted once."""
        first = max(self.num_held_blocks, self._num_sent_blocks)
        self._num_sent_blocks = max(first, self.num_computed_blocks)
        return self._num_sent_blocks - first


class Handoffs:
    """All hand-offs of a simulation, by the key of their request's attempt, which is also the transfer's id."""

    def __init__(self, events: EventQueue, network: Network, live: Mapping[WorkerKey, SimWorker]) -> None:
        self.num_kv_bytes = 0
        """Bytes of KV sent so far."""
        self._events = events
        self._hop_s = network.hop_s
        self._link_bytes_per_s = network.link_bytes_per_s
        self._live = live
        self._by_key: dict[RequestId, Handoff] = {}

    def reserve(self, request: SimRequest, prefill: WorkerKey, worker: SimWorker, scheduler: Scheduler) -> None:
        """Reserve room on the decode worker, which raises the ServingError with which it rejects the request."""
        block_size = worker.info.layout.block_size
        engine = request.engine_request(self._events.now, block_size, prefill_only=False)
        transfer_id = TransferId(request.key)
        grant = scheduler.reservations.reserve(transfer_id, engine)
        request.engine = engine
        self._by_key[request.key] = Handoff(
            request=request,
            transfer_id=transfer_id,
            decode=worker.info.key,
            prefill=prefill,
            num_held_blocks=grant.num_held_tokens // block_size,
        )

    def offered(self, admission: AdmittedSequence) -> None:
        """Handle a prompt's start on the prefill worker: send OFFER, and get RESERVE back."""
        handoff = self._by_key.get(admission.request_id)
        if handoff is None or not admission.prefill_only:
            return

        def bind(_worker: SimWorker, scheduler: Scheduler) -> None:
            if self._by_key.get(admission.request_id) is handoff:
                scheduler.reservations.bind(handoff.transfer_id)
                self._events.after(self._hop_s, partial(self._bound, handoff))

        self._events.after(self._hop_s, partial(self.call, handoff.decode, bind))

    def progressed(self, progress: PrefillProgress) -> None:
        """Handle progress in computing the prompt."""
        handoff = self._by_key.get(progress.request_id)
        if handoff is not None:
            handoff.num_computed_blocks = progress.first_block_index + len(progress.block_ids)
            handoff.is_computed = progress.is_complete
            if handoff.is_bound:
                self._send_computed(handoff)

    def lost(self, key: WorkerKey) -> None:
        """Handle the loss of a worker: its peers release their blocks, and the requests restart without them."""
        for handoff in [h for h in self._by_key.values() if key in (h.prefill, h.decode)]:
            del self._by_key[RequestId(handoff.transfer_id)]
            if handoff.prefill == key:
                self.call(handoff.decode, partial(_cancel, handoff.transfer_id))
            else:
                self.call(handoff.prefill, partial(release_blocks, RequestId(handoff.transfer_id)))

    def call(self, worker: WorkerKey, action: WorkerCall) -> None:
        """Run a function on a worker, if it still exists."""
        if (live := self._live.get(worker)) is not None:
            live.call(partial(action, live))

    def _bound(self, handoff: Handoff) -> None:
        handoff.is_bound = True
        self._send_computed(handoff)

    def _send_computed(self, handoff: Handoff) -> None:
        source, target = self._live.get(handoff.prefill), self._live.get(handoff.decode)
        if source is None or target is None:
            return
        num_bytes = handoff.take_computed() * target.block_bytes
        self.num_kv_bytes += num_bytes
        start_s = max(self._events.now, source.link_free_s, target.link_free_s)
        landed_s = start_s + num_bytes / self._link_bytes_per_s
        source.link_free_s = target.link_free_s = landed_s
        if handoff.is_computed:
            self._events.at(landed_s + self._hop_s, partial(self._sealed, handoff))

    def _sealed(self, handoff: Handoff) -> None:
        """Handle complete arrival: the decode worker starts the sequence, the prefill worker releases its blocks."""
        request, key = handoff.request, RequestId(handoff.transfer_id)
        if self._by_key.pop(key, None) is not handoff:
            return

        def commit(worker: SimWorker, scheduler: Scheduler) -> None:
            if request.key == key and request.engine is not None:
                request.is_fresh = True
                worker.joined.append(request)
                scheduler.reservations.commit(handoff.transfer_id, TOKEN, num_cached_tokens=request.cached_tokens)

        self.call(handoff.decode, commit)
        self.call(handoff.prefill, partial(release_blocks, key))


def release_blocks(key: RequestId, _worker: SimWorker, scheduler: Scheduler) -> None:
    """Release a prompt's blocks, which nothing reads any more."""
    if not scheduler.release_held(key):
        scheduler.abort(key)
    scheduler.unpin_blocks(key)


def _cancel(transfer_id: TransferId, _worker: SimWorker, scheduler: Scheduler) -> None:
    scheduler.reservations.cancel(transfer_id)
