"""Which workers answer this router: it tells whoever started it, who changes the set of workers by that.

A worker that joins after the doors have opened is asked for a token first. Those that were there before have the
predecessors' word.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from router.fleet.probes import Canary
from router.types.worker_view import WorkerKey, WorkerSnapshot
from router.workers.registry import WorkerRegistry
from tandem.process.lifetime import REACHES
from tandem.values.roles import WorkerRole

_AGAIN_S = 1.0
_log = logging.getLogger(__name__)


class ReachableWorkers:
    """Tells while entered, each time that it is another set."""

    def __init__(
        self,
        registry: WorkerRegistry,
        canary: Canary,
        *,
        addresses: Callable[[], Mapping[WorkerKey, str]],
        tell: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """`addresses`: of every session that is up."""
        self._registry = registry
        self._canary = canary
        self._addresses = addresses
        self._tell = tell
        self._told: frozenset[str] | None = None
        self._proven: set[WorkerKey] = set()
        self._asking: dict[WorkerKey, asyncio.Task[None]] = {}

    @property
    def addresses(self) -> frozenset[str]:
        """Of those that answer; none before it is entered."""
        return self._told or frozenset()

    async def __aenter__(self) -> Self:
        self._proven = {worker.info.key for worker in self._registry.snapshots()}
        self._registry.watch(self._check)
        self._check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._registry.unwatch(self._check)
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _check(self) -> None:
        workers = {worker.info.key: worker for worker in self._registry.snapshots()}
        self._proven &= workers.keys()
        for key, worker in workers.items():
            if worker.info.role is not WorkerRole.DECODE:
                self._proven.add(key)
            elif key not in self._proven and key not in self._asking:
                self._asking[key] = asyncio.get_running_loop().create_task(self._prove(key))
        addresses = self._addresses()
        willing = [key for key in self._proven if key in addresses and not workers[key].draining]
        reached = frozenset(addresses[key] for key in willing)
        if reached != self._told:
            self._told = reached
            self._tell({REACHES: sorted(reached)})

    async def _prove(self, key: WorkerKey) -> None:
        """Until it has given a token, or is gone."""
        first = self._find(key)
        try:
            while (worker := self._find(key)) is not None:
                # A full router has no room for the question; then a token of anybody's request is proof, too.
                if await self._answers(key) or (first is not None and worker.answered_s > first.answered_s):
                    self._proven.add(key)
                    break
                await asyncio.sleep(_AGAIN_S)
        finally:
            del self._asking[key]
        self._check()

    async def _answers(self, key: WorkerKey) -> bool:
        try:
            return await self._canary.ask(key)
        except Exception:  # noqa: BLE001  # if this ended here, a change of the cluster would wait for it in vain
            _log.exception("asking %s for a token failed; it is asked again", key.worker_id)
            return False

    def _find(self, key: WorkerKey) -> WorkerSnapshot | None:
        return next((worker for worker in self._registry.snapshots() if worker.info.key == key), None)
