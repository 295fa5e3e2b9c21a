"""Chooses which worker receives the cache of a leaving worker. Synchronous and without I/O.

A draining worker offers one router its cached blocks, hottest first, for a limited time. The router chooses a target,
which fetches what it can use; when that has ended, or there is no target, the draining worker may exit. If a target
leaves or is drained, another is chosen as long as there is time. What was fetched becomes known through the target's
own cache events, like anything else that it stores.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from router.types.session_events import CacheOffer, MigrationPlan, WorkerPort
from router.types.worker_view import WorkerKey, WorkerSnapshot
from tandem.values.cached_chain import CachedChain, fitting
from tandem.values.prefix_holder import PrefixHolder

_LEAST_S = 0.05
"""Remaining time below which no migration is started."""


def choose_migration_target(
    leaving: WorkerSnapshot, workers: Iterable[WorkerSnapshot], excluded: frozenset[WorkerKey] = frozenset()
) -> WorkerSnapshot | None:
    """Choose the worker that receives the cache of `leaving`; None when no other can use it.

    Preferably of the same pool, where its prefixes are requested; then the one with the most room; ties go to the one
    with fewer requests, then by name.
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
    # Blocks are requested by the names that the leaving worker knows: smaller blocks have names that it does not know.
    whole = worker.info.layout.block_size % leaving.info.layout.block_size == 0
    return whole and leaving.info.handoff_address != "" and leaving.info.cannot_send_to(worker.info) is None


def plan_migration(
    chains: Iterable[CachedChain], leaving: WorkerSnapshot, target: WorkerSnapshot
) -> MigrationPlan | None:
    """Plan to fetch the hottest blocks, as many as the target could hold; the target decides how many it really
    fetches."""
    room_tokens = target.load.num_free_blocks * target.info.layout.block_size
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
    tried: set[WorkerKey] = field(default_factory=set)
    target: WorkerKey | None = None


class CacheMigrations:
    """The cache migrations in progress."""

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
        self._offered: set[WorkerKey] = set()
        """Connected workers that have offered their cache."""

    def __len__(self) -> int:
        return len(self._under_way)

    def cache_offered(self, leaving: WorkerKey, offer: CacheOffer) -> None:
        """Handle a draining worker's offer. Only its first one counts."""
        if leaving in self._offered or not self._is_draining(leaving):
            return
        self._offered.add(leaving)
        self._under_way[leaving] = _Migration(chains=offer.chains, ends_s=self._clock() + offer.lends_s)
        self._choose_target(leaving)

    def migration_ended(self, target: WorkerKey, leaving: WorkerKey) -> None:
        """Handle a target's report that it has finished. If it is leaving itself, another target gets the rest."""
        migration = self._under_way.get(leaving)
        if migration is None or migration.target != target:
            return
        if self._is_draining(target):
            self._choose_target(leaving)
        else:
            self._end(leaving)

    def left(self, key: WorkerKey) -> None:
        """Handle a worker that left: its offer is lost, and workers that were to migrate to it get another target."""
        self._offered.discard(key)
        self._under_way.pop(key, None)
        for leaving in [name for name, each in self._under_way.items() if each.target == key]:
            self._choose_target(leaving)

    def _is_draining(self, key: WorkerKey) -> bool:
        return any(worker.info.key == key and worker.draining for worker in self._snapshots())

    def _choose_target(self, leaving: WorkerKey) -> None:
        migration = self._under_way[leaving]
        workers = self._snapshots()
        leaver = next((worker for worker in workers if worker.info.key == leaving), None)
        left_s = migration.ends_s - self._clock()
        target = None
        if leaver is not None and left_s > _LEAST_S:
            target = choose_migration_target(leaver, workers, frozenset(migration.tried))
        if leaver is None or target is None:
            self._end(leaving)
            return
        share = plan_migration(migration.chains, leaver, target)
        port = self._port(target.info.key)
        if share is None or port is None:
            self._end(leaving)
            return
        migration.target = target.info.key
        migration.tried.add(target.info.key)
        rate = max(worker.load.prefill_tokens_per_s for worker in workers)
        port.migrate(share, within_s=left_s, prefill_tokens_per_s=rate)

    def _end(self, leaving: WorkerKey) -> None:
        del self._under_way[leaving]
        if (port := self._port(leaving)) is not None:
            port.end_migration()
