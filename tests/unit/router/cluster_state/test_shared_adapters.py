"""Changes of adapters travel in the loads that routers publish in Redis."""

import errno
import logging
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any, cast

import pytest

from router.admission.shared_rate_limits import SharedRateLimits
from router.api.adapters import ServedAdapters
from router.cluster_state.redis_log_follower import ClusterStateCounts
from router.cluster_state.redis_poll import EntryReader, LoadExchange
from router.workers.peer_load import PeerLoads
from tandem.cluster_state.entries import AdapterChange, ClusterStateCodec
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tandem.rpc.redis_link import Command, RedisLink, Reply
from tandem.values.ids import Incarnation
from tests.support.router.adapters import adapter_of

KEYS = ClusterStateKeys("c")


class _Redis:
    """Values and one sorted set, as far as loads need them."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.routers: dict[str, int] = {}

    async def execute(self, commands: Sequence[Command]) -> list[Reply]:
        return [self._reply(*command) for command in commands]

    def _reply(self, name: str, key: Any, *rest: Any) -> Reply:
        match name:
            case "SET":
                self.values[key] = rest[0]
            case "GETRANGE":
                return self.values.get(key, b"")
            case "ZADD":
                self.routers[rest[1]] = rest[0]
            case "ZREVRANGE":
                return [mark.encode() for mark in self.routers]
        return b"OK"


class _NoLimits:
    def tallies(self) -> tuple[()]:
        return ()

    def apply_remote(self, *_: object) -> None:
        pass


def _exchange(redis: _Redis, router: int) -> LoadExchange:
    return LoadExchange(
        cast(RedisLink, redis),
        EntryReader(ClusterStateCodec(b"a secret of the cluster", "c"), ClusterStateCounts()),
        KEYS,
        router=Incarnation(router),
        peers=PeerLoads(lease_s=3.0),
        limits=cast(SharedRateLimits, _NoLimits()),
        wall_clock=lambda: 1000.0,
    )


async def _turns(rng: Random, *exchanges: LoadExchange) -> None:
    """As many turns as it takes, in no order, until each has heard of each."""
    for number in range(4):
        for exchange in rng.sample(exchanges, len(exchanges)):
            await exchange.turn((), float(number))


async def test_load_exchange_adapters_reach_every_router_also_one_that_starts_later() -> None:
    redis, rng = _Redis(), Random(1)
    served = [ServedAdapters("tiny", [adapter_of("sql")]) for _ in range(3)]
    exchanges = [_exchange(redis, 10 + number) for number in range(3)]
    for exchange, adapters in zip(exchanges[:2], served, strict=False):
        exchange.share_adapters(adapters)
    served[0].add(adapter_of("legal"))
    served[0].remove("sql")
    await _turns(rng, *exchanges)
    assert [one.name for one in served[1].available("")] == ["legal"]
    # It has heard of them before it serves any itself ...
    exchanges[2].share_adapters(served[2])
    assert [one.name for one in served[2].available("")] == ["legal"]
    # ... and passes on what it has heard, when the router of that change is gone.
    served[1].add(adapter_of("sql", version=2))
    await _turns(rng, *exchanges)
    assert served[0].get("sql", "") == served[2].get("sql", "") == adapter_of("sql", version=2)


class _Store:
    """Changes that the processes of a host share, which cannot be read or written while there is an `error`."""

    def __init__(self) -> None:
        self.error: OSError | None = None
        self.written: list[AdapterChange] = []
        self.num_tries = 0

    def read(self) -> tuple[AdapterChange, ...]:
        if self.error is not None:
            raise self.error
        return ()

    def write(self, changes: Iterable[AdapterChange]) -> None:
        self.num_tries += 1
        if self.error is not None:
            raise self.error
        self.written += changes


async def test_load_exchange_adapters_that_cannot_be_stored_are_stored_later(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="router.api.adapters")
    redis, rng, store, now_s = _Redis(), Random(1), _Store(), 1000.0
    served = [ServedAdapters("tiny", wall_clock=lambda: now_s) for _ in range(2)]
    exchanges = [_exchange(redis, 10 + number) for number in range(2)]
    for exchange, adapters in zip(exchanges, served, strict=True):
        exchange.share_adapters(adapters)
    served[1].store = store
    store.error = OSError(errno.ENOSPC, "No space left on device")
    served[0].add(adapter_of("legal"))
    await _turns(rng, *exchanges)
    assert served[1].get("legal", "") == adapter_of("legal"), "this process serves it"
    served[1].add(adapter_of("sql"))
    failures = [record.message for record in caplog.records]
    assert len(failures) == 2, "one of reading, one of writing"
    assert all("No space left on device" in message for message in failures)
    num_tries = store.num_tries
    await _turns(rng, *exchanges)
    assert store.num_tries == num_tries, "not at every turn"
    store.error = None
    now_s += 5.0
    await _turns(rng, *exchanges)
    assert {change.name for change in store.written} == {"legal", "sql"}
    num_tries = store.num_tries
    now_s += 5.0
    await _turns(rng, *exchanges)
    assert store.num_tries == num_tries
    assert len(caplog.records) == 2
