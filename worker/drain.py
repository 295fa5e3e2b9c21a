"""Drains a stopping worker, and has its cache migrated before it exits."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Protocol

from tandem.protocol.chain_wire import chains_to_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.cached_chain import MAX_CHAIN_NAMES
from worker.engine_host import EngineHost
from worker.kv_exchange.service import Fabric
from worker.session_port import SessionPort


class MigrationSource:
    """Offers a worker's cache to one router after another, until one has had it fetched by another worker."""

    def __init__(self, host: EngineHost, ports: Callable[[], Iterable[SessionPort]]) -> None:
        self._host = host
        self._ports = ports
        self._offers: dict[SessionPort, asyncio.Event] = {}

    def migration_ended(self, port: SessionPort) -> None:
        """Record that a router's migration of this cache has ended."""
        if (ended := self._offers.get(port)) is not None:
            ended.set()

    async def offer_cache(self, within_s: float) -> None:
        """Offer the cache; returns when its migration has ended, after `within_s`, or at once without a router.

        Only the pool knows which blocks matter most; routers know their names but not their order.
        """
        if within_s <= 0.0 or self._next_port() is None:
            return
        chains = await self._host.call(lambda scheduler: scheduler.blocks.index.chains(MAX_CHAIN_NAMES))
        if not chains:
            return
        offered = chains_to_pb(chains)
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + within_s
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_s):
                while (port := self._next_port()) is not None:
                    ended = self._offers[port] = asyncio.Event()
                    offer = pb.CacheOffer(chains=offered, lends_s=max(0.0, ends_s - loop.time()))
                    port.send(pb.WorkerMessage(cache_offer=offer))
                    if await _first(ended.wait(), port.wait_closed()):
                        return

    def _next_port(self) -> SessionPort | None:
        """The next router; one at a time, so that two workers do not fetch the same blocks."""
        not_offered = [port for port in self._ports() if not port.closed and port not in self._offers]
        return min(not_offered, key=lambda port: port.router, default=None)


async def _first(one: Awaitable[object], other: Awaitable[object]) -> bool:
    """Wait for either; returns whether the first is done."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()


class DrainingWorker(Protocol):
    """Parts of a worker that `leave` uses."""

    fabric: Fabric | None
    migration_source: MigrationSource | None

    async def finish(self) -> None:
        """Accept no new work, and wait for the current work."""


async def leave(worker: DrainingWorker, *, drain_s: float, migration_s: float) -> None:
    """Drain a worker that is stopping; returns within `drain_s`.

    Its cache is offered when its work is done, or earlier if there would be no time left.
    """
    fabric = worker.fabric
    if fabric is not None:
        fabric.migration_target.close()
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            finishing = asyncio.ensure_future(worker.finish())
            try:
                await asyncio.wait({finishing}, timeout=max(0.0, drain_s - migration_s))
                if fabric is not None and worker.migration_source is not None:
                    await worker.migration_source.offer_cache(migration_s)
                await finishing
                if fabric is not None:
                    await fabric.drain()
            finally:
                finishing.cancel()
