"""A worker's session breaks and the same process is back in a new one: its network, or its scheduler, was away."""

import asyncio

from tandem.roles import WorkerRole
from tests.fake_worker import FakeWorker, expected_tokens, hold
from tests.unit.router.cluster import LONG_PROMPT, Cluster, cluster, collect, routed


async def _break_session(worker: FakeWorker, router: Cluster) -> None:
    """Its connections end; it serves again as the same incarnation."""
    count = len(router.registry.snapshots())
    await worker.crash()
    await router.registry.until_live(count - 1)
    await worker.start()
    await router.registry.until_live(count)


async def test_a_prefill_workers_new_session_begins_with_empty_books() -> None:
    decode, prefill = FakeWorker("d0", script=hold), FakeWorker("p0", role=WorkerRole.PREFILL)
    async with cluster(decode, prefill) as router:
        answer = asyncio.create_task(collect(router.generate(routed(LONG_PROMPT))))
        submission = await decode.submissions.get()
        assert submission.submit.prefill.worker_id == "p0"
        await _break_session(prefill, router)
        submission.give_all()
        assert (await answer)[0] == expected_tokens(LONG_PROMPT, count=8, seed=3)
        router.assert_idle()
        assert [share.process.worker_id for share in router.registry.in_flight()] == ["d0"]
