"""Reads the registry in Redis and publishes this router's load, a few times a second.

`RegistryPoll` reads which workers exist and how far the followed logs reach; `LoadExchange` exchanges the load of each
router. Both share one connection, one after the other; what is written is leased, so that a router that dies soon stops
being counted.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from router.admission.shared_rate_limits import SharedRateLimits
from router.api.adapters import ServedAdapters
from router.cluster_state.redis_log_follower import ClusterStateCounts
from router.cluster_state.worker_directory import MAX_ADDRESSES, RedisDirectory
from router.workers.log_positions import LogPositions
from router.workers.peer_load import PeerLoads
from tandem.cluster_state.entries import (
    LOAD_BYTES,
    MAX_HEARD,
    SMALL_BYTES,
    AdapterChange,
    BadEntry,
    ClusterStateCodec,
    Notice,
    Process,
    RouterLoad,
    Share,
    TenantTally,
)
from tandem.cluster_state.redis_keys import FORGET_MS, ClusterStateKeys
from tandem.rpc.redis_link import Command, RedisLink, Refusal, Reply, UntrustedReply
from tandem.values.ids import Incarnation

_log = logging.getLogger(__name__)

LOOK_S = 1.0
_T = TypeVar("_T")
_Content = tuple[tuple[Share, ...], tuple[TenantTally, ...], tuple[Incarnation, ...], tuple[AdapterChange, ...]]
"""Published state of a router: its load at each worker, its use by each tenant, the other routers it sees, and changes
of adapters."""


class EntryReader:
    """Opens entries; one that is malformed or not authentic is counted, and treated as missing."""

    def __init__(self, codec: ClusterStateCodec, counts: ClusterStateCounts) -> None:
        self.codec = codec
        self._counts = counts

    def opened(self, kind: str, data: Reply, open_: Callable[[bytes], _T]) -> _T | None:
        """Open an entry; None if it is missing or invalid."""
        if data == b"":
            return None
        try:
            if isinstance(data, bytes):
                return open_(data)
        except BadEntry:
            pass
        self._counts.bad[kind] += 1
        return None

    def members(self, kind: str, reply: Reply, parse: Callable[[str], _T]) -> list[_T]:
        """Parse the members of a sorted set."""
        found: list[_T] = []
        for member in reply if isinstance(reply, list) else [reply]:
            try:
                found.append(parse(member.decode("utf-8")))
            except (BadEntry, AttributeError, ValueError):
                self._counts.bad[kind] += 1
        return found


class RegistryPoll:
    """Polls the registry: feeds the directory with workers, and the view with log heads."""

    def __init__(
        self,
        link: RedisLink,
        reader: EntryReader,
        keys: ClusterStateKeys,
        *,
        view: LogPositions,
        directory: RedisDirectory,
    ) -> None:
        self._link = link
        self._reader = reader
        self._keys = keys
        self._view = view
        self._directory = directory
        self._due_s = 0.0
        self._spoilt = False

    async def turn(self, now_s: float) -> None:
        """Poll if it is time. Raises RedisDown."""
        if now_s < self._due_s:
            return
        keys, codec = self._keys, self._reader.codec
        followed = list(self._view.followed)
        heads = [("GETRANGE", keys.head(Process(*key)), 0, SMALL_BYTES) for key in followed]
        marks, *found = await self._ask([("ZREVRANGE", keys.workers, 0, MAX_ADDRESSES - 1), *heads])
        for key, data in zip(followed, found, strict=True):
            process = Process(*key)
            head = self._reader.opened("head", data, partial(codec.open_head, process=process))
            if head is not None:
                self._view.head(key, head)
        processes = self._reader.members("worker", marks, Process.parse)
        notices = [("GETRANGE", keys.notice(process), 0, SMALL_BYTES) for process in processes]
        replies = await self._link.execute(notices) if notices else []
        self._directory.on_notices(self._notices(processes, replies), now_s)
        self._due_s = now_s + LOOK_S

    async def _ask(self, commands: list[Command]) -> list[Reply]:
        if self._spoilt:
            # Workers register themselves again within a second.
            await self._link.execute([("DEL", self._keys.workers)])
            self._spoilt = False
        try:
            return await self._link.execute(commands)
        except UntrustedReply:
            self._spoilt = True
            raise

    def _notices(self, processes: list[Process], replies: list[Reply]) -> Iterator[Notice]:
        codec = self._reader.codec
        for process, data in zip(processes, replies, strict=True):
            notice = self._reader.opened("worker", data, partial(codec.open_notice, process=process))
            if notice is not None:
                yield notice


class LoadExchange:
    """Publishes to the other routers what this one has in flight, and reads what they have."""

    def __init__(
        self,
        link: RedisLink,
        reader: EntryReader,
        keys: ClusterStateKeys,
        *,
        router: Incarnation,
        peers: PeerLoads,
        limits: SharedRateLimits,
        wall_clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._reader = reader
        self._keys = keys
        self._router = router
        self._peers = peers
        self._limits = limits
        self._wall_clock = wall_clock
        self._told: _Content | None = None
        self._renew_s = 0.0
        self._sequence = 0
        self._others: tuple[Incarnation, ...] = ()
        self._spoilt = False
        self._adapters = ServedAdapters("")
        self.is_published = False
        """Whether Redis accepts the load that this router publishes."""

    def share_adapters(self, adapters: ServedAdapters) -> None:
        """Publish the changes of adapters from now on, and merge those of other routers."""
        adapters.merge(self._adapters.changes)
        self._adapters = adapters

    async def turn(self, in_flight: tuple[Share, ...], now_s: float) -> bool:
        """Write our load if it changed or its lease is due, and read the others'; return whether those changed.

        Raises RedisDown.
        """
        keys, codec, others = self._keys, self._reader.codec, self._others
        content = (in_flight, self._limits.tallies(), others, self._adapters.changes)
        must_write = self._spoilt or content != self._told or now_s >= self._renew_s
        writing = self._writing(content) if must_write else []
        reading: list[Command] = [("GETRANGE", keys.load(router), 0, LOAD_BYTES) for router in others]
        try:
            replies = await self._link.execute([*writing, ("ZREVRANGE", keys.routers, 0, MAX_HEARD - 1), *reading])
        except UntrustedReply:
            self._spoilt = True
            raise
        self._spoilt = False
        if writing and not self._written(replies[: len(writing)], content, now_s):
            await self._link.close()  # after a failover the same address may belong to another server
        members, *values = replies[len(writing) :]
        changed = False
        for router, data in zip(others, values, strict=True):
            load = self._reader.opened("load", data, partial(codec.open_load, router=router))
            changed |= self._peers.remove(router) if load is None else self._heard(load, now_s)
        found = self._reader.members("router", members, _parse_router)
        self._others = tuple(sorted(router for router in found if router != self._router))
        return changed

    def _heard(self, load: RouterLoad, now_s: float) -> bool:
        if self._router not in load.hears:
            # Written by a router that has not seen us yet, or the restored entry of a dead one.
            return False
        is_news = self._peers.update(load, now_s)
        if is_news:
            self._limits.apply_remote(load.router, load.tallies)
            self._adapters.merge(load.adapters)
        return is_news

    async def leave(self) -> None:
        """Remove our load. Raises RedisDown."""
        keys = self._keys
        await self._link.execute([("DEL", keys.load(self._router)), ("ZREM", keys.routers, f"{self._router:x}")])

    def _writing(self, content: _Content) -> list[Command]:
        self._sequence += 1
        shares, tallies, hears, changes = content
        load = RouterLoad(
            router=self._router,
            sequence=self._sequence,
            shares=shares,
            tallies=tallies,
            hears=hears,
            adapters=changes,
        )
        wall_ms, routers = int(self._wall_clock() * 1e3), self._keys.routers
        sealed = self._reader.codec.seal_load(load)
        # The others register themselves again before their leases end.
        fresh: list[Command] = [("DEL", routers)] if self._spoilt else []
        return [
            *fresh,
            ("SET", self._keys.load(self._router), sealed, "PX", int(self._peers.lease_s * 1e3)),
            ("ZADD", routers, wall_ms, f"{self._router:x}"),
            ("ZREMRANGEBYSCORE", routers, "-inf", wall_ms - FORGET_MS),
            ("ZREMRANGEBYSCORE", routers, wall_ms + FORGET_MS, "+inf"),
        ]

    def _written(self, replies: list[Reply], content: _Content, now_s: float) -> bool:
        refusal = next((reply for reply in replies if isinstance(reply, Refusal)), None)
        if (refusal is None) != self.is_published:
            self.is_published = refusal is None
            if refusal is not None:
                _log.warning("Redis rejects this router's load: %s", refusal)
        # After a rejection, wait as long as a lease lasts before trying again.
        self._told, self._renew_s = content, now_s + self._peers.lease_s / 3
        return self.is_published


def _parse_router(mark: str) -> Incarnation:
    router = int(mark, 16)
    if not 0 < router < 1 << 63:
        raise BadEntry("no router")
    return Incarnation(router)
