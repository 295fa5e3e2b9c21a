"""What the runs of one choice tell `WorkerHealth` of the workers that they are on. Pure.

A choice has one run, or two for a while (`router.dispatch.hedge_run`): they stand and fall together, for what ends
workers is in the request that both carry. A run that another router or reader continues has a standing of its own.
"""

from collections.abc import Hashable

from router.types.requests import RoutedRequest
from router.types.worker_view import WorkerKey
from router.workers.health import WorkerHealth
from router.workers.registry import WorkerRegistry
from tandem.values.ids import RequestId

Workers = tuple[WorkerKey, ...]


class ChoiceHealthReporter:
    """One choice's; `run` tells its runs apart."""

    def __init__(self, index: int, request: RoutedRequest, health: WorkerHealth, registry: WorkerRegistry) -> None:
        self.index = index
        self._name = RequestId(f"{request.request_id}.{request.resumptions}-{index}")
        self._health = health
        self._registry = registry
        self._workers: dict[Hashable, Workers] = {}
        self._failed: set[WorkerKey] = set()
        """Workers that failed on it and were alive then."""
        self.was_taken = False
        """Whether a worker took any run of it that has ended, or may have."""
        self.was_adopted = False
        """Whether a worker still had what it goes on with."""

    def must_wait(self, request: RoutedRequest) -> bool:
        """Whether it is to go alone and cannot yet, or is in doubt. Raises as `lost`, when doubt has turned out so."""
        return self._health.must_wait(self._name, self._registry.live_decoders, request)

    def is_in_doubt(self) -> bool:
        """Whether workers may have been ended by it, and that is not known yet."""
        return self._health.is_in_doubt(self._name)

    def shunned(self) -> set[WorkerKey]:
        """Workers that it is better not put on."""
        return self._health.shunned(self._name)

    def placed(self, run: Hashable, workers: Workers) -> None:
        """An attempt was sent to these: who decodes it, and who computes its prompt."""
        self._workers[run] = workers
        self._health.placed(self._name, workers, beside=self._beside(run))

    def answered(self, run: Hashable) -> None:
        """The first token of an attempt came."""
        self._failed.clear()
        self._health.answered(self._name, self._workers.get(run, ()))

    def failed(self, run: Hashable, key: WorkerKey) -> None:
        """A worker failed on an attempt and is still here, or has not been missed yet (see `mourn`)."""
        self._workers.pop(run, None)
        self._failed.add(key)
        self._health.failed(self._name, key, still=self._beside(run))

    def refused(self, run: Hashable, key: WorkerKey) -> None:
        """A worker would not take an attempt, or is gone: no fault of anybody."""
        self._workers.pop(run, None)
        self._health.refused(self._name, key, still=self._beside(run))

    def lost(self, run: Hashable, key: WorkerKey, request: RoutedRequest) -> None:
        """A worker was lost under an attempt. Raises Unavailable when the request is taken to have ended it."""
        if self._registry.port(key) is not None:
            # It is back already, the same process.
            self.refused(run, key)
            return
        self._workers.pop(run, None)
        if not self._registry.went_in_order(key):
            self._health.lost(self._name, key, request, still=self._beside(run))

    def mourn(self, run: Hashable, request: RoutedRequest) -> None:
        """Those that failed earlier may have been about to die: a peer can hear of it first. Raises as `lost`."""
        for key in [key for key in self._failed if self._registry.port(key) is None]:
            self._failed.discard(key)
            if not self._registry.went_in_order(key):
                still = (*self._workers.get(run, ()), *self._beside(run))
                self._health.lost(self._name, key, request, still=still)

    def left(self, run: Hashable, taken_back: Workers = (), *, was_taken: bool = False) -> None:
        """A run has ended; `taken_back`: of these workers, which had not answered."""
        self.was_taken |= was_taken
        self._workers.pop(run, None)
        if still := self._beside(run):
            self._health.left(self._name, taken_back, still=still)
        else:
            self._health.gone(self._name, taken_back)

    def _beside(self, run: Hashable) -> Workers:
        return tuple(key for other, workers in self._workers.items() if other != run for key in workers)
