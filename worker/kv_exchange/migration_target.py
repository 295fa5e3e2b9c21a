"""The receiving side of cache migration: this worker fetches what it can use of a leaving worker's cache.

Hottest blocks first, a few chains at a time, into spare room: free blocks, and the least recently used half of this
cache. Each chain is priced like any fetch. No request waits for it; repeated failures end it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from engine.scheduler.scheduler import Scheduler
from tandem.errors import InvalidRequest
from tandem.v1 import session_pb2 as pb
from worker.decisions.migration_fetch import FetchPlan, plan_fetch
from worker.engine_host import EngineHost
from worker.kv_exchange.fetch import Declined
from worker.kv_exchange.fetcher import Fetcher
from worker.session_port import SessionPort

_log = logging.getLogger(__name__)

_MAX_FETCHES = 2
"""Maximum number of concurrent fetches; the rest of the fetcher's limit is left to waiting prompts."""
_MAX_FAILURES = 2
"""Consecutive failures after which the leaving worker counts as gone."""

MOVED, FAILED, NO_TIME = "moved", "failed", "no_time"
HELD, NO_ROOM = Declined.HELD.value, Declined.NO_ROOM.value

Leaver = tuple[str, int]
"""worker_id and incarnation of a leaving worker."""


class MigrationTarget:
    """Fetches the caches of leaving workers, one after another. On the event loop's thread."""

    def __init__(
        self, host: EngineHost, fetcher: Fetcher, *, spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    ) -> None:
        self.num_blocks: Counter[str] = Counter()
        """Blocks offered so far by outcome, in blocks of this worker's pool."""
        self._host = host
        self._fetcher = fetcher
        self._spawn = spawn
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting_ports: dict[Leaver, set[SessionPort]] = {}
        self._closed = False

    def migrate(self, port: SessionPort, order: pb.FetchCache) -> None:
        """Fetch the cache of a leaving worker, as a router orders; answers on `port` when nothing more is fetched.

        An order about a worker whose migration is running joins it: the leaving worker turns to a second router when
        the first has gone.
        """
        leaver = order.holder.worker_id, order.holder.incarnation
        if (ports := self._waiting_ports.get(leaver)) is not None:
            ports.add(port)
            return
        self._waiting_ports[leaver] = {port}
        plan = None if self._closed else self._plan_of(order)
        if plan is None:
            self._answer(leaver)
            return
        now_s = asyncio.get_running_loop().time()
        migration = _Migration(self._host, self._fetcher, plan)
        task = self._spawn(self._run(migration, ends_s=now_s + order.within_s))
        self._tasks.add(task)
        # Not within the task, which may be cancelled before it starts.
        task.add_done_callback(lambda task: self._on_ended(task, leaver, migration, now_s))

    def report(self) -> list[pb.MigratedBlocks]:
        """Blocks offered so far, by outcome."""
        block_bytes = self._host.parts.layout.worker_block_bytes
        return [
            pb.MigratedBlocks(outcome=outcome, blocks=count, num_bytes=count * block_bytes)
            for outcome, count in self.num_blocks.items()
        ]

    def close(self) -> None:
        """Fetch nothing more, because this worker is leaving too."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def _plan_of(self, order: pb.FetchCache) -> FetchPlan | None:
        try:
            return plan_fetch(
                order,
                own_block_size=self._host.parts.layout.block_size,
                own_max_tokens=self._host.parts.config.max_model_len - 1,
                own_prefill_tokens_per_s=self._host.rates.prefill_tokens_per_s,
            )
        except InvalidRequest as error:
            _log.warning("declined a cache migration: %s", error.message)
            return None

    async def _run(self, migration: "_Migration", *, ends_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(ends_s), self._turn:
                await migration.run(await self._host.call(_room))

    def _on_ended(self, task: "asyncio.Task[None]", leaver: Leaver, migration: "_Migration", began_s: float) -> None:
        self._tasks.discard(task)
        counts = migration.counts()
        self.num_blocks.update(counts)
        _log.info(
            "cache migrated from %s in %.3f s: %s blocks",
            leaver[0],
            asyncio.get_running_loop().time() - began_s,
            ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()) if count) or "no",
        )
        self._answer(leaver)

    def _answer(self, leaver: Leaver) -> None:
        worker_id, incarnation = leaver
        for port in self._waiting_ports.pop(leaver):
            port.send(pb.WorkerMessage(cache_fetched=pb.CacheFetched(worker_id=worker_id, incarnation=incarnation)))


class _Migration:
    """The fetches of one plan."""

    def __init__(self, host: EngineHost, fetcher: Fetcher, plan: FetchPlan) -> None:
        self._fetcher = fetcher
        self._plan = plan
        self._spare_blocks = host.parts.config.num_blocks // 4
        self._room = 0
        """Number of blocks that may still be used."""
        self._fetches: list[asyncio.Task[str]] = []
        self._num_names: list[int] = []
        """For each chain so far, the number of names that are fetched, or skipped for another reason than room."""
        self._num_failures = 0
        self._counts: Counter[str] = Counter()

    def counts(self) -> Counter[str]:
        """Blocks by outcome, including those not reached in time."""
        rest = range(len(self._num_names), len(self._plan.chains))
        num_left = sum(self._plan.num_blocks(index) for index in rest)
        return self._counts + Counter({FAILED if self._has_failed else NO_TIME: num_left})

    @property
    def _has_failed(self) -> bool:
        return self._num_failures >= _MAX_FAILURES

    async def run(self, room: int) -> None:
        """Fetch in order, at most `room` blocks; when cancelled, what has landed stays."""
        self._room = room
        gate = asyncio.Semaphore(_MAX_FETCHES)
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._plan.chains)):
                await gate.acquire()
                if self._has_failed:
                    return
                self._fetches.append(group.create_task(self._fetch(index)))
                self._fetches[-1].add_done_callback(lambda _: gate.release())

    async def _fetch(self, index: int) -> str:
        """Fetch one chain; returns the outcome of most of its blocks."""
        num_offered = self._plan.num_blocks(index)
        num_wanted = min(self._plan.num_usable(index), self._room)
        self._room -= num_wanted
        self._num_names.append(self._plan.num_names(index, num_wanted))
        self._counts[NO_ROOM] += num_offered - num_wanted
        outcome, num_moved = NO_TIME, 0
        try:
            before = await self._parent_outcome(index)
            if before in (FAILED, NO_ROOM):
                outcome = before
            elif num_wanted:
                outcome, num_moved = await self._adopt(index, num_wanted)
            else:
                # Too short for a block: the chains that continue it may still be fetched together with it.
                outcome = NO_ROOM if num_offered else before
        finally:
            num_moved = min(num_moved, num_wanted)  # blocks of its parent may have come with it
            self._counts[MOVED] += num_moved
            self._counts[FAILED if outcome == MOVED else outcome] += num_wanted - num_moved
            if not num_moved:
                self._room += num_wanted
        return outcome

    async def _parent_outcome(self, index: int) -> str:
        """Outcome of the chain that this one continues; parents come earlier in the plan, so this cannot deadlock."""
        chain = self._plan.chains[index]
        if chain.parent is None:
            return HELD
        outcome = await self._fetches[chain.parent]
        return NO_ROOM if chain.position > self._num_names[chain.parent] else outcome

    async def _adopt(self, index: int, num_blocks: int) -> tuple[str, int]:
        """Fetch the first blocks of a chain; returns the outcome and the number of blocks gained."""
        root, names = self._plan.path(index, num_blocks)
        result = await self._fetcher.prefetch(
            root,
            names,
            self._plan.holder,
            prefill_tokens_per_s=self._plan.prefill_tokens_per_s,
            spare_blocks=self._spare_blocks,
        )
        if isinstance(result, Declined):
            return result.value, 0
        self._num_failures = 0 if result else self._num_failures + 1
        return (MOVED if result else FAILED), result


def _room(scheduler: Scheduler) -> int:
    """Number of blocks that may be used: the free ones, and the colder half of the cached ones."""
    blocks = scheduler.blocks
    return max(0, blocks.pool.num_free - blocks.num_promised) + blocks.index.num_parked // 2
