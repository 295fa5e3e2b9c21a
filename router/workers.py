"""The live workers, as their sessions tell of them: who they are, how loaded, what they hold, how they fare.

Synchronous and without I/O. Sessions report here (`SessionListener`), placement reads `snapshots`, dispatch keeps
the ledger of what it has sent, because a worker's own word on its load is always a little old.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from router.prefix_map import PrefixMap
from router.session_events import CLOSED_HERE, Bequest, WorkerPort
from router.succession import Successions
from router.worker_view import PrefixChange, WorkerInfo, WorkerKey, WorkerLoad, WorkerSnapshot
from tandem.block_hash import HASH_BLOCK_TOKENS
from tandem.ids import WorkerId
from tandem.roles import WorkerRole

logger = logging.getLogger(__name__)

FAILURE_PENALTY_S = 2.0
_REMEMBERED = 256
"""Workers that left after they were told to."""


class WorkerRejected(Exception):
    """This worker cannot be part of the cluster as it is; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What the cluster serves and who is there, for readiness, /v1/models and the banner."""

    ready: bool
    """A decode worker is live and takes requests; without prefill workers it computes prompts itself."""
    model_name: str | None
    max_model_len: int | None
    """The least of all workers' bounds; None while no worker is live."""
    model_fingerprint: str | None
    workers: tuple[WorkerSnapshot, ...]


class _Worker:
    """One live worker's mutable record."""

    __slots__ = (
        "answered_s",
        "backlog_beside",
        "backlog_since_load",
        "draining",
        "info",
        "load",
        "num_assigned",
        "num_beside",
        "num_since_load",
        "own_backlog",
        "penalised_until_s",
        "port",
    )

    def __init__(self, info: WorkerInfo, port: WorkerPort, now_s: float) -> None:
        self.info = info
        self.answered_s = now_s
        self.port = port
        self.load = WorkerLoad(num_free_blocks=info.num_blocks)
        self.draining = False
        self.penalised_until_s = 0.0
        # What this router has under way there, and how much of it the last load report cannot know of.
        self.own_backlog = 0
        self.num_assigned = 0
        self.backlog_since_load = 0
        self.num_since_load = 0
        # What others had under way there when it last reported.
        self.backlog_beside = 0
        self.num_beside = 0

    def reported(self, load: WorkerLoad) -> None:
        self.load = load
        self.backlog_since_load = self.num_since_load = 0
        self.backlog_beside = max(0, load.backlog_tokens - self.own_backlog)
        self.num_beside = max(0, load.num_running + load.num_waiting - self.num_assigned)

    def snapshot(self, now_s: float) -> WorkerSnapshot:
        # Either count alone can be too low: the report is old, and knows other routers' requests.
        told = self.load.num_running + self.load.num_waiting
        return WorkerSnapshot(
            info=self.info,
            load=self.load,
            backlog_tokens=max(self.own_backlog, self.load.backlog_tokens + self.backlog_since_load),
            num_active=max(self.num_assigned, told + self.num_since_load),
            backlog_now=self.own_backlog + self.backlog_beside,
            num_active_now=self.num_assigned + self.num_beside,
            draining=self.draining,
            penalty_ms=max(0.0, self.penalised_until_s - now_s) * 1e3,
            answered_s=self.answered_s,
        )


