"""The columns follow the registry, cell by cell, and equal its snapshots."""

from dataclasses import replace as replaced
from random import Random

import pytest
from msgspec.structs import replace

from router.types.worker_view import WorkerKey, WorkerLoad, WorkerSnapshot
from router.workers.booking import Booking
from router.workers.columns import PoolView
from router.workers.peer_load import PeerShare
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.values.ids import Incarnation
from tests.support.router.worker_views import LAYOUT, port, view_of, worker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def seen(registry: WorkerRegistry, now_s: float) -> dict[WorkerKey, WorkerSnapshot]:
    view = registry.view()
    return {
        info.key: replace(pool.snapshot(row, now_s), answered_s=0.0)
        for pool in (view.decode, view.prefill)
        for row, info in enumerate(pool.members.infos)
    }


def rates(pool: PoolView, row: int) -> tuple[float, ...]:
    return tuple(float(column[row]) for column in (pool.prefill_ms, pool.step_ms, pool.link_ms))


def random_load(rng: Random) -> WorkerLoad:
    return WorkerLoad(
        num_running=rng.randrange(5),
        num_waiting=rng.randrange(3),
        backlog_tokens=rng.randrange(500),
        num_free_blocks=rng.randrange(100),
        prefill_tokens_per_s=rng.choice([0.0, 1000.0]),
        decode_step_s=rng.choice([0.0, 0.01]),
        kv_bytes_per_s=rng.choice([0.0, 1e6]),
        context_tokens=rng.choice([0, 800]),
    )


def test_cluster_view_equals_registry_after_any_events() -> None:
    rng, clock = Random(5), Clock()
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=clock)
    sent: list[Booking] = []
    for step in range(2_000):
        name = rng.choice(["d0", "d1", "d2", "p0", "p1"])
        live = {s.info.key.worker_id: s.info.key for s in registry.snapshots()}
        key = live.get(name)
        if key is None:
            info = worker(name).info
            registry.joined(replace(info, key=WorkerKey(info.key.worker_id, Incarnation(step))), port())
        else:
            match rng.randrange(9):
                case 0 | 1:
                    registry.load_changed(key, random_load(rng))
                case 2 | 3:
                    sent.append(registry.assign(key, rng.randrange(300)))
                case 4 if sent:
                    rng.choice(sent).add_tokens(rng.randrange(10))
                case 5 if sent:
                    # Of any worker: live, gone or back.
                    sent.pop(rng.randrange(len(sent))).end()
                case 6:
                    registry.penalise(key, rng.random())
                case 7:
                    registry.loaded_elsewhere(
                        key, PeerShare(backlog_tokens=rng.randrange(900), num_requests=rng.randrange(9))
                    )
                case _ if rng.random() < 0.2:
                    registry.draining(key, "test")
                case _ if rng.random() < 0.2:
                    registry.left(key, "test")
        clock.now_s += 0.01
        assert seen(registry, clock.now_s) == {s.info.key: replace(s, answered_s=0.0) for s in registry.snapshots()}
        for pool in (registry.view().decode, registry.view().prefill):
            incomplete = {
                name
                for index, name in enumerate(("prefill_ms", "step_ms", "link_ms"))
                if any(rates(pool, row)[index] == 0.0 for row in range(len(pool.members)))
            }
            assert pool.unmeasured == incomplete
            loads = pool.loads[: len(pool.members)]
            assert (pool.attention is not None) == any(load.context_tokens for load in loads)


def test_cluster_view_is_read_only() -> None:
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=Clock())
    registry.joined(worker("d0").info, port())
    with pytest.raises(ValueError, match="read-only"):
        registry.view().decode.backlog[0] = 1.0


def test_record_peer_load_counts_until_replaced() -> None:
    registry, key = WorkerRegistry(prefix_map=PrefixMap(), clock=Clock()), worker("d0").info.key
    registry.joined(worker("d0").info, port())
    registry.assign(key, 100)
    registry.loaded_elsewhere(key, PeerShare(backlog_tokens=300, num_requests=2))
    assert (registry.snapshots()[0].backlog_tokens, registry.snapshots()[0].num_active) == (400, 3)
    # The worker's own word knows of more than routers do, or of less.
    registry.load_changed(key, WorkerLoad(num_running=5, backlog_tokens=1_000))
    assert (registry.snapshots()[0].backlog_tokens, registry.snapshots()[0].num_active) == (1_000, 5)
    registry.loaded_elsewhere(key, PeerShare(backlog_tokens=0, num_requests=0))
    registry.load_changed(key, WorkerLoad())
    assert (registry.snapshots()[0].backlog_tokens, registry.snapshots()[0].num_active) == (100, 1)


@pytest.mark.parametrize("window", [1, 16, 17, 24, 33, 100])
@pytest.mark.parametrize("windowed", [(), (0,), (0, 1)])
def test_worker_room_counts_the_blocks_of_all_groups(window: int, windowed: tuple[int, ...]) -> None:
    layout = replaced(LAYOUT, num_layers=3, windowed_layers=windowed, window=window if windowed else 0)
    info = worker("d0", layout=layout).info
    num_groups = len(layout.groups) - 1
    for num_tokens in range(300):
        token_blocks = -(-num_tokens // 16)
        in_window = [i for i in range(token_blocks) if (i + 1) * 16 > max(0, (num_tokens - 1) // 16 * 16 + 1 - window)]
        assert info.blocks_for(num_tokens) == token_blocks + num_groups * len(in_window)
    for num_blocks in range(40):
        longest = info.tokens_in(num_blocks)
        assert info.blocks_for(longest) <= num_blocks < info.blocks_for(longest + 1)


def test_columns_and_pools_hold_what_all_groups_take() -> None:
    layout = replaced(LAYOUT, num_layers=3, windowed_layers=(0, 1), window=24)
    one = worker("d0", layout=layout, num_blocks=40, load=WorkerLoad(num_free_blocks=20))
    pool = view_of([one]).decode
    assert pool.free_tokens.tolist() == [(20 - 2 * 3) * 16]
    assert pool.members.pool_tokens.tolist() == [(40 - 2 * 3) * 16]
