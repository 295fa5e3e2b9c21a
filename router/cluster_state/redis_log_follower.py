"""Follows the workers' logs in Redis into the prefix map, on a connection of its own.

A single task loads the states of workers that are due, some at a time, and in between reads entries of all logs at
once. It yields to the event loop between any two pieces of work: a request waits for at most one of them.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from router.types.worker_view import PrefixChange, WorkerKey
from router.workers.log_positions import LogEntryAction, LogPositions, Reload
from tandem.cluster_state.entries import STATE_BYTES, BadEntry, CacheState, Changes, ClusterStateCodec, Process
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tandem.rpc.redis_link import Command, RedisDown, RedisLink, Refusal, Reply

BLOCK_S = 0.2
"""Longest time that the server blocks waiting for entries: a worker that joins may have to wait this long to be
read."""
LOAD_PAUSE_S = 0.01
"""Pause after a state that took long to apply: dropping a worker's old blocks takes milliseconds, and many states may
be due at once."""
_LONG_S = 0.002
SMALL_STATE_BYTES = 1 << 16
"""States of at most this size are loaded together; a thousand workers may have joined at once."""
STATES_AT_ONCE = 32
"""States loaded before logs are read again."""
_ENTRIES_AT_ONCE = 16
_ENTRY_ID = re.compile(rb"[0-9]{1,20}-[0-9]{1,20}")


KINDS = ("changes", "head", "load", "router", "state", "worker")
"""The kinds of entries in Redis."""


@dataclass(slots=True)
class ClusterStateCounts:
    """Counts of what was read from Redis since the router's start."""

    entries: Counter[str] = field(default_factory=Counter)
    """Log entries by verdict, or `bad`."""
    bad: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(KINDS, 0)))
    """Entries that were malformed or not authentic, by kind: all present from the start, so that a rate sees the
    first."""
    reloads: Counter[str] = field(default_factory=Counter)
    """Loaded states by reason."""


class CacheLogFollower:
    def __init__(
        self,
        view: LogPositions,
        link: RedisLink,
        codec: ClusterStateCodec,
        keys: ClusterStateKeys,
        *,
        counts: ClusterStateCounts,
        apply: Callable[[WorkerKey, PrefixChange], None],
        clock: Callable[[], float],
    ) -> None:
        """`apply` applies a change of a worker's cache (`WorkerRegistry.prefix_changed`)."""
        self._view = view
        self._link = link
        self._codec = codec
        self._keys = keys
        self._counts = counts
        self._apply = apply
        self._clock = clock

    async def run(self) -> None:
        """Run for ever; problems with Redis only delay it."""
        while True:
            await self._link.allowed()
            try:
                due = self._view.due(self._clock())
                now, later = dict(due[:STATES_AT_ONCE]), due[STATES_AT_ONCE:]
                if now:
                    await self._load(now)
                await self._read(self._view.positions(), waits=not later)
            except RedisDown:
                continue

    async def _load(self, due: dict[WorkerKey, Reload]) -> None:
        """Load the states of some workers, as far as there are any."""
        processes = [Process(*key) for key in due]
        found = await self._link.execute(
            [("GETRANGE", self._keys.state(process), 0, SMALL_STATE_BYTES) for process in processes]
        )
        for (key, reason), process, data in zip(due.items(), processes, found, strict=True):
            state = await self._opened(data, process)
            applying_s = 0.0
            for change in self._view.load(key, state, self._clock()):
                began_s = self._clock()
                self._apply(key, change)
                applying_s += self._clock() - began_s
                await asyncio.sleep(0)
            self._counts.reloads[reason.value] += state is not None
            if applying_s > _LONG_S:
                await asyncio.sleep(LOAD_PAUSE_S)

    async def _opened(self, data: Reply, process: Process) -> CacheState | None:
        """Open a state, of which `data` is the beginning; None: there is none, or it is not authentic."""
        if data == b"":
            return None
        try:
            if len(_value(data)) <= SMALL_STATE_BYTES:
                return self._codec.open_state(_value(data), process)
            (whole,) = await self._link.execute([("GETRANGE", self._keys.state(process), 0, STATE_BYTES)])
            if whole == b"":  # It has gone in between.
                return None
            # Off the loop: it may be megabytes.
            return await asyncio.to_thread(self._codec.open_state, _value(whole), process)
        except BadEntry:
            self._counts.bad["state"] += 1
            return None

    async def _read(self, positions: dict[WorkerKey, str], *, waits: bool) -> None:
        """Read entries that follow these positions; `waits`: a short time, if there are none yet."""
        if not positions:
            await asyncio.sleep(BLOCK_S if waits else 0)
            return
        keys = {self._keys.log(Process(*key)).encode(): key for key in positions}
        block_ms = int(BLOCK_S * 1e3) if waits else 1  # 0 would be for ever
        how = ("XREAD", "COUNT", _ENTRIES_AT_ONCE, "BLOCK", block_ms, "STREAMS")
        command: Command = (*how, *keys, *positions.values())
        (reply,) = await self._link.execute([command], patience_s=BLOCK_S, fits=_is_reading)
        if isinstance(reply, Refusal):
            for culprit in await self._find_culprits(keys):
                del positions[culprit]
            # At once, or some of many culprits, which are tried again, would always keep the others' from being read.
            if positions:
                await self._read(positions, waits=False)
            return
        for log, entry_id, data in _entries(reply):
            if (key := keys.get(log)) is None:
                continue
            self._on_entry(key, entry_id, data)
            await asyncio.sleep(0)

    def _on_entry(self, key: WorkerKey, entry_id: str, data: Any) -> None:
        changes: Changes | None = None
        try:
            changes = self._codec.open_changes(_value(data), Process(*key))
        except BadEntry:
            self._counts.bad["changes"] += 1
        verdict, change = self._view.entry(key, entry_id, changes)
        self._counts.entries[verdict.value if changes is not None else "bad"] += 1
        if verdict is LogEntryAction.APPLY and change is not None:
            self._apply(key, change)

    async def _find_culprits(self, keys: dict[bytes, WorkerKey]) -> list[WorkerKey]:
        """Find logs that make reading all of them fail because they are none; set their workers aside, and return
        them."""
        replies = await self._link.execute([("XLEN", log) for log in keys])
        culprits = [key for key, reply in zip(keys.values(), replies, strict=True) if isinstance(reply, Refusal)]
        # If no single log is at fault, Redis refuses the read itself.
        culprits = culprits or list(keys.values())
        for key in culprits:
            self._counts.bad["changes"] += 1
            self._view.set_aside(key, self._clock())
        return culprits


def _value(data: Reply) -> bytes:
    if not isinstance(data, bytes):
        raise BadEntry("no value")
    return data


def _is_reading(reply: Reply) -> bool:
    """Whether a reply has the shape of XREAD's: nothing, or logs with entries with ids."""
    return reply is None or (
        _are_pairs(reply)
        and all(isinstance(log, bytes) and _are_pairs(entries) for log, entries in reply)
        and all(isinstance(i, bytes) and _ENTRY_ID.fullmatch(i) for _, entries in reply for i, _ in entries)
    )


def _are_pairs(reply: Reply) -> bool:
    return isinstance(reply, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in reply)


def _entries(reply: Reply) -> Iterator[tuple[bytes, str, Any]]:
    """Yield log, id and value of each entry; the value is None if it does not have our format."""
    for log, entries in reply or ():
        for entry_id, fields in entries:
            is_ours = isinstance(fields, list) and len(fields) == 2 and fields[0] == b"e"
            yield log, entry_id.decode("ascii"), fields[1] if is_ours else None