class WorkerRegistry:
    """All live workers of both pools."""

    def __init__(self, *, prefix_map: PrefixMap, clock: Callable[[], float]) -> None:
        self.prefix_map = prefix_map
        self._clock = clock
        self._workers: dict[WorkerId, _Worker] = {}
        self._watchers: set[Callable[[], None]] = set()
        self._successions = Successions(snapshots=self.snapshots, port=self.port, clock=clock)
        self._left_in_order: deque[WorkerKey] = deque(maxlen=_REMEMBERED)
        self.on_load: Callable[[WorkerSnapshot], None] = _nobody
        """Called with every load report."""

    def joined(self, info: WorkerInfo, port: WorkerPort) -> None:
        """A session is up. Raises WorkerRejected for a worker of another model, or an id that is taken."""
        key = info.key
        if key.worker_id in self._workers:
            raise WorkerRejected(f"worker id {key.worker_id} is taken by a live worker")
        for other in self._workers.values():
            for field, theirs, ours in (
                ("model", info.model_name, other.info.model_name),
                ("model_fingerprint", info.layout.model_fingerprint, other.info.layout.model_fingerprint),
            ):
                if theirs != ours:
                    raise WorkerRejected(f"{field} is {theirs!r}; the cluster serves {ours!r}")
        self._workers[key.worker_id] = _Worker(info, port, self._clock())
        block_size = info.layout.block_size
        self.prefix_map.add_worker(
            key.worker_id,
            capacity=max(1, info.cache_tokens // block_size),
            names_per_block=max(1, block_size // HASH_BLOCK_TOKENS),
        )
        logger.info("%s worker %s joined with %d blocks", info.role.value, key.worker_id, info.num_blocks)
        self._tell_watchers()

    def left(self, key: WorkerKey, reason: str) -> None:
        """A session is over."""
        if (worker := self._find(key)) is None:
            return
        if worker.draining:
            self._left_in_order.append(key)
        is_expected = worker.draining or reason == CLOSED_HERE
        del self._workers[key.worker_id]
        self.prefix_map.drop_worker(key.worker_id)
        logger.log(logging.INFO if is_expected else logging.WARNING, "worker %s left: %s", key.worker_id, reason)
        self._successions.left(key)
        self._tell_watchers()

    def went_in_order(self, key: WorkerKey) -> bool:
        """Whether a worker that is gone, or about to go, had been told to."""
        worker = self._find(key)
        return key in self._left_in_order if worker is None else worker.draining

    def load_changed(self, key: WorkerKey, load: WorkerLoad) -> None:
        """A load report came."""
        if (worker := self._find(key)) is not None:
            worker.reported(load)
            self.on_load(worker.snapshot(self._clock()))

    def prefix_changed(self, key: WorkerKey, change: PrefixChange) -> None:
        """Cache events came."""
        if self._find(key) is not None:
            self.prefix_map.apply(key.worker_id, change)

    def draining(self, key: WorkerKey, reason: str) -> None:
        """The worker takes no more requests and will leave when it has finished those it has."""
        if (worker := self._find(key)) is not None:
            worker.draining = True
            logger.info("worker %s is draining: %s", key.worker_id, reason)

    def bequeathed(self, key: WorkerKey, bequest: Bequest) -> None:
        """A draining worker offers its cache."""
        if self._find(key) is not None:
            self._successions.bequeathed(key, bequest)

    def inherited(self, key: WorkerKey, leaving: WorkerKey) -> None:
        """A successor has fetched what it will."""
        self._successions.inherited(key, leaving)

    def snapshots(self) -> list[WorkerSnapshot]:
        """All live workers as of now."""
        now_s = self._clock()
        return [worker.snapshot(now_s) for worker in self._workers.values()]

    def port(self, key: WorkerKey) -> WorkerPort | None:
        """The way to a worker, or None when that process is gone."""
        worker = self._find(key)
        return None if worker is None else worker.port

    def assign(self, key: WorkerKey, tokens_to_compute: int) -> None:
        """A request was sent there."""
        if (worker := self._find(key)) is not None:
            worker.own_backlog += tokens_to_compute
            worker.backlog_since_load += tokens_to_compute
            worker.num_assigned += 1
            worker.num_since_load += 1

    def computed(self, key: WorkerKey, tokens: int) -> None:
        """Tokens that were assigned have been computed, or never will be."""
        if (worker := self._find(key)) is not None:
            worker.own_backlog -= tokens

    def release(self, key: WorkerKey) -> None:
        """An assigned request is over there."""
        if (worker := self._find(key)) is not None:
            worker.num_assigned -= 1

    def answered(self, key: WorkerKey) -> None:
        """A new token came from there: its engine lives."""
        if (worker := self._find(key)) is not None:
            worker.answered_s = self._clock()

    def penalise(self, key: WorkerKey, duration_s: float) -> None:
        """After a refusal or failure: placement counts the time that is left of it as cost."""
        if (worker := self._find(key)) is not None:
            worker.penalised_until_s = max(worker.penalised_until_s, self._clock() + duration_s)

    def watch(self, callback: Callable[[], None]) -> None:
        """Call back whenever a worker joined or left, until `unwatch`."""
        self._watchers.add(callback)

    def unwatch(self, callback: Callable[[], None]) -> None:
        """End a watch; no-op when there is none."""
        self._watchers.discard(callback)

    def status(self) -> ClusterStatus:
        """Readiness and what is served."""
        workers = tuple(self.snapshots())
        infos = [w.info for w in workers]
        return ClusterStatus(
            ready=any(w.info.role is WorkerRole.DECODE and not w.draining for w in workers),
            model_name=infos[0].model_name if infos else None,
            max_model_len=min((i.max_model_len for i in infos), default=None),
            model_fingerprint=infos[0].layout.model_fingerprint if infos else None,
            workers=workers,
        )

    def _find(self, key: WorkerKey) -> _Worker | None:
        worker = self._workers.get(key.worker_id)
        return worker if worker is not None and worker.info.key == key else None

    def _tell_watchers(self) -> None:
        for callback in tuple(self._watchers):
            callback()


def _nobody(_: WorkerSnapshot) -> None:
    """Until somebody wants to know."""
