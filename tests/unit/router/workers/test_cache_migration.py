"""The target and extent of a leaving worker's cache migration, and losses on the way."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from router.types.session_events import CacheOffer, MigrationPlan
from router.types.worker_view import WorkerKey, WorkerLoad, WorkerSnapshot
from router.workers.cache_migration import CacheMigrations, choose_migration_target, plan_migration
from tandem.values.cached_chain import CachedChain
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tests.support.router.worker_views import LAYOUT, worker


def made(name: str, *, free: int = 100, block_size: int = 16, **more: Any) -> WorkerSnapshot:
    load = WorkerLoad(num_free_blocks=free, prefill_tokens_per_s=more.pop("rate", 0.0))
    one = worker(name, load=load, layout=dataclasses.replace(LAYOUT, block_size=block_size), **more)
    return replace(one, info=replace(one.info, handoff_address=f"{name}:1"))


def names(first: int, count: int) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(16, "big")) for number in range(first, first + count))


CHAINS = (
    CachedChain(after=BlockHash(bytes(16)), from_root=True, names=names(1, 10)),
    CachedChain(after=names(3, 1)[0], from_root=False, names=names(20, 10)),
)


def chosen(leaving: WorkerSnapshot, *workers: WorkerSnapshot) -> str | None:
    target = choose_migration_target(leaving, [leaving, *workers])
    return None if target is None else target.info.key.worker_id


def test_migration_target_has_most_room_then_least_load() -> None:
    assert chosen(made("d0"), made("d1", free=50), made("d2", free=60)) == "d2"
    assert chosen(made("d0"), made("d1", free=50), made("d2", free=30, block_size=32)) == "d2", "in tokens"
    assert chosen(made("d0"), made("d1", active=3), made("d2", active=2)) == "d2"
    assert chosen(made("d0"), made("d2"), made("d1")) == "d1"


def test_migration_target_prefers_same_pool() -> None:
    assert chosen(made("p0"), made("d1", free=500), made("p1", free=5)) == "p1"
    assert chosen(made("p0"), made("d1", free=500)) == "d1"


@pytest.mark.parametrize(
    "unfit",
    [
        made("d1", free=0),
        replace(made("d1"), draining=True),
        made("d1", transports=frozenset({"tcp"})),
        worker("d1", layout=dataclasses.replace(LAYOUT, num_layers=3)),
        made("d1", block_size=8),
    ],
)
def test_migration_target_excludes_unable_workers(unfit: WorkerSnapshot) -> None:
    leaving = made("d0", transports=frozenset({"shm"}))
    assert chosen(leaving, unfit) is None
    assert chosen(leaving) is None


def test_migration_of_worker_without_handoff_has_no_target() -> None:
    assert chosen(worker("d0"), made("d1")) is None


def test_migration_plan_is_bounded_by_targets_room() -> None:
    leaving = made("d0", block_size=16)
    share = plan_migration(CHAINS, leaving, made("d1", free=7, block_size=32))
    assert share is not None
    assert [len(chain.names) for chain in share.chains] == [10, 4]
    assert (share.block_size, share.holder.worker_id, share.holder.address) == (16, "d0", "d0:1")
    assert plan_migration(CHAINS, leaving, made("d1", free=0)) is None


class Port:
    def __init__(self) -> None:
        self.migrated: list[tuple[MigrationPlan, float, float]] = []
        self.num_ended = 0

    def migrate(self, share: MigrationPlan, *, within_s: float, prefill_tokens_per_s: float) -> None:
        self.migrated.append((share, within_s, prefill_tokens_per_s))

    def end_migration(self) -> None:
        self.num_ended += 1


class World:
    def __init__(self, *workers: WorkerSnapshot) -> None:
        self.workers = {one.info.key: one for one in workers}
        self.ports = {key: Port() for key in self.workers}
        self.now_s = 100.0
        ports: Any = self.ports
        self.migrations = CacheMigrations(
            snapshots=lambda: list(self.workers.values()), port=ports.get, clock=lambda: self.now_s
        )

    def offer_cache(self, name: str, within_s: float = 5.0) -> None:
        self.workers[key(name)] = replace(self.workers[key(name)], draining=True)
        self.migrations.cache_offered(key(name), CacheOffer(chains=CHAINS, lends_s=within_s))

    def leave(self, name: str) -> None:
        del self.workers[key(name)]
        del self.ports[key(name)]
        self.migrations.left(key(name))

    def whom(self, target: str) -> list[str]:
        return [share.holder.worker_id for share, _, _ in self.ports[key(target)].migrated]

    def fetch_orders(self) -> list[str]:
        return [name.worker_id for name, port in self.ports.items() if port.migrated]


def key(name: str) -> WorkerKey:
    return WorkerKey(WorkerId(name), Incarnation(1))


def test_migration_runs_from_offer_to_end() -> None:
    world = World(made("d0", rate=10.0), made("d1"), made("d2", free=10, rate=30.0))
    world.offer_cache("d0")
    assert world.fetch_orders() == ["d1"]
    [(share, within_s, rate)] = world.ports[key("d1")].migrated
    assert (share.holder.worker_id, share.chains, within_s, rate) == ("d0", CHAINS, 5.0, 30.0)
    world.migrations.migration_ended(key("d2"), key("d0"))  # it was not asked
    assert not world.ports[key("d0")].num_ended
    world.migrations.migration_ended(key("d1"), key("d0"))
    world.migrations.migration_ended(key("d1"), key("d0"))
    assert world.ports[key("d0")].num_ended == 1
    assert not len(world.migrations)


def test_migration_without_target_ends_at_once() -> None:
    world = World(made("d0"))
    world.offer_cache("d0")
    assert world.ports[key("d0")].num_ended == 1
    assert not len(world.migrations)


def test_migration_lost_target_is_replaced_in_time() -> None:
    world = World(made("d0"), made("d1"), made("d2", free=10), made("d3", free=5))
    world.offer_cache("d0")
    world.now_s += 2.0
    world.leave("d1")
    [(_, within_s, _)] = world.ports[key("d2")].migrated
    assert within_s == pytest.approx(3.0)
    world.now_s += 3.0
    world.leave("d2")
    assert not world.ports[key("d3")].migrated
    assert world.ports[key("d0")].num_ended == 1
    assert not len(world.migrations)


def test_migration_of_lost_worker_is_forgotten() -> None:
    world = World(made("d0"), made("d1"))
    world.offer_cache("d0")
    world.leave("d0")
    assert not len(world.migrations)
    world.migrations.migration_ended(key("d1"), key("d0"))
    assert not len(world.migrations)


def test_migration_leaving_workers_are_no_targets() -> None:
    world = World(made("d0"), made("d1"))
    world.offer_cache("d0")
    world.offer_cache("d1")
    assert world.fetch_orders() == ["d1"], "who leaves later is asked before that is known"
    assert world.ports[key("d1")].num_ended == 1
    world.migrations.migration_ended(key("d1"), key("d0"))
    assert world.ports[key("d0")].num_ended == 1, "nobody else is there"
    assert not len(world.migrations)


def test_migration_draining_target_is_replaced_in_time() -> None:
    world = World(made("d0"), made("d1"), made("d2", free=50), made("d3", free=5))
    world.offer_cache("d0")
    world.now_s += 1.0
    world.offer_cache("d1")
    assert world.fetch_orders() == ["d1", "d2"]
    world.migrations.migration_ended(key("d1"), key("d0"))
    assert world.whom("d2") == ["d1", "d0"]
    assert not world.ports[key("d0")].num_ended
    assert world.ports[key("d2")].migrated[1][1] == pytest.approx(4.0)
    world.migrations.migration_ended(key("d1"), key("d0"))  # it is that no more
    assert not world.ports[key("d0")].num_ended
    world.migrations.migration_ended(key("d2"), key("d0"))
    world.migrations.migration_ended(key("d2"), key("d1"))
    assert [world.ports[key(name)].num_ended for name in ("d0", "d1")] == [1, 1]
    assert world.fetch_orders() == ["d1", "d2"]
    assert not len(world.migrations)


def test_migration_offer_of_serving_worker_is_ignored() -> None:
    world = World(made("d0"), made("d1"))
    for _ in range(3):
        world.migrations.cache_offered(key("d0"), CacheOffer(chains=CHAINS, lends_s=5.0))
    assert not world.fetch_orders()
    assert not len(world.migrations)


def test_migration_second_offer_is_ignored() -> None:
    """Neither during a migration nor afterwards, until the worker has left and come back."""
    world = World(made("d0"), made("d1"))
    for _ in range(3):
        world.offer_cache("d0")
    assert world.whom("d1") == ["d0"]
    world.migrations.migration_ended(key("d1"), key("d0"))
    world.offer_cache("d0")
    assert world.whom("d1") == ["d0"]
    assert world.ports[key("d0")].num_ended == 1
    world.migrations.left(key("d0"))
    world.offer_cache("d0")
    assert world.whom("d1") == ["d0", "d0"]
