"""The status of the cluster, published once a second to all listeners; without listeners only the history is kept.

A listener holds one status, the newest: one that reads slowly misses some, and the HTTP server disconnects one that
reads nothing.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import orjson

from router.status.snapshot.history import History
from router.status.snapshot.merge import for_tenant, merged
from router.status.snapshot.part import StatusSources, part_of, totals
from tandem.errors import Overloaded, Unavailable

TURN_S = 1.0
MOST_LISTENERS = 32
"""Listeners of one process."""
_FRESH_S = 0.5
"""A status up to this age is reused."""
_log = logging.getLogger(__name__)


class StatusListener:
    """Receives every status, as its tenant may see it."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self._newest: bytes | None = None
        self._woken = asyncio.Event()
        self._closed = False

    def publish(self, status: bytes) -> None:
        """Set the newest status, replacing one that was not read yet."""
        self._newest = status
        self._woken.set()

    def close(self) -> None:
        """End the stream of statuses."""
        self._closed = True
        self._woken.set()

    async def next(self) -> bytes | None:
        """Wait for the newest unread status; None at the end."""
        await self._woken.wait()
        self._woken.clear()
        if self._closed:
            return None
        status, self._newest = self._newest, None
        return status


class StatusFeed:
    """The status feed of one router process; publishes while entered."""

    def __init__(
        self,
        sources: StatusSources,
        *,
        most_listeners: int = MOST_LISTENERS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._sources = sources
        self._others: Callable[[], Awaitable[list[bytes]]] | None = None
        self._most = most_listeners
        self._wall_clock = wall_clock
        self._history = History(clock=sources.clock, before=totals(sources))
        metrics = sources.metrics
        self._bounds = {"ttft": metrics.ttft.bounds, "itl": metrics.itl.bounds}
        self._listeners: dict[StatusListener, None] = {}
        """Connected listeners, ordered by arrival."""
        self._made: tuple[float, dict[str, Any]] | None = None
        self._making = asyncio.Lock()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def num_listeners(self) -> int:
        """Number of connected listeners."""
        return len(self._listeners)

    def merge_with(self, others: Callable[[], Awaitable[list[bytes]]]) -> None:
        """Merge in the parts that `others` returns: those of the processes that share the ports."""
        self._others = others

    def close(self) -> None:
        """Disconnect all listeners: an open page must not hold up a drain."""
        self._closed = True
        for listener in self._listeners:
            listener.close()

    def part(self) -> bytes:
        """Return this process's part of the status, for the other processes."""
        return orjson.dumps(self._part(), option=orjson.OPT_NON_STR_KEYS)

    async def snapshot(self, tenant: str) -> bytes:
        """Return the status as JSON, with the tenant's own decisions. Raises Unavailable once closed."""
        self._check_open()
        return orjson.dumps(for_tenant(await self._status(), tenant))

    @contextmanager
    def listening(self, tenant: str) -> Iterator[StatusListener]:
        """Register a listener while inside. Raises Overloaded when there are too many, Unavailable once closed."""
        self._check_open()
        if len(self._listeners) >= self._most and not self._make_room(tenant):
            message = f"too many status listeners (at most {self._most}); GET /status/snapshot has no such bound"
            raise Overloaded(message, retry_after_s=10.0)
        listener = StatusListener(tenant)
        self._listeners[listener] = None
        try:
            yield listener
        finally:
            self._listeners.pop(listener, None)

    def _make_room(self, tenant: str) -> bool:
        """Disconnect the last listener of the tenant with the most, if `tenant` has fewer; return whether one was."""
        counts = Counter(listener.tenant for listener in self._listeners)
        most, count = counts.most_common(1)[0]
        if count <= counts[tenant] + 1:
            return False
        displaced = next(listener for listener in reversed(self._listeners) if listener.tenant == most)
        displaced.close()
        del self._listeners[displaced]
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("the router is draining", retry_after_s=1.0)

    async def _run(self) -> None:
        is_failing = False
        while True:
            await asyncio.sleep(TURN_S)
            try:
                self._history.record(totals(self._sources))
                await self._publish()
            except Exception:  # noqa: BLE001  # the feed must survive a status that fails
                if not is_failing:
                    _log.exception("cannot build the status")
                is_failing = True
            else:
                is_failing = False

    async def _publish(self) -> None:
        if not self._listeners:
            return
        status = await self._status()
        seen: dict[str, bytes] = {}
        for listener in tuple(self._listeners):
            tenant = listener.tenant
            if tenant not in seen:
                seen[tenant] = orjson.dumps(for_tenant(status, tenant))
            listener.publish(seen[tenant])

    async def _status(self) -> dict[str, Any]:
        async with self._making:
            now_s = self._sources.clock()
            if self._made is None or now_s - self._made[0] >= _FRESH_S:
                self._made = now_s, await self._make()
            return self._made[1]

    async def _make(self) -> dict[str, Any]:
        others = [] if self._others is None else await self._others()
        own = orjson.loads(self.part())
        try:
            status = merged([own, *_read(others)], self._bounds)
        except (LookupError, TypeError, ValueError):
            if not others:
                raise
            _log.exception("cannot parse the status of another router process")
            status = merged([own], self._bounds)
        return {"at_ms": round(self._wall_clock() * 1e3), **status}

    def _part(self) -> Mapping[str, Any]:
        self._history.record(totals(self._sources))
        return part_of(self._sources, self._history)


def _read(parts: Sequence[bytes]) -> list[Mapping[str, Any]]:
    return [part for part in map(orjson.loads, parts) if isinstance(part, dict)]
