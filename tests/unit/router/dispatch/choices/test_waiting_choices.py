"""Full but healthy workers: requests wait for room in order, until their deadline."""

import asyncio
import dataclasses
import time
from random import Random

import pytest
from msgspec.structs import replace

from router.dispatch.choices.context import DispatchSettings
from router.dispatch.choices.retry import ChoiceProgress
from router.dispatch.choices.waiting_choices import WaitingChoices
from tandem.errors import DeadlineExceeded, Unavailable
from tandem.v1 import session_pb2 as pb
from tests.support.fake_worker import FakeWorker, Submission, answer, expected_tokens
from tests.support.router.cluster import PROMPT, Cluster, cluster, collect, routed
from tests.support.router.worker_views import LAYOUT, worker


class _Pool:
    """A script that refuses while it is full."""

    def __init__(self, retry_after_s: float = 0.01, code: str = "Unavailable") -> None:
        self.full = True
        self.num_refused = 0
        self.refused = asyncio.Event()
        self._answer = (code, retry_after_s)

    async def __call__(self, submission: Submission) -> None:
        if not self.full:
            await answer(submission)
            return
        code, retry_after_s = self._answer
        submission.refuse(code, "no free KV block", retry_after_s=retry_after_s)
        self.num_refused += 1
        self.refused.set()


def _room(num_free_blocks: int, num_waiting: int = 0) -> pb.WorkerMessage:
    return pb.WorkerMessage(load=pb.LoadSnapshot(num_free_blocks=num_free_blocks, num_waiting=num_waiting))


async def _until_refused(pool: _Pool, times: int) -> None:
    while pool.num_refused < times:
        pool.refused.clear()
        await pool.refused.wait()


async def _until_it_waits(router: Cluster) -> None:
    while not router.dispatcher._context.room._waiters:  # noqa: ASYNC110 - nothing tells that the refusal was read
        await asyncio.sleep(0)


@pytest.mark.parametrize("code", ["Unavailable", "Overloaded"])
async def test_full_pool_waits_without_costing_attempts(code: str) -> None:
    pool = _Pool(code=code)
    async with cluster(FakeWorker("d0", script=pool)) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        await _until_refused(pool, 3)
        pool.full = False
        assert (await client)[0] == expected_tokens(PROMPT, count=8, seed=3)
        router.assert_idle()


async def test_full_refusals_beyond_max_attempts_keep_waiting() -> None:
    pools = [_Pool(), _Pool()]
    async with cluster(*(FakeWorker(f"d{i}", script=pool) for i, pool in enumerate(pools))) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        for pool in pools:
            await _until_refused(pool, 3)
        pools[0].full = False
        assert (await client)[0] == expected_tokens(PROMPT, count=8, seed=3)
        router.assert_idle()


async def test_load_report_with_room_ends_the_wait() -> None:
    pool = _Pool(retry_after_s=3600.0)
    full = FakeWorker("d0", script=pool)
    async with cluster(full) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        await pool.refused.wait()
        await _until_it_waits(router)
        pool.full = False
        full.send(_room(64))
        assert (await client)[0] == expected_tokens(PROMPT, count=8, seed=3)
        assert not router.dispatcher._context.room._waiters
        router.assert_idle()


async def test_waiting_ends_with_the_deadline() -> None:
    pool = _Pool(retry_after_s=3600.0)
    async with cluster(FakeWorker("d0", script=pool)) as router:
        with pytest.raises(DeadlineExceeded):
            await collect(router.generate(routed(deadline_s=time.monotonic() + 0.2)))
        assert pool.num_refused == 1
        assert not router.dispatcher._context.room._waiters
        router.assert_idle()


async def test_waiting_choices_count_as_in_flight() -> None:
    pool = _Pool(retry_after_s=3600.0)
    async with cluster(FakeWorker("d0", script=pool)) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        await pool.refused.wait()
        assert router.dispatcher.num_inflight == 1
        client.cancel()


async def test_joining_worker_ends_the_wait() -> None:
    pool = _Pool(retry_after_s=3600.0)
    full = FakeWorker("d0", script=pool)
    async with cluster(full) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        await pool.refused.wait()
        await _until_it_waits(router)
        await full.crash()
        async with FakeWorker("d0", incarnation=2, port=full.port):
            assert (await client)[0] == expected_tokens(PROMPT, count=8, seed=3)


