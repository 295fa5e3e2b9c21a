"""Reports which workers answer this router to its parent process, which relies on it to add and remove workers.

A worker that joins after the servers have opened is first probed for a token. Those that were there before were
verified by the predecessor.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from router.fleet.probes import Canary
from router.types.worker_view import WorkerKey
from router.workers.registry import WorkerRegistry
from tandem.process.lifetime import REACHES
from tandem.values.roles import WorkerRole

_AGAIN_S = 1.0
_GATHER_S = 0.02
"""Pause before a look at all workers: a hundred may come or go at once."""
_log = logging.getLogger(__name__)


class ReachableWorkers:
    """Publishes the set of reachable workers while entered, whenever it changes."""

    def __init__(
        self,
        registry: WorkerRegistry,
        canary: Canary,
        *,
        addresses: Callable[[], Mapping[WorkerKey, str]],
        publish: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """`addresses`: returns the address of every worker whose session is up."""
        self._registry = registry
        self._canary = canary
        self._addresses = addresses
        self._publish = publish
        self._published: frozenset[str] | None = None
        self._proven: set[WorkerKey] = set()
        self._asking: dict[WorkerKey, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def addresses(self) -> frozenset[str]:
        """Addresses of the workers that answer; none before this is entered."""
        return self._published or frozenset()

    async def __aenter__(self) -> Self:
        self._proven = self._registry.keys()
        self._registry.watch(self._check_soon)
        self._check()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._registry.unwatch(self._check_soon)
        if self._timer is not None:
            self._timer.cancel()
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)

    def _check_soon(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GATHER_S, self._check)

    def _check(self) -> None:
        self._timer = None
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
        if reached != self._published:
            self._published = reached
            self._publish({REACHES: sorted(reached)})

    async def _prove(self, key: WorkerKey) -> None:
        """Probe a worker until it has produced a token, or is gone."""
        found = self._registry.find(key)
        joined_s = math.inf if found is None else found.answered_s
        try:
            while (worker := self._registry.find(key)) is not None:
                # A full router refuses the canary; then a token of any request is proof too.
                if await self._answers(key) or worker.answered_s > joined_s:
                    self._proven.add(key)
                    break
                await asyncio.sleep(_AGAIN_S)
        finally:
            del self._asking[key]
        self._check_soon()

    async def _answers(self, key: WorkerKey) -> bool:
        try:
            return await self._canary.probe(key)
        except Exception:  # noqa: BLE001  # ending here would block a cluster change that waits for this worker
            _log.exception("the canary for %s failed; it is sent again", key.worker_id)
            return False
