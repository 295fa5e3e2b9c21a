"""The follower of workers' caches with many workers at once: all get their turn, and logs are read in between."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from router.cluster_state.redis_log_follower import (
    SMALL_STATE_BYTES,
    STATES_AT_ONCE,
    CacheLogFollower,
    ClusterStateCounts,
)
from router.types.worker_view import PrefixChange, WorkerKey
from router.workers.log_positions import LogPositions
from tandem.cluster_state.entries import STATE_BYTES, Changes, ClusterStateCodec, Process
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tandem.rpc.redis_link import RedisLink, Refusal
from tandem.values.ids import BlockHash, Incarnation, WorkerId

CODEC, KEYS = ClusterStateCodec(b"s" * 32, "c"), ClusterStateKeys("c")
PAUSE_S = 0.01


def worker(number: int) -> WorkerKey:
    return WorkerKey(WorkerId(f"d{number}"), Incarnation(number + 1))


def names(count: int) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(16, "big")) for number in range(count)]


class SlowRedis(RedisLink):
    """States by worker, and an entry in every log that is read from its beginning; each exchange takes a while."""

    def __init__(self, states: dict[WorkerKey, bytes]) -> None:
        self._states = {KEYS.state(Process(*key)): data for key, data in states.items()}
        self._logs = {KEYS.log(Process(*key)).encode(): key for key in states}
        self.not_logs: set[bytes] = set()
        """Keys of logs that hold something else."""
        self.read: list[tuple[int, int]] = []
        """Number of logs of each reading, and how long it was to wait, in milliseconds."""

    async def allowed(self) -> None: ...

    async def execute(self, commands: Sequence[Any], **_: Any) -> list[Any]:
        await asyncio.sleep(PAUSE_S)
        if commands[0][0] == "XLEN":
            return [Refusal("WRONGTYPE") if log in self.not_logs else 1 for _, log in commands]
        if commands[0][0] == "GETRANGE":
            return [self._states.get(key, b"")[: last + 1] for _, key, _, last in commands]
        ((_, _, _, _, block_ms, _, *logs),) = commands
        half = len(logs) // 2
        self.read.append((half, block_ms))
        if self.not_logs.intersection(logs[:half]):
            return [Refusal("WRONGTYPE")]
        found = [self._entry(log) for log, at in zip(logs[:half], logs[half:], strict=True) if at == "1-0"]
        return [found or None]

    def _entry(self, log: bytes) -> list[Any]:
        process = Process(*self._logs[log])
        changes = Changes(first_sequence=1, changes=((BlockHash(b"new" + b"." * 13), True),))
        return [log, [[b"2-0", [b"e", CODEC.seal_changes(process, changes)]]]]


class Followed:
    """What the prefix map would hold."""

    def __init__(self, states: dict[WorkerKey, bytes], keys: Sequence[WorkerKey]) -> None:
        self.view, self.redis, self.counts = LogPositions(), SlowRedis(states), ClusterStateCounts()
        self.known: dict[WorkerKey, list[BlockHash]] = {}
        for key in keys:
            self.view.follow(key)
        self.follower = CacheLogFollower(
            self.view, self.redis, CODEC, KEYS, counts=self.counts, apply=self._apply, clock=time.monotonic
        )

    def _apply(self, key: WorkerKey, change: PrefixChange) -> None:
        if change.snapshot:
            self.known[key] = []
        self.known[key] += [name for name, _ in change.changes]

    async def run_until_known(self, keys: Sequence[WorkerKey], num_names: int) -> None:
        running = asyncio.create_task(self.follower.run())
        try:
            async with asyncio.timeout(20.0):
                while any(len(self.known.get(key, ())) < num_names for key in keys):  # noqa: ASYNC110  # polls
                    await asyncio.sleep(PAUSE_S)
        finally:
            running.cancel()


def sealed(key: WorkerKey, blocks: Sequence[BlockHash] = ()) -> bytes:
    return CODEC.seal_state(Process(*key), 1, blocks)


async def test_workers_without_a_state_do_not_keep_others_from_being_loaded() -> None:
    missing, there = [worker(n) for n in range(30 * STATES_AT_ONCE)], [worker(n) for n in range(2000, 2040)]
    followed = Followed({key: sealed(key) for key in there}, [*missing, *there])
    # A turn takes so long that all that are missing would be due again before the last of them had been asked for.
    await followed.run_until_known(there, 1)
    assert followed.counts.reloads == {"start": len(there)}


async def test_logs_are_read_between_states() -> None:
    keys = [worker(n) for n in range(3 * STATES_AT_ONCE)]
    followed = Followed({key: sealed(key) for key in keys}, keys)
    await followed.run_until_known(keys, 1)
    num_logs = [number for number, _ in followed.redis.read[:3]]
    assert num_logs == [STATES_AT_ONCE, 2 * STATES_AT_ONCE, 3 * STATES_AT_ONCE]
    assert [ms > 1 for _, ms in followed.redis.read[:3]] == [False, False, True], "it waits once all are loaded"
    assert all(ms > 0 for _, ms in followed.redis.read), "0 is for ever"


@pytest.mark.parametrize("num_bytes", [SMALL_STATE_BYTES - 200, SMALL_STATE_BYTES, SMALL_STATE_BYTES + 16, 1 << 20])
async def test_state_of_any_size_is_loaded_whole(num_bytes: int) -> None:
    key, blocks = worker(0), names(num_bytes // 16)
    assert len(sealed(key, blocks)) <= STATE_BYTES
    followed = Followed({key: sealed(key, blocks)}, [key])
    await followed.run_until_known([key], len(blocks) + 1)
    assert followed.known[key][:-1] == blocks


@pytest.mark.parametrize("size", [100, 1 << 20])
async def test_bad_states_are_counted_and_others_are_loaded(size: int) -> None:
    bad, good = worker(0), worker(1)
    followed = Followed({bad: b"x" * size, good: sealed(good)}, [bad, good])
    await followed.run_until_known([good], 1)
    assert followed.counts.bad["state"] >= 1
    assert bad not in followed.known


async def test_logs_that_are_none_do_not_keep_others_from_being_read() -> None:
    bad, good = [worker(n) for n in range(10 * STATES_AT_ONCE)], [worker(n) for n in range(2000, 2040)]
    followed = Followed({key: sealed(key) for key in (*bad, *good)}, [*bad, *good])
    followed.redis.not_logs = {KEYS.log(Process(*key)).encode() for key in bad}
    await followed.run_until_known(good, 1)
    assert not any(followed.known.get(key) for key in bad)
