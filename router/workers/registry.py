"""The live workers as their sessions report them: identity, load, cached prefixes, health.

Synchronous and without I/O. Sessions report here (`SessionListener`), placement reads `snapshots`, and dispatch records
what it has sent, because a worker's own load report is always a little old.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from router.types.session_events import CLOSED_HERE, CacheOffer, CommittedHandoff, WorkerPort
from router.types.worker_view import PrefixChange, WorkerInfo, WorkerKey, WorkerLoad, WorkerSnapshot
from router.workers.booking import Booking
from router.workers.cache_migration import CacheMigrations
from router.workers.expected_workers import ExpectedWorkers
from router.workers.pair_links import PairTable
from router.workers.peer_load import NO_PEERS, PeerShare
from router.workers.prefix_map import PrefixMap
from router.workers.prefix_pins import PinRegistry, PinSite
from router.workers.record import WorkerRecord, WorkerTable
from tandem.cluster_state.entries import Share
from tandem.values.block_hash import HASH_BLOCK_TOKENS
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.prefix_pin import PinResult
from tandem.values.roles import WorkerRole

logger = logging.getLogger(__name__)

FAILURE_PENALTY_S = 2.0
_LONG_STEP_S = 2.0
"""A worker whose step takes longer than this is penalised."""
_REMEMBERED = 256
"""Number of workers remembered as having drained before they left."""


class WorkerRejected(Exception):
    """The worker cannot join the cluster; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStatus:
    """The served model and the workers that serve it, for readiness, /v1/models and the banner."""

    ready: bool
    """Whether a decode worker is live and accepts requests; without prefill workers it computes prompts itself."""
    model_name: str | None
    max_model_len: int | None
    """The smallest of all workers' bounds; None while no worker is live."""
    model_fingerprint: str | None
    workers: tuple[WorkerSnapshot, ...]


