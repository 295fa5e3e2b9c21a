"""Whether this router can answer, and how it waits for its first worker."""

import asyncio
from collections.abc import Callable, Sequence

from router.fleet.probes import NO_TOKENS
from router.metrics.router_metrics import RouterMetrics
from router.types.worker_view import WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.process.lifetime import Lifetime
from tandem.values.roles import WorkerRole


class ReadinessCheck:
    """Ready while a decode worker produces tokens, an API key is accepted, and no drain has begun."""

    def __init__(
        self,
        registry: WorkerRegistry,
        metrics: RouterMetrics,
        answering: Callable[[WorkerSnapshot], bool],
        locked: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`answering`: whether a worker's engine counts as live (`Canary.answering`). `locked`: returns why no API key
        is accepted, if so (`AccessControl.not_ready_reason`).
        """
        self._locked = locked
        self._registry = registry
        self._answering = answering
        self._metrics = metrics
        self._draining = False
        metrics.on_render(self._update_metrics)

    def drain(self) -> None:
        """Report not ready from now on, so that load balancers send requests elsewhere."""
        self._draining = True

    def not_ready_reason(self, *, exclude_workers: bool = False) -> str | None:
        """Reason why the router is not ready, or None. `exclude_workers`: check the router alone, not its pools."""
        if self._draining:
            return "the router is draining"
        if (reason := self._locked()) is not None:
            return reason
        if exclude_workers:
            return None
        workers = self._registry.snapshots()
        decoders = [w for w in workers if w.info.role is WorkerRole.DECODE and not w.draining]
        if not decoders:
            return "no decode worker accepts requests"
        return None if any(map(self._answering, decoders)) else NO_TOKENS

    def _update_metrics(self) -> None:
        workers = self._registry.status().workers
        for role in WorkerRole:
            self._metrics.workers(role.value, "live", sum(w.info.role is role for w in workers))
            self._metrics.workers_lost(role.value, self._registry.lost[role])
        self._metrics.ready(self.not_ready_reason() is None, num_paired=self._num_paired(workers))
        self._metrics.worker_loads(workers)
        known = self._registry.prefix_map
        self._metrics.placement.prefix_map(num_blocks=len(known), num_approximate=known.num_approximate)

    def _num_paired(self, workers: Sequence[WorkerSnapshot]) -> int:
        willing = [worker for worker in workers if not worker.draining]
        readers = [worker.info for worker in willing if worker.info.role is WorkerRole.PREFILL]
        decoders = [w for w in willing if w.info.role is WorkerRole.DECODE and self._answering(w)]
        return sum(any(worker.info.cannot_pair(reader) is None for reader in readers) for worker in decoders)


async def wait_for_first_worker(registry: WorkerRegistry, lifetime: Lifetime) -> bool:
    """Wait until a decode worker has joined; False when stopped before."""
    joined = asyncio.Event()
    registry.watch(joined.set)
    stop = asyncio.ensure_future(lifetime.wait())
    try:
        while not any(w.info.role is WorkerRole.DECODE for w in registry.status().workers):
            joined.clear()
            waiter = asyncio.ensure_future(joined.wait())
            done, _ = await asyncio.wait({waiter, stop}, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            if stop in done:
                return False
        return True
    finally:
        stop.cancel()
        registry.unwatch(joined.set)
