"""Publishes a worker to Redis: renews its lease there, and writes its prefix cache.

One task communicates with Redis; engine events only change the journal. Each second the lease is renewed, and what
Redis holds of this worker is compared with what it should hold; if anything is lost (flushed, restored, evicted,
tampered with), all of it is written again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from random import SystemRandom
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from tandem.circuit_breaker import CircuitBreaker
from tandem.cluster_state.entries import SMALL_BYTES, BadEntry, ClusterStateCodec, Footprint, Notice, Process
from tandem.cluster_state.redis_keys import FORGET_MS, ClusterStateKeys
from tandem.cluster_state.redis_settings import RedisSettings
from tandem.rpc.redis_link import REDIS_BREAKER, Command, RedisDown, RedisLink, Refusal, Reply
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockHash
from tandem.values.worker_identity import WorkerIdentity
from worker.decisions.cache_journal import CacheJournal, Write
from worker.session_port import EventSink

if TYPE_CHECKING:
    # GPU machines need not have pydantic.
    from tandem.config.redis import RedisConfig

_log = logging.getLogger(__name__)

GATHER_S = 0.01
"""Pause before a write, so that changes of several steps become one entry."""
CHECK_S = 1.0
KEEP_LEASES = 20
"""Leases after which the cache of a dead worker expires in Redis; readers ignore it as soon as its own lease ends."""


class ClusterStatePublisher:
    """Publishes one worker process; an async context manager, and an EventSink like a session's port."""

    def __init__(
        self,
        notice: Notice,
        settings: RedisSettings,
        codec: ClusterStateCodec,
        *,
        breaker: CircuitBreaker,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """`wall_clock`: seconds since the epoch, used only to drop long expired worker ids."""
        self._notice = notice
        self._settings = settings
        self._codec = codec
        self._keys = ClusterStateKeys(settings.cluster)
        self._clock, self._wall_clock = clock, wall_clock
        self._link = RedisLink(settings, breaker, use="publish", clock=clock)
        self._journal = CacheJournal()
        self._wake = asyncio.Event()
        self._stack = AsyncExitStack()
        self._task: asyncio.Task[None] | None = None
        self._behind_since_s: float | None = None
        self._num_entries = self._num_states = 0

    async def __aenter__(self) -> Self:
        # A task group: a bug in publishing ends the worker instead of only its publishing.
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._task = tasks.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
        # Without `error`, which the task group would wrap in an exception group.
        await self._stack.aclose()
        await self._delete_entries()

    # EventSink

    def send_snapshot(self, next_event: int, stored: Sequence[pb.KVEvent]) -> None:
        """Replace the journal by the whole prefix cache; later events count from `next_event`."""
        self._journal.restart(next_event, [BlockHash(event.block_hash) for event in stored])
        self._on_change()

    def send_events(self, first: int, events: Sequence[pb.KVEvent]) -> bool:
        """Record changes numbered from `first`. Returns False when some are missing: a snapshot must follow."""
        taken = self._journal.apply(first, [(BlockHash(event.block_hash), event.stored) for event in events])
        self._on_change()
        return taken

    def report(self) -> pb.RedisPublisherReport:
        since_s = self._behind_since_s
        return pb.RedisPublisherReport(
            up=self._link.health.is_up,
            connects=self._link.health.connects,
            entries=self._num_entries,
            states=self._num_states,
            lag_s=0.0 if since_s is None else self._clock() - since_s,
        )

    def _on_change(self) -> None:
        if self._behind_since_s is None and self._journal.is_behind:
            self._behind_since_s = self._clock()
        self._wake.set()

    async def _run(self) -> None:
        due_s = self._clock()
        while True:
            try:
                await self._link.allowed()
                if self._clock() >= due_s or self._journal.is_in_doubt:
                    await self._renew_and_check()
                    due_s = self._clock() + min(CHECK_S, self._settings.lease_s / 3)
                self._wake.clear()
                # Not for ever: the lease must be renewed while changes keep coming.
                while self._clock() < due_s and (write := self._journal.next_write()) is not None:
                    await self._write(write)
                if not self._journal.is_behind:
                    self._behind_since_s = None
                await self._sleep_until(due_s)
            except RedisDown:
                self._journal.mark_in_doubt()

    async def _sleep_until(self, due_s: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, due_s - self._clock())):
                await self._wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(GATHER_S)

    async def _renew_and_check(self) -> None:
        process, keys, journal = self._notice.process, self._keys, self._journal
        lease_ms, wall_ms = int(self._settings.lease_s * 1e3), int(self._wall_clock() * 1e3)
        cache_keys = (keys.head(process), keys.state(process), keys.log(process))
        commands: list[Command] = [
            ("SET", keys.notice(process), self._codec.seal_notice(self._notice), "PX", lease_ms),
            ("ZADD", keys.workers, wall_ms, process.mark),
            ("ZREMRANGEBYSCORE", keys.workers, "-inf", wall_ms - FORGET_MS),
            ("ZREMRANGEBYSCORE", keys.workers, wall_ms + FORGET_MS, "+inf"),
            *(("PEXPIRE", key, lease_ms * KEEP_LEASES) for key in cache_keys),
            ("GETRANGE", cache_keys[0], 0, SMALL_BYTES),
            ("STRLEN", cache_keys[1]),
            ("XLEN", cache_keys[2]),
        ]
        *kept, head, state_bytes, num_entries = await self._link.execute(commands, vital=1)
        if isinstance(kept[1], Refusal):  # the key holds a value of another type
            await self._link.execute([("DEL", keys.workers), commands[1]])
        if not journal.on_read(self._extent_in_redis(head, state_bytes, num_entries)) and self._num_states:
            _log.info("this worker's cache in Redis is not what was written: writing all of it again")

    def _extent_in_redis(self, head: Reply, state_bytes: Reply, num_entries: Reply) -> Footprint | None:
        """The extent of the entries in Redis; None if they are inconsistent."""
        if not isinstance(head, bytes) or not isinstance(state_bytes, int) or not state_bytes:
            return None
        try:
            footprint = self._codec.open_head(head, self._notice.process)
        except BadEntry:
            return None
        return footprint if num_entries == footprint.num_entries else None

    async def _write(self, write: Write) -> None:
        await self._link.transact(await self._commands(write))
        self._num_entries += len(write.entries)
        self._num_states += write.state is not None
        self._journal.written(write)

    async def _commands(self, write: Write) -> list[Command]:
        process, keys, codec = self._notice.process, self._keys, self._codec
        head, state, log = keys.head(process), keys.state(process), keys.log(process)
        keep_ms = int(self._settings.lease_s * 1e3) * KEEP_LEASES
        commands: list[Command] = [("DEL", head, state, log)] if write.is_fresh else []
        for entry in write.entries:
            commands.append(("XADD", log, f"{entry.next_sequence}-0", "e", codec.seal_changes(process, entry)))
        if write.state is not None:
            # Off the loop, since it may be megabytes.
            sealed = await asyncio.to_thread(codec.seal_state, process, write.after.state_sequence, write.state)
            commands.append(("SET", state, sealed, "PX", keep_ms))
        if write.keep_from is not None:
            commands.append(("XTRIM", log, "MINID", f"{write.keep_from + 1}-0"))
        commands.append(("PEXPIRE", log, keep_ms))
        commands.append(("SET", head, codec.seal_head(process, write.after), "PX", keep_ms))
        return commands

    async def _delete_entries(self) -> None:
        """Delete this worker's entries, if Redis answers."""
        process, keys = self._notice.process, self._keys
        taken = (keys.notice(process), keys.head(process), keys.state(process), keys.log(process))
        try:
            if self._link.health.is_up:
                await self._link.execute([("DEL", *taken), ("ZREM", keys.workers, process.mark)])
        except RedisDown:
            _log.info("Redis does not answer: this worker's entries will expire with their lease")
        finally:
            await self._link.close()


class SnapshotSource(Protocol):
    """Source of the whole prefix cache (`EngineHost`)."""

    def send_snapshot(self, sink: EventSink) -> None:
        """Have `sink.send_snapshot` called soon, in order with the events."""
        ...


async def publish(stack: AsyncExitStack, publisher: ClusterStatePublisher | None, source: SnapshotSource) -> None:
    """Publish the worker until `stack` is left; no-op without Redis."""
    if publisher is not None:
        source.send_snapshot(publisher)
        await stack.enter_async_context(publisher)


def make_publisher(config: "RedisConfig", secret: bytes, identity: WorkerIdentity) -> ClusterStatePublisher | None:
    """A worker's publisher; None without Redis. Raises ConfigError when its client is not installed."""
    settings = config.redis_settings()
    if settings is None:
        return None
    process = Process(identity.worker_id, identity.incarnation)
    return ClusterStatePublisher(
        Notice(process=process, role=identity.role, address=identity.address),
        settings,
        ClusterStateCodec(secret, settings.cluster),
        breaker=CircuitBreaker(REDIS_BREAKER, SystemRandom()),
        clock=time.monotonic,
        wall_clock=time.time,
    )
