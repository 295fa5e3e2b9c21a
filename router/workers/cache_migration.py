"""Who inherits the cache of a worker that leaves. Synchronous and without I/O.

A draining worker tells one router what it has, hottest first, and lends it for a while. The router names a successor,
which fetches what it can use; when that has ended, or nobody is there to succeed, the draining worker is let go. For
a successor that goes, or is told to go, another is named as long as there is time. What was fetched is known by the
successor's own cache events, like anything else that it stores.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router.types.session_events import CacheOffer, MigrationPlan, WorkerPort
from router.types.worker_view import WorkerKey, WorkerSnapshot
from tandem.values.cached_chain import CachedChain, fitting
from tandem.values.prefix_holder import PrefixHolder

_LEAST_S = 0.05
"""In less nothing is worth beginning."""


def choose_migration_target(
    leaving: WorkerSnapshot, workers: Iterable[WorkerSnapshot], excluded: frozenset[WorkerKey] = frozenset()
) -> WorkerSnapshot | None:
    """The worker that is to have the cache of `leaving`; None when no other can take it as it is.

    Of its own pool if possible, for there its prefixes are asked for; then the one with the most room, and of equals
    the one with fewer requests, then the one whose name comes first.
    """
    able = [
        worker
        for worker in workers
        if worker.info.key != leaving.info.key
        and worker.info.key not in excluded
        and not worker.draining
        and worker.load.num_free_blocks > 0
        and _can_take(worker, leaving)
    ]
    return min(
        able,
        key=lambda worker: (
            worker.info.role is not leaving.info.role,
            -worker.load.num_free_blocks * worker.info.layout.block_size,
            worker.num_active,
            worker.info.key.worker_id,
        ),
        default=None,
    )


def _can_take(worker: WorkerSnapshot, leaving: WorkerSnapshot) -> bool:
    # Blocks are asked for by the names that the leaving worker knows: smaller ones have names that it has not.
    whole = worker.info.layout.block_size % leaving.info.layout.block_size == 0
    return whole and leaving.info.handoff_address != "" and leaving.info.cannot_send_to(worker.info) is None


def plan_migration(
    chains: Iterable[CachedChain], leaving: WorkerSnapshot, successor: WorkerSnapshot
) -> MigrationPlan | None:
    """The hottest blocks, as many as the successor says it could hold; how much it really wants it decides itself."""
    room_tokens = successor.load.num_free_blocks * successor.info.layout.block_size
    block_size = leaving.info.layout.block_size
    fitting_chains = fitting(chains, room_tokens // block_size)
    if not fitting_chains:
        return None
    return MigrationPlan(
        holder=PrefixHolder(
            worker_id=leaving.info.key.worker_id,
            incarnation=leaving.info.key.incarnation,
            address=leaving.info.handoff_address,
            num_tokens=0,
        ),
        block_size=block_size,
        chains=fitting_chains,
    )


@dataclass(slots=True, kw_only=True)
class _Migration:
    chains: tuple[CachedChain, ...]
    ends_s: float
    asked: set[WorkerKey] = field(default_factory=set)
    successor: WorkerKey | None = None


class CacheMigrations:
    """All that are under way."""

    def __init__(
        self,
        *,
        snapshots: Callable[[], list[WorkerSnapshot]],
        port: Callable[[WorkerKey], WorkerPort | None],
        clock: Callable[[], float],
    ) -> None:
        self._snapshots = snapshots
        self._port = port
        self._clock = clock
        self._under_way: dict[WorkerKey, _Migration] = {}
        self._heard: set[WorkerKey] = set()
        """Workers still here that have bequeathed."""

    def __len__(self) -> int:
        return len(self._under_way)

    def bequeathed(self, leaving: WorkerKey, bequest: CacheOffer) -> None:
        """A draining worker says what it has. It does so once; nothing else is heard: others work for it."""
        if leaving in self._heard or not self._is_draining(leaving):
            return
        self._heard.add(leaving)
        self._under_way[leaving] = _Migration(chains=bequest.chains, ends_s=self._clock() + bequest.lends_s)
        self._name_successor(leaving)

    def inherited(self, successor: WorkerKey, leaving: WorkerKey) -> None:
        """A successor says that it fetches nothing more. If it leaves itself, another is to have what it would have."""
        succession = self._under_way.get(leaving)
        if succession is None or succession.successor != successor:
            return
        if self._is_draining(successor):
            self._name_successor(leaving)
        else:
            self._settle(leaving)

    def left(self, key: WorkerKey) -> None:
        """A worker is gone: what it left is lost, and whom it was to succeed gets another successor."""
        self._heard.discard(key)
        self._under_way.pop(key, None)
        for leaving in [name for name, each in self._under_way.items() if each.successor == key]:
            self._name_successor(leaving)

    def _is_draining(self, key: WorkerKey) -> bool:
        return any(worker.info.key == key and worker.draining for worker in self._snapshots())

    def _name_successor(self, leaving: WorkerKey) -> None:
        succession = self._under_way[leaving]
        workers = self._snapshots()
        leaver = next((worker for worker in workers if worker.info.key == leaving), None)
        left_s = succession.ends_s - self._clock()
        successor = None
        if leaver is not None and left_s > _LEAST_S:
            successor = choose_migration_target(leaver, workers, frozenset(succession.asked))
        if leaver is None or successor is None:
            self._settle(leaving)
            return
        share = plan_migration(succession.chains, leaver, successor)
        port = self._port(successor.info.key)
        if share is None or port is None:
            self._settle(leaving)
            return
        succession.successor = successor.info.key
        succession.asked.add(successor.info.key)
        rate = max(worker.load.prefill_tokens_per_s for worker in workers)
        port.inherit(share, within_s=left_s, prefill_tokens_per_s=rate)

    def _settle(self, leaving: WorkerKey) -> None:
        del self._under_way[leaving]
        if (port := self._port(leaving)) is not None:
            port.settle()
