"""A worker's session breaks, and the same process returns in a new one after a network or scheduler stall."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from tandem.values.outputs import FinishReason
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Submission, answer, expected_tokens, hold
from tests.support.router.cluster import LONG_PROMPT, PROMPT, Cluster, cluster, collect, routed
from tests.support.router.delta_readers import SlowReader

WAIT_S = 20.0


async def _break_sessions(workers: Sequence[FakeWorker], router: Cluster) -> None:
    """Their connections end; they serve again, as the same incarnations."""
    count = len(router.registry.snapshots())
    for worker in workers:
        await worker.crash()
    await router.registry.until_live(count - len(workers))
    for worker in workers:
        await worker.start()
    await router.registry.until_live(count)


async def _begin(submission: Submission) -> None:
    submission.give(submission.tokens[:2])


@pytest.mark.parametrize("count", [1, 3])
async def test_stream_continues_after_all_sessions_reconnect(count: int) -> None:
    workers = [FakeWorker(f"d{i}", script=_begin, incarnation=10 + i) for i in range(count)]
    async with cluster(*workers) as router, asyncio.timeout(WAIT_S):
        async with aclosing(router.generate(routed())) as stream:
            shown = [token.token_id for token in (await anext(stream)).tokens]
            for worker in workers:
                worker.script = answer
            await _break_sessions(workers, router)
            assert shown + (await collect(stream))[0] == expected_tokens(PROMPT, count=8, seed=3)
        router.assert_idle()


async def test_worker_reconnecting_at_once_keeps_its_stream() -> None:
    worker, reader = FakeWorker("d0", script=_begin), SlowReader()
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        stream = asyncio.create_task(router.dispatcher.run(routed(), reader))
        await reader.waiting.wait()
        worker.script = answer
        await _break_sessions([worker], router)
        reader.room.set()
        await stream
        tokens = [token.token_id for delta in reader.taken for token in delta.tokens]
        assert tokens == expected_tokens(PROMPT, count=8, seed=3)
        router.assert_idle()


async def test_failed_worker_may_be_tried_in_next_session() -> None:
    attempts, held = [], asyncio.Event()

    async def fail_hold_answer(submission: Submission) -> None:
        attempts.append(submission)
        if len(attempts) == 1:
            submission.give([], finish=FinishReason.ERROR)
        elif len(attempts) == 2:
            held.set()
        else:
            await answer(submission)

    workers = [FakeWorker(f"d{i}", script=fail_hold_answer, incarnation=10 + i) for i in range(2)]
    async with cluster(*workers) as router, asyncio.timeout(WAIT_S):
        stream = asyncio.create_task(collect(router.generate(routed())))
        await held.wait()
        (failed,) = (w for w in workers if attempts[0] is w.submissions.get_nowait())
        (other,) = (w for w in workers if w is not failed)
        await _break_sessions([failed], router)
        await other.crash()
        assert (await stream)[0] == expected_tokens(PROMPT, count=8, seed=3)
        router.assert_idle()


async def test_prefill_workers_new_session_starts_without_load() -> None:
    decode, prefill = FakeWorker("d0", script=hold), FakeWorker("p0", role=WorkerRole.PREFILL)
    async with cluster(decode, prefill) as router:
        answer = asyncio.create_task(collect(router.generate(routed(LONG_PROMPT))))
        submission = await decode.submissions.get()
        assert submission.submit.prefill.worker_id == "p0"
        await _break_sessions([prefill], router)
        submission.give_all()
        assert (await answer)[0] == expected_tokens(LONG_PROMPT, count=8, seed=3)
        router.assert_idle()
        assert [share.process.worker_id for share in router.registry.in_flight()] == ["d0"]


async def test_repeated_session_breaks_condemn_no_request() -> None:
    worker = FakeWorker("d0", script=hold, incarnation=10)
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(collect(router.generate(routed())))
        for _ in range(2):
            await worker.submissions.get()
            await _break_sessions([worker], router)
        (await worker.submissions.get()).give_all()
        assert (await running)[0] == expected_tokens(PROMPT, count=8, seed=3)
        assert router.dispatcher.health.poison.num_condemned == 0
        assert router.dispatcher.health.poison.check([])
        router.assert_idle()


async def _restart_and_assert_answers(
    running: asyncio.Task[dict[int, list[int]]], away: list[FakeWorker], router: Cluster
) -> None:
    """Two sessions are lost at once: only their return proves that no worker died."""
    for worker in away:
        await worker.start()
    (tokens,) = (await running).values()
    assert tokens in [expected_tokens(prompt, count=8, seed=3) for prompt in (PROMPT, LONG_PROMPT)]
    assert router.dispatcher.health.poison.num_condemned == 0
    assert router.dispatcher.health.poison.check([])
    router.assert_idle()


async def test_successive_session_breaks_condemn_no_request() -> None:
    workers = [FakeWorker(f"d{i}", script=hold, incarnation=10 + i) for i in range(2)]
    async with cluster(*workers) as router, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(collect(router.generate(routed())))
        submissions = [asyncio.create_task(worker.submissions.get()) for worker in workers]
        (first,), _ = await asyncio.wait(submissions, return_when=asyncio.FIRST_COMPLETED)
        await workers[submissions.index(first)].crash()
        await asyncio.wait(submissions)
        for worker in workers:
            await worker.crash()
            worker.script = answer
        await router.registry.until_live(0)
        await _restart_and_assert_answers(running, workers, router)


async def test_successive_prefill_session_breaks_condemn_no_request() -> None:
    decode = FakeWorker("d0", script=hold)
    prefill = {f"p{i}": FakeWorker(f"p{i}", role=WorkerRole.PREFILL, incarnation=10 + i) for i in range(2)}
    async with cluster(decode, *prefill.values()) as router, asyncio.timeout(WAIT_S):
        running = asyncio.create_task(collect(router.generate(routed(LONG_PROMPT))))
        submission = await decode.submissions.get()
        route = submission.submit.prefill
        for num_live in (2, 1):
            await prefill[route.worker_id].crash()
            await router.registry.until_live(num_live)
            submission.fail_transfer(route.transfer_id)
            if num_live == 2:
                route = (await submission.reroutes.get()).prefill
        # Its own worker must not be the next, either.
        await submission.cancelled.wait()
        decode.script = answer
        await _restart_and_assert_answers(running, list(prefill.values()), router)
