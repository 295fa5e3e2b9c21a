"""A worker restarted on its old address is a new incarnation: nothing of its former one counts."""

import asyncio
import time

import pytest

from tandem.values.ids import WorkerId
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Submission, answer, expected_tokens, hold
from tests.support.router.cluster import LONG_PROMPT, Cluster, cluster, collect, routed

WAIT_S = 20.0


async def restart(worker: FakeWorker, router: Cluster, *, live: int) -> None:
    """A new process on the old one's address."""
    address = worker.address
    await worker.crash()
    await router.registry.until_live(live - 1)
    worker.hello.incarnation += 1
    await worker.start()
    assert worker.address == address
    await router.registry.until_live(live)


async def test_handoff_names_current_incarnation() -> None:
    """The decode worker distinguishes the two, and refuses KV from the former."""
    prefill, decode = FakeWorker("p0", role=WorkerRole.PREFILL), FakeWorker("d0")
    async with cluster(decode, prefill) as router:
        for life in (1, 2, 3):
            await collect(router.generate(routed((life, *LONG_PROMPT))))
            route = (await decode.submissions.get()).submit.prefill
            assert (route.worker_id, route.incarnation) == ("p0", life)
            if life < 3:
                await restart(prefill, router, live=2)
        router.assert_idle()


@pytest.mark.parametrize("role", list(WorkerRole))
async def test_restarted_worker_has_no_earlier_failures(role: WorkerRole) -> None:
    peer, decode = FakeWorker("w0", role=role), FakeWorker("d0", script=hold)
    async with cluster(peer, decode) as router:
        registry, health = router.registry, router.dispatcher.health
        (key,) = (w.info.key for w in registry.snapshots() if w.info.key.worker_id == "w0")
        registry.penalise(key, 1000.0)
        sent = registry.assign(key, 500)
        for _ in range(5):
            health.breakers.failed(key, time.monotonic())
        registry.prefix_map.expect(WorkerId("w0"), [b"0" * 16], now_s=0.0)
        assert health.breakers.closed_to(time.monotonic()) == {key}
        await restart(peer, router, live=2)
        (new,) = (w for w in registry.snapshots() if w.info.key.worker_id == "w0")
        assert (new.penalty_ms, new.backlog_tokens, new.num_active, new.draining) == (0.0, 0, 0, False)
        assert health.breakers.closed_to(time.monotonic()) == set()
        assert registry.prefix_map.num_blocks(WorkerId("w0")) == 0
        # Late reports of the former incarnation change nothing.
        registry.penalise(key, 1000.0)
        sent.end()
        assert next(w for w in registry.snapshots() if w.info.key == new.info.key) == new


async def test_stream_of_former_incarnation_continues_unmixed() -> None:
    """The new incarnation serves the next attempt; messages about the former attempt are ignored."""
    worker = FakeWorker("d0", script=_two_tokens)
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        client = asyncio.create_task(collect(router.generate(routed())))
        first = await worker.submissions.get()
        await router.registry.until(lambda: bool(router.dispatcher._runs))
        worker.script = _send_stale_attempt_then_answer
        await restart(worker, router, live=1)
        second = await worker.submissions.get()
        assert (first.submit.attempt, second.submit.attempt) == (1, 2)
        assert (await client)[0] == expected_tokens(first.submit.prompt_token_ids, count=8, seed=3)
        router.assert_idle()


async def _two_tokens(submission: Submission) -> None:
    submission.give(submission.tokens[:2])


async def _send_stale_attempt_then_answer(submission: Submission) -> None:
    submission.give([1, 2, 3], first_index=2, attempt=1)
    await answer(submission)