async def test_successor_of_last_worker_is_waited_for() -> None:
    async def draining(submission: Submission) -> None:
        leaving.send(pb.WorkerMessage(draining=pb.Draining(reason="SIGTERM")))
        submission.refuse("Unavailable", "this worker is draining", retry_after_s=1.0)

    leaving = FakeWorker("d0", script=draining)
    async with cluster(leaving) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        await router.registry.until(lambda: any(w.draining for w in router.registry.snapshots()))
        await leaving.crash()
        await router.registry.until_live(0)
        async with FakeWorker("d0", incarnation=2, port=leaving.port):
            assert (await client)[0] == expected_tokens(PROMPT, count=8, seed=3)
        assert leaving.submissions.qsize() == 1
        router.assert_idle()


async def test_expected_worker_not_joining_ends_the_wait() -> None:
    async def draining(submission: Submission) -> None:
        leaving.send(pb.WorkerMessage(draining=pb.Draining(reason="SIGTERM")))
        submission.refuse("Unavailable", "this worker is draining", retry_after_s=1.0)

    leaving = FakeWorker("d0", script=draining)
    async with cluster(leaving, settings=DispatchSettings(max_queue_s=0.05)) as router:
        with pytest.raises(Unavailable, match="the expected one has not joined") as caught:
            await collect(router.generate(routed()))
        assert caught.value.retry_after_s == 1.0
        assert leaving.submissions.qsize() == 1


def test_waiting_times_grow_and_respect_retry_after() -> None:
    progress = ChoiceProgress(prompt_length=1, max_tokens=1, max_attempts=1)
    progress.record_full_worker(worker("d0").info.key, Unavailable("full", retry_after_s=1.0))
    waits_s = [progress.wait_for_room_s(Random(0)) for _ in range(6)]
    assert waits_s[0] >= 1.0
    assert waits_s[1] == 2 * waits_s[0]
    assert waits_s[-1] == waits_s[-2] == 8 * waits_s[0]


def test_waiting_choices_wakes_first_that_fit_by_priority() -> None:
    room, woken = WaitingChoices(), list[str]()
    places = {name: room.new_place(priority) for name, priority in (("a", 0), ("b", 0), ("urgent", -1), ("c", 0))}
    for name, num_tokens in (("c", 16), ("b", 48), ("a", 17), ("urgent", 16)):
        room.enter(places[name], num_tokens, lambda name=name: woken.append(name))
    snapshot = worker("d0")
    block_size = snapshot.info.layout.block_size
    assert block_size == 16
    room.on_load(replace(snapshot, load=replace(snapshot.load, num_free_blocks=64, num_waiting=1)))
    room.on_load(replace(snapshot, draining=True, load=replace(snapshot.load, num_free_blocks=64)))
    assert woken == []
    room.on_load(replace(snapshot, load=replace(snapshot.load, num_free_blocks=4, num_waiting=0)))
    assert woken == ["urgent", "a"]
    room.leave(places["b"])
    room.on_load(replace(snapshot, load=replace(snapshot.load, num_free_blocks=4, num_waiting=0)))
    assert woken == ["urgent", "a", "c"]


def test_waiting_choices_count_the_blocks_of_windows() -> None:
    room, woken = WaitingChoices(), list[str]()
    for name in ("a", "b"):
        room.enter(room.new_place(0), 48, lambda name=name: woken.append(name))
    snapshot = worker("d0", layout=dataclasses.replace(LAYOUT, windowed_layers=(1,), window=24))
    for num_free, expected in ((5, []), (11, ["a"]), (6, ["a", "b"])):
        room.on_load(replace(snapshot, load=replace(snapshot.load, num_free_blocks=num_free)))
        assert woken == expected


def test_waiting_choices_tell_what_memory_they_wait_for() -> None:
    room = WaitingChoices()
    small, large, other = (room.new_place(0) for _ in range(3))
    for place, num_tokens in ((large, 50), (small, 10), (other, 30), (other, 20)):
        room.enter(place, num_tokens, lambda: None)
    assert room.memory() == (10, 80)
    room.leave(small)
    room.leave(small)
    assert room.memory() == (20, 70)
    room.enter(small, 15, lambda: None)
    assert room.memory() == (15, 85)
    snapshot = worker("d0")
    room.on_load(replace(snapshot, load=replace(snapshot.load, num_free_blocks=1)))
    assert room.memory() == (20, 70)
    for place in (large, other):
        room.leave(place)
    room.enter(large, 60, lambda: None)
    assert room.memory() == (60, 60)