class WorkerRegistry:
    """The registry of all live workers of both pools."""

    def __init__(
        self, *, prefix_map: PrefixMap, clock: Callable[[], float], max_pins: int = 4096, rejoin_s: float = 60.0
    ) -> None:
        """`rejoin_s`: how long a decode worker that left is expected back."""
        self.expected = ExpectedWorkers(within_s=rejoin_s, clock=clock)
        """Decode workers that may join soon; kept up to date by the fleet's connections."""
        self.prefix_map = prefix_map
        self._clock = clock
        self._workers: dict[WorkerId, WorkerRecord] = {}
        self._table = WorkerTable(self._workers.values())
        # Placement calls these two for every request: not through a method here.
        self.view = self._table.view
        """Returns all live workers as placement sees them; valid until the registry next changes."""
        self.links = self._table.links
        """Returns the links between the workers of a view just taken; None: they make no difference to placement."""
        self._model: dict[str, str] = {}
        """The first worker's properties, fixed from then on: tokenizer, templates and block names depend on them."""
        self._watchers: set[Callable[[], None]] = set()
        self._migrations = CacheMigrations(snapshots=self.snapshots, port=self.port, clock=clock)
        self.pins = PinRegistry(find=self._pin_site, clock=clock, max_pins=max_pins)
        self._drained_before_leaving: deque[WorkerKey] = deque(maxlen=_REMEMBERED)
        self.lost: Counter[WorkerRole] = Counter()
        """Workers lost without a drain since the router started, by role."""
        self.on_load: Callable[[WorkerSnapshot], None] = _ignore_load
        """Called with every load report."""
        self.peer_loads: Callable[[WorkerKey, int], PeerShare] = _no_peers
        """Other routers' load on a worker beyond its load report of that number; see `peers_changed`."""

    def joined(self, info: WorkerInfo, port: WorkerPort) -> None:
        """Add a worker whose session is open. Raises WorkerRejected for another model, or an id in use."""
        key = info.key
        if key.worker_id in self._workers:
            raise WorkerRejected(f"worker id {key.worker_id} is in use by a live worker")
        theirs = {"model": info.model_name, "model_fingerprint": info.layout.model_fingerprint}
        for field, ours in self._model.items():
            if theirs[field] != ours:
                until = "of its first worker, until it is restarted"
                raise WorkerRejected(f"{field} is {theirs[field]!r}; this router serves {ours!r}, {until}")
        self._model = theirs
        block_size = info.layout.block_size
        slot = self.prefix_map.add_worker(
            key.worker_id,
            capacity=max(1, info.cache_tokens // block_size),
            names_per_block=max(1, block_size // HASH_BLOCK_TOKENS),
        )
        self._workers[key.worker_id] = WorkerRecord(info, port, slot=slot, now_s=self._clock())
        self._table.changed()
        if info.role is WorkerRole.DECODE:
            self.expected.joined(key)
        logger.info("%s worker %s joined with %d blocks", info.role.value, key.worker_id, info.num_blocks)
        self._notify_watchers()

    def left(self, key: WorkerKey, reason: str) -> None:
        """Remove a worker whose session has ended."""
        if (worker := self.find(key)) is None:
            return
        if worker.draining:
            self._drained_before_leaving.append(key)
        if worker.info.role is WorkerRole.DECODE:
            self.expected.left(key, in_order=worker.draining)
        is_expected = worker.draining or reason == CLOSED_HERE
        self.lost[worker.info.role] += not is_expected
        del self._workers[key.worker_id]
        self._table.changed()
        self.prefix_map.drop_worker(key.worker_id)
        logger.log(logging.INFO if is_expected else logging.WARNING, "worker %s left: %s", key.worker_id, reason)
        self._migrations.left(key)
        self.pins.left(key)
        self.pairs.left(key)
        self._notify_watchers()

    def keys(self) -> set[WorkerKey]:
        """Return the live workers."""
        return {worker.info.key for worker in self._workers.values()}

    def live_decoders(self) -> set[WorkerKey]:
        """Return the decode workers that accept requests."""
        return {
            worker.info.key
            for worker in self._workers.values()
            if not worker.draining and worker.info.role is WorkerRole.DECODE
        }

    def worker_due_s(self) -> float:
        """Return the seconds worth waiting for an expected decode worker; 0: none is expected."""
        decoders = [worker for worker in self._workers.values() if worker.info.role is WorkerRole.DECODE]
        leaving = sum(worker.draining for worker in decoders)
        return self.expected.due_s(num_serving=len(decoders) - leaving, num_leaving=leaving)

    def had_drained(self, key: WorkerKey) -> bool:
        """Whether a worker that has left, or is leaving, had drained."""
        worker = self.find(key)
        return key in self._drained_before_leaving if worker is None else worker.draining

    def load_changed(self, key: WorkerKey, load: WorkerLoad) -> None:
        """Apply a worker's load report."""
        if (worker := self.find(key)) is not None:
            now_s = self._clock()
            worker.reported(load, self.peer_loads(key, load.report_number))
            if load.step_age_s >= _LONG_STEP_S:
                # The worker itself decides whether it hangs (`engine.stall`); new requests avoid it meanwhile.
                worker.penalised(now_s + FAILURE_PENALTY_S)
            if self.prefix_map.lacks_snapshot(key.worker_id, now_s):
                logger.warning("no cache events from worker %s any more; requesting a snapshot", key.worker_id)
                worker.port.resync()
            self.on_load(worker.snapshot(now_s))

    def peers_changed(self) -> None:
        """Update every worker's load after a change in other routers' requests."""
        for worker in self._workers.values():
            worker.loaded_elsewhere(self.peer_loads(worker.info.key, worker.load.report_number))

    def in_flight(self) -> tuple[Share, ...]:
        """Return this router's load on each worker, for other routers; leaves out workers without any."""
        return tuple(w.share() for w in self._workers.values() if w.num_assigned or w.num_since_load)

    def prefix_changed(self, key: WorkerKey, change: PrefixChange) -> None:
        if self.find(key) is not None:
            self.prefix_map.apply(key.worker_id, change)

    def draining(self, key: WorkerKey, reason: str) -> None:
        """Mark a worker as draining: it accepts no more requests and leaves when it has finished the present ones."""
        if (worker := self.find(key)) is not None:
            worker.drains()
            logger.info("worker %s is draining: %s", key.worker_id, reason)

    def cache_offered(self, key: WorkerKey, offer: CacheOffer) -> None:
        """Handle a draining worker's offer of its cache."""
        if self.find(key) is not None:
            self._migrations.cache_offered(key, offer)

    def migration_ended(self, key: WorkerKey, leaving: WorkerKey) -> None:
        """Handle the end of a migration: its target has fetched what it will."""
        self._migrations.migration_ended(key, leaving)

    def pin_reported(self, key: WorkerKey, report: PinResult) -> None:
        """Pass on a worker's report about a pinned prefix."""
        self.pins.on_outcome(key, report)

    def snapshots(self) -> list[WorkerSnapshot]:
        """Return snapshots of all live workers."""
        now_s = self._clock()
        return [worker.snapshot(now_s) for worker in self._workers.values()]

    def of_process(self, incarnation: Incarnation) -> WorkerSnapshot | None:
        """Return the live worker with this incarnation."""
        found = next((w for w in self._workers.values() if w.info.key.incarnation == incarnation), None)
        return None if found is None else found.snapshot(self._clock())

    @property
    def pairs(self) -> PairTable:
        """Measurements of the links between prefill and decode workers."""
        return self._table.pairs

    def find(self, key: WorkerKey) -> WorkerRecord | None:
        """Return a worker's record; None when that process is gone."""
        worker = self._workers.get(key.worker_id)
        return worker if worker is not None and worker.info.key == key else None

    def port(self, key: WorkerKey) -> WorkerPort | None:
        """Return the port to a worker; None when that process is gone."""
        worker = self.find(key)
        return None if worker is None else worker.port

    def assign(self, key: WorkerKey, tokens_to_compute: int) -> Booking:
        """Record a request sent to a worker; the returned booking records its progress."""
        return Booking(self.find(key), tokens_to_compute)

    def loaded_elsewhere(self, key: WorkerKey, share: PeerShare) -> None:
        """Set other routers' load on a worker; valid until `peers_changed`, or the worker's next report."""
        if (worker := self.find(key)) is not None:
            worker.loaded_elsewhere(share)

    def answered(self, key: WorkerKey) -> None:
        """Record a new token from a worker: its engine is live."""
        # As `find`, without a call for each message of tokens.
        worker = self._workers.get(key.worker_id)
        if worker is not None and worker.info.key == key:
            worker.answered_s = self._clock()

    def handoff_committed(self, key: WorkerKey, handoff: CommittedHandoff) -> None:
        """Record how long a hand-off to a worker took; ignored when either of the two has left."""
        receiver, sender = self.find(key), self.find(handoff.prefill)
        if receiver is not None and sender is not None:
            self.pairs.observe(
                sender.info,
                receiver.info,
                num_tokens=handoff.num_tokens,
                exposed_s=handoff.exposed_s,
                now_s=self._clock(),
            )

    def penalise(self, key: WorkerKey, duration_s: float) -> None:
        """Penalise a worker after a refusal or failure: placement adds the remaining time to its cost."""
        if (worker := self.find(key)) is not None:
            worker.penalised(self._clock() + duration_s)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call back whenever a worker joined or left, until `unwatch`."""
        self._watchers.add(callback)

    def unwatch(self, callback: Callable[[], None]) -> None:
        """End a watch; no-op when there is none."""
        self._watchers.discard(callback)

    def status(self) -> ServingStatus:
        """Return readiness and what is served."""
        workers = tuple(self.snapshots())
        infos = [w.info for w in workers]
        return ServingStatus(
            ready=any(w.info.role is WorkerRole.DECODE and not w.draining for w in workers),
            model_name=infos[0].model_name if infos else None,
            max_model_len=min((i.max_model_len for i in infos), default=None),
            model_fingerprint=infos[0].layout.model_fingerprint if infos else None,
            workers=workers,
        )

    def _pin_site(self, key: WorkerKey) -> PinSite | None:
        worker = self.find(key)
        if worker is None:
            return None
        return PinSite(port=worker.port, block_size=worker.info.layout.block_size, is_leaving=worker.draining)

    def _notify_watchers(self) -> None:
        for callback in tuple(self._watchers):
            callback()


def _no_peers(_key: WorkerKey, _report_number: int) -> PeerShare:
    return NO_PEERS


def _ignore_load(_: WorkerSnapshot) -> None:
    """Ignore the report: the default of `on_load`."""
