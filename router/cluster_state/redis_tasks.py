"""This router's background tasks with Redis: there are three, and no request ever waits for one of them.

They follow the workers' logs into the prefix map, poll the registry of workers, and exchange loads with other routers.
Requests do not come here: what they need is already in the worker registry.
"""

import asyncio
import logging
import time
from contextlib import AsyncExitStack, suppress
from random import SystemRandom
from types import TracebackType
from typing import Self

from router.admission.shared_rate_limits import SharedRateLimits
from router.api.adapters import ServedAdapters
from router.cluster_state.redis_log_follower import CacheLogFollower, ClusterStateCounts
from router.cluster_state.redis_poll import EntryReader, LoadExchange, RegistryPoll
from router.cluster_state.worker_directory import KnownAddresses, RedisDirectory
from router.workers.log_positions import LogPositions
from router.workers.peer_load import PeerLoads
from router.workers.registry import WorkerRegistry
from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.entries import BadEntry, ClusterStateCodec
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.rpc.redis_link import REDIS_BREAKER, LinkHealth, RedisDown, RedisLink
from tandem.rpc.worker_directory import WorkerAddress
from tandem.values.ids import Incarnation

_log = logging.getLogger(__name__)

TURN_S = 0.15
"""Seconds between two exchanges of loads."""
FORGET_LEASES = 10


class RouterClusterState:
    """Runs the tasks; an async context manager, to be entered before the fleet that watches its directory."""

    def __init__(
        self,
        settings: RedisSettings,
        *,
        secret: bytes,
        router: Incarnation,
        registry: WorkerRegistry,
        limits: SharedRateLimits,
        stated: frozenset[WorkerAddress],
    ) -> None:
        """`stated`: workers that the configuration names. Raises ConfigError when redis is not installed."""
        clock = time.monotonic
        codec, keys = ClusterStateCodec(secret, settings.cluster), ClusterStateKeys(settings.cluster)
        self.counts = ClusterStateCounts()
        self.directory = RedisDirectory(KnownAddresses(stated, forget_s=FORGET_LEASES * settings.lease_s))
        self._registry = registry
        self._limits = limits
        self._peers = PeerLoads(lease_s=settings.lease_s, turn_s=TURN_S)
        self._clock = clock
        self._view = LogPositions()
        self._logs = RedisLink(settings, CircuitBreaker(REDIS_BREAKER, SystemRandom()), use="follow", clock=clock)
        self._poll = RedisLink(settings, CircuitBreaker(REDIS_BREAKER, SystemRandom()), use="poll", clock=clock)
        self._follower = CacheLogFollower(
            self._view, self._logs, codec, keys, counts=self.counts, apply=registry.prefix_changed, clock=clock
        )
        reader = EntryReader(codec, self.counts)
        self._who = RegistryPoll(self._poll, reader, keys, view=self._view, directory=self.directory)
        self._exchange = LoadExchange(
            self._poll,
            reader,
            keys,
            router=router,
            peers=self._peers,
            limits=limits,
            wall_clock=time.time,
        )
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._registry.peer_loads = self._peers.at
        self._registry.watch(self._workers_changed)
        self._workers_changed()
        # In a task group, so that a bug of ours ends the router instead of silently stopping its updates.
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._tasks = [tasks.create_task(self._follower.run()), tasks.create_task(self._take_turns())]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._registry.unwatch(self._workers_changed)
        for task in self._tasks:
            task.cancel()
        # `error` is not passed on: the task group would wrap it in a group of its own.
        await self._stack.aclose()
        if self._poll.health.is_up:
            with suppress(RedisDown):
                await self._exchange.leave()
        await self._logs.close()
        await self._poll.close()

    def share_adapters(self, adapters: ServedAdapters) -> None:
        """Exchange the changes of adapters with the other routers, too."""
        self._exchange.share_adapters(adapters)

    @property
    def links(self) -> tuple[LinkHealth, ...]:
        """Health of the connections."""
        return self._logs.health, self._poll.health

    @property
    def is_published(self) -> bool:
        """Whether the other routers can see what this one has in flight."""
        return self._poll.health.is_up and self._exchange.is_published

    @property
    def num_followed(self) -> int:
        """Number of workers whose logs are followed."""
        return len(self._view.positions())

    @property
    def num_peers(self) -> int:
        """Number of other routers whose loads count."""
        return len(self._peers)

    def _workers_changed(self) -> None:
        live, followed = self._registry.keys(), self._view.followed
        for key in followed - live:
            self._view.drop(key)
        for key in live - followed:
            self._view.follow(key)

    async def _take_turns(self) -> None:
        fault = ""
        while True:
            try:
                await self._poll.allowed()
                await self._who.turn(self._clock())
                if await self._exchange.turn(self._registry.in_flight(), self._clock()):
                    self._registry.peers_changed()
                fault = ""
            except RedisDown:
                _log.debug("could not exchange loads: %s", self._poll.health.reason)
            except (BadEntry, ValueError) as error:
                # If our own load cannot be encoded, the others miss this update; that is no reason to end streams.
                if fault != (fault := str(error)):
                    _log.exception("could not exchange loads because of an error in this router")
            if self._peers.expire(self._clock()):
                self._registry.peers_changed()
            self._limits.keep(self._peers.routers)
            await asyncio.sleep(TURN_S)
