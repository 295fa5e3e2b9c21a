"""A successor's part: a worker that was told to stop leaves its cache; this one fetches of it what it can use.

Hottest blocks first, a few runs at a time, into room that nobody needs: free blocks, and the half of what is cached
here that was not used for longest. Each run is priced as any fetch is. No request waits; whatever goes wrong ends it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from engine.host import EngineHost
from engine.scheduler import Scheduler
from fabric.fetch import Declined
from fabric.fetching import Fetcher
from tandem.block_hash import HASH_BLOCK_TOKENS
from tandem.cached_chain import CachedChain, chains_from_pb
from tandem.errors import InvalidRequest
from tandem.ids import BlockHash
from tandem.prefix_holder import PrefixHolder, holder_from_pb
from tandem.session_port import SessionPort
from tandem.v1 import session_pb2 as pb

_log = logging.getLogger(__name__)

_MAX_FETCHES = 2
"""At once: the other places are for prompts that wait."""
_MAX_FAILURES = 2
"""In a row: then the worker that leaves has left."""

MOVED, FAILED, NO_TIME = "moved", "failed", "no_time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estate:
    """What one worker leaves."""

    holder: PrefixHolder
    chains: tuple[CachedChain, ...]
    block_size: int
    """Tokens of the blocks that the chains name."""
    prefill_tokens_per_s: float


class Heir:
    """One worker's inheritances, one after another. On the event loop's thread."""

    def __init__(
        self, host: EngineHost, fetcher: Fetcher, *, spawn: Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
    ) -> None:
        self.num_blocks: Counter[str] = Counter()
        """Of what was offered, by what became of it, in blocks of this worker's pool."""
        self._host = host
        self._fetcher = fetcher
        self._spawn = spawn
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def inherit(self, port: SessionPort, order: pb.Inherit) -> None:
        """A router names this worker successor of another; it is told when nothing more is fetched."""
        if self._closed:
            _answer(port, order)
            return
        task = self._spawn(self._inherit(port, order))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def report(self) -> list[pb.InheritedBlocks]:
        """What became of what was offered so far."""
        block_bytes = self._host.parts.layout.worker_block_bytes
        return [
            pb.InheritedBlocks(outcome=outcome, blocks=count, num_bytes=count * block_bytes)
            for outcome, count in self.num_blocks.items()
        ]

    def close(self) -> None:
        """This worker leaves, too: fetch nothing more."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _inherit(self, port: SessionPort, order: pb.Inherit) -> None:
        ends_s = asyncio.get_running_loop().time() + order.within_s
        try:
            estate = _estate_of(order, own_block_size=self._host.parts.layout.block_size)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(ends_s), self._turn:
                    await self._take(estate)
        except InvalidRequest as error:
            _log.warning("an inheritance is declined: %s", error.message)
        finally:
            _answer(port, order)

    async def _take(self, estate: Estate) -> None:
        room = await self._host.call(_room)
        prefill_tokens_per_s = self._host.rates.prefill_tokens_per_s or estate.prefill_tokens_per_s
        taking = _Taking(self._host, self._fetcher, replace(estate, prefill_tokens_per_s=prefill_tokens_per_s), room)
        before = asyncio.get_running_loop().time()
        try:
            await taking.run()
        finally:
            counts = taking.counts()
            self.num_blocks.update(counts)
            _log.info(
                "inherited from %s in %.3f s: %s blocks",
                estate.holder.worker_id,
                asyncio.get_running_loop().time() - before,
                ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no",
            )


class _Taking:
    """One estate being fetched."""

    def __init__(self, host: EngineHost, fetcher: Fetcher, estate: Estate, room: int) -> None:
        parts = host.parts
        self._fetcher = fetcher
        self._estate = estate
        self._room = room
        """Blocks that may still be taken."""
        self._spare_blocks = parts.config.num_blocks // 4
        self._max_names = (parts.config.max_model_len - 1) // HASH_BLOCK_TOKENS
        self._block_size = parts.layout.block_size
        self._at = {name: (i, j) for i, chain in enumerate(estate.chains) for j, name in enumerate(chain.names)}
        self._runs: list[asyncio.Task[str]] = []
        self._num_failures = 0
        self._counts: Counter[str] = Counter()
        self._num_settled = 0

    def counts(self) -> Counter[str]:
        """Blocks by outcome; of what was not come to, too."""
        rest = sum(self._num_own_blocks(len(chain.names)) for chain in self._estate.chains[self._num_settled :])
        return self._counts + Counter({FAILED if self._has_failed else NO_TIME: rest})

    @property
    def _has_failed(self) -> bool:
        return self._num_failures >= _MAX_FAILURES

    def _num_own_blocks(self, num_names: int) -> int:
        return num_names * self._estate.block_size // self._block_size

    async def run(self) -> None:
        """Fetch in order; when cancelled, what has landed stays."""
        gate = asyncio.Semaphore(_MAX_FETCHES)
        async with asyncio.TaskGroup() as group:
            for chain in self._estate.chains:
                await gate.acquire()
                if self._has_failed:
                    return
                self._runs.append(group.create_task(self._fetch(chain)))
                self._runs[-1].add_done_callback(lambda _: gate.release())

    async def _fetch(self, chain: CachedChain) -> str:
        """What became of a run of blocks, or of most of it."""
        self._num_settled += 1
        num_offered = self._num_own_blocks(len(chain.names))
        num_names = min(len(chain.names), self._room * self._block_size // self._estate.block_size)
        num_wanted = self._num_own_blocks(num_names)
        self._room -= num_wanted
        self._counts[Declined.NO_ROOM.value] += num_offered - num_wanted
        outcome, num_moved = NO_TIME, 0
        try:
            # The blocks before these first; they were begun before, so this cannot go in circles.
            before = "" if chain.from_root else await self._runs[self._at[chain.after][0]]
            if not num_wanted or before in (FAILED, Declined.NO_ROOM.value):
                outcome = before or Declined.NO_ROOM.value
            else:
                outcome, num_moved = await self._adopt(chain, num_names)
        finally:
            num_moved = min(num_moved, num_wanted)  # what another run was to bring may have come with it
            self._counts[MOVED] += num_moved
            self._counts[FAILED if outcome == MOVED else outcome] += num_wanted - num_moved
            if not num_moved:
                self._room += num_wanted
        return outcome

    async def _adopt(self, chain: CachedChain, num_names: int) -> tuple[str, int]:
        """What became of the first blocks of a run, and how many came."""
        root, names = self._path(chain, num_names)
        result = await self._fetcher.adopt(
            root,
            names[: self._max_names],
            self._estate.holder,
            prefill_tokens_per_s=self._estate.prefill_tokens_per_s,
            spare_blocks=self._spare_blocks,
        )
        if isinstance(result, Declined):
            return result.value, 0
        self._num_failures = 0 if result else self._num_failures + 1
        return (MOVED if result else FAILED), result

    def _path(self, chain: CachedChain, num_names: int) -> tuple[BlockHash, list[BlockHash]]:
        """The root, and names of all hash blocks from there to the run's end.

        Of the hash blocks inside one block only the last has a name here; nobody asks for the others.
        """
        runs = [chain.names[:num_names]]
        while not chain.from_root:
            index, position = self._at[chain.after]
            chain = self._estate.chains[index]
            runs.append(chain.names[: position + 1])
        each = self._estate.block_size // HASH_BLOCK_TOKENS
        return chain.after, [name for run in reversed(runs) for name in run for _ in range(each)]


def _estate_of(order: pb.Inherit, *, own_block_size: int) -> Estate:
    """Raises InvalidRequest."""
    if not order.HasField("holder") or not order.holder.address:
        raise InvalidRequest("holder needs worker_id and address", param="holder")
    if order.block_size % HASH_BLOCK_TOKENS or not order.block_size or own_block_size % order.block_size:
        raise InvalidRequest(
            f"blocks of {order.block_size} tokens do not make up blocks of {own_block_size}", param="block_size"
        )
    return Estate(
        holder=holder_from_pb(order.holder),
        chains=chains_from_pb(order.chains),
        block_size=order.block_size,
        prefill_tokens_per_s=order.prefill_tokens_per_s,
    )


def _room(scheduler: Scheduler) -> int:
    """Blocks to spend: what is free, and the colder half of what is cached."""
    blocks = scheduler.blocks
    return max(0, blocks.pool.num_free - blocks.num_promised) + blocks.index.num_parked // 2


def _answer(port: SessionPort, order: pb.Inherit) -> None:
    told = pb.Inherited(worker_id=order.holder.worker_id, incarnation=order.holder.incarnation)
    port.send(pb.WorkerMessage(inherited=told))
