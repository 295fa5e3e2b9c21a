"""Reports the outcomes of one choice's attempts to `WorkerHealth`. Pure.

A choice has one run, or two while it is hedged (`router.dispatch.hedge_run`). Both report here, since a request that
crashes workers does so from either. A run that continues a stream of another router or reader has its own reporter.
"""

from collections.abc import Hashable

from router.types.requests import RoutedRequest
from router.types.worker_view import WorkerKey
from router.workers.health import WorkerHealth
from router.workers.registry import WorkerRegistry
from tandem.values.ids import RequestId

Workers = tuple[WorkerKey, ...]


class ChoiceHealthReporter:
    """Reports for one choice; `run` identifies which of its runs."""

    def __init__(self, index: int, request: RoutedRequest, health: WorkerHealth, registry: WorkerRegistry) -> None:
        self.index = index
        self._name = RequestId(f"{request.request_id}.{request.resumptions}-{index}")
        self._health = health
        self._registry = registry
        self._workers: dict[Hashable, Workers] = {}
        self._failed: set[WorkerKey] = set()
        """Workers that failed on the choice while their session was up."""
        self.was_taken = False
        """Whether a worker accepted any of its ended runs, or may have."""
        self.was_adopted = False
        """Whether the choice continues an attempt that a worker still had."""

    def must_wait(self, request: RoutedRequest) -> bool:
        """Whether it must wait for isolation, or for a loss to be judged. Raises as `lost` once judged to crash
        workers."""
        return self._health.must_wait(self._name, self._registry.live_decoders, request)

    def is_in_doubt(self) -> bool:
        """Whether it is still undecided if the choice has crashed workers."""
        return self._health.is_in_doubt(self._name)

    def avoided(self) -> set[WorkerKey]:
        """Workers to avoid for this choice while there are others."""
        return self._health.avoided(self._name)

    def placed(self, run: Hashable, workers: Workers) -> None:
        """Record that an attempt was sent to these workers: the one that decodes and the one that prefills."""
        self._workers[run] = workers
        self._health.placed(self._name, workers, beside=self._beside(run))

    def answered(self, run: Hashable) -> None:
        """Record the first token of an attempt."""
        self._failed.clear()
        self._health.answered(self._name, self._workers.get(run, ()))

    def failed(self, run: Hashable, key: WorkerKey) -> None:
        """Record that a worker failed on an attempt while its session is up, or not yet known to be lost.

        See `recheck_failed_workers`.
        """
        self._workers.pop(run, None)
        self._failed.add(key)
        self._health.failed(self._name, key, still=self._beside(run))

    def refused(self, run: Hashable, key: WorkerKey) -> None:
        """Record that a worker refused an attempt, or left: neither counts as a failure."""
        self._workers.pop(run, None)
        self._health.refused(self._name, key, still=self._beside(run))

    def lost(self, run: Hashable, key: WorkerKey, request: RoutedRequest) -> None:
        """Record a worker's loss during an attempt. Raises Unavailable when the request is judged to have crashed
        it."""
        if self._registry.port(key) is not None:
            # The same process is already back.
            self.refused(run, key)
            return
        self._workers.pop(run, None)
        if not self._registry.had_drained(key):
            self._health.lost(self._name, key, request, still=self._beside(run))

    def recheck_failed_workers(self, run: Hashable, request: RoutedRequest) -> None:
        """Report failed workers that are gone by now as lost: peers may notice a crash first. Raises as `lost`."""
        for key in [key for key in self._failed if self._registry.port(key) is None]:
            self._failed.discard(key)
            if not self._registry.had_drained(key):
                still = (*self._workers.get(run, ()), *self._beside(run))
                self._health.lost(self._name, key, request, still=still)

    def left(self, run: Hashable, taken_back: Workers = (), *, was_taken: bool = False) -> None:
        """Record that a run has ended; `taken_back`: workers on which it was cancelled before they answered."""
        self.was_taken |= was_taken
        self._workers.pop(run, None)
        if still := self._beside(run):
            self._health.left(self._name, taken_back, still=still)
        else:
            self._health.forget(self._name, taken_back)

    def _beside(self, run: Hashable) -> Workers:
        beside: Workers = ()
        for other, workers in self._workers.items():
            if other != run:
                beside += workers
        return beside
