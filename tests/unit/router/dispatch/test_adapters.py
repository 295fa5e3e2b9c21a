"""Requests with an adapter over real sessions: what the workers are ordered, and who gets such orders."""

import asyncio
import time

import pytest
from msgspec.structs import replace

from router.dispatch.choices.context import DispatchSettings
from router.dispatch.choices.retry import RetryBudget
from router.types.prompt_logprobs import PromptScoringRequest
from tandem.errors import AdapterUnavailable, Unavailable
from tandem.protocol.session_versions import ADAPTERS_SINCE
from tandem.protocol.wire import adapter_from_pb
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Submission, answer, expected_tokens
from tests.support.router.adapters import adapter_of
from tests.support.router.cluster import LONG_PROMPT, PROMPT, Cluster, cluster, collect, routed
from tests.support.router.delta_readers import QuickReader

WAIT_S = 20.0
SQL = adapter_of("sql")


def _older(name: str, role: WorkerRole = WorkerRole.DECODE) -> FakeWorker:
    worker = FakeWorker(name, role=role)
    worker.hello.newest_version = ADAPTERS_SINCE - 1
    return worker


async def _lacks_files(submission: Submission) -> None:
    if submission.submit.HasField("adapter"):
        submission.refuse("AdapterUnavailable", "no files here")
    else:
        await answer(submission)


def _budget_left(router: Cluster) -> float:
    return router.dispatcher._context.budget._left


def _assert_blameless(router: Cluster) -> None:
    assert not router.dispatcher.health.breakers.by_worker
    assert all(one.penalty_ms == 0.0 for one in router.registry.snapshots())
    router.assert_idle()


async def test_dispatch_worker_without_the_files_is_left_out_and_not_blamed() -> None:
    lacking, having = FakeWorker("d0", script=_lacks_files), FakeWorker("d1")
    async with cluster(lacking, having) as router, asyncio.timeout(WAIT_S):
        for i in range(12):
            request = replace(routed(request_id=f"r{i}"), adapter=SQL)
            assert (await collect(router.generate(request)))[0] == expected_tokens(PROMPT, count=8, seed=3)
        # Refused once, it is avoided for this adapter, though not for anything else.
        assert lacking.submissions.qsize() == len(router.observed.retries) <= 1
        _assert_blameless(router)
        for i in range(40):
            await collect(router.generate(routed(request_id=f"plain{i}")))
        assert lacking.submissions.qsize() > 1


async def test_dispatch_adapter_refused_by_all_ends_at_once_with_their_message() -> None:
    workers = [FakeWorker(f"d{i}", script=_lacks_files) for i in range(3)]
    async with cluster(*workers) as router, asyncio.timeout(WAIT_S):
        left = _budget_left(router)
        request = replace(routed(deadline_s=time.monotonic() + 3600.0), adapter=SQL)
        with pytest.raises(AdapterUnavailable, match="no files here"):
            await collect(router.generate(request))
        assert [one.submissions.qsize() for one in workers] == [1, 1, 1]
        assert left - _budget_left(router) <= 2.0, "the last refusal costs no retry: there is nobody to try"
        _assert_blameless(router)


async def test_dispatch_adapter_refused_everywhere_spends_no_more_retries() -> None:
    """Requests for a broken adapter must not use up the retries of all others."""
    workers = [FakeWorker(f"d{i}", script=_lacks_files) for i in range(3)]
    async with cluster(*workers) as router, asyncio.timeout(WAIT_S):
        for i in range(30):
            with pytest.raises(AdapterUnavailable, match="no files here"):
                await collect(router.generate(replace(routed(request_id=f"r{i}"), adapter=SQL)))
        assert _budget_left(router) >= RetryBudget()._left - 2.0
        assert sum(one.submissions.qsize() for one in workers) == 32
        await collect(router.generate(routed(request_id="plain")))


async def test_dispatch_full_worker_may_have_the_adapter_that_others_lack() -> None:
    async def full_once(submission: Submission) -> None:
        if submission.submit.attempt < 3:
            submission.refuse("Overloaded", retry_after_s=0.01)
        else:
            await answer(submission)

    lacking, full = FakeWorker("d0", script=_lacks_files), FakeWorker("d1", script=full_once)
    async with cluster(lacking, full) as router, asyncio.timeout(WAIT_S):
        assert (await collect(router.generate(replace(routed(), adapter=SQL))))[0]
        assert lacking.submissions.qsize() <= 1


async def test_dispatch_prefill_worker_without_the_files_is_replaced_and_not_blamed() -> None:
    async def prefills_lack_files(submission: Submission) -> None:
        tried = [submission.submit.prefill.worker_id]
        submission.fail_transfer(code="AdapterUnavailable")
        while (reroute := await submission.reroutes.get()).HasField("prefill"):
            tried.append(reroute.prefill.worker_id)
            submission.fail_transfer(code="AdapterUnavailable")
        assert sorted(tried) == ["p0", "p1"]
        await answer(submission)

    prefillers = [FakeWorker(f"p{i}", role=WorkerRole.PREFILL) for i in range(2)]
    decode = FakeWorker("d0", script=prefills_lack_files)
    small = adapter_of("sql", num_bytes=1)  # so that loading it at a prefill worker, too, costs nothing
    async with cluster(decode, *prefillers) as router, asyncio.timeout(WAIT_S):
        assert await collect(router.generate(replace(routed(LONG_PROMPT), adapter=small)))
        assert router.observed.retries == ["transfer_failed"] * 2
        _assert_blameless(router)
        keys = {one.info.key for one in router.registry.snapshots() if one.info.role is WorkerRole.PREFILL}
        assert router.dispatcher.placer.adapters.refused_by(small, time.monotonic()) == keys


async def test_scoring_refused_for_the_files_goes_elsewhere_and_avoids_that_worker() -> None:
    lacking = FakeWorker("p0", role=WorkerRole.PREFILL)
    lacking.scoring_script = lambda scoring: scoring.refuse("AdapterUnavailable")
    having = FakeWorker("p1", role=WorkerRole.PREFILL)
    async with cluster(FakeWorker("d0"), lacking, having) as router, asyncio.timeout(WAIT_S):
        for i in range(6):
            scoring = PromptScoringRequest(num_top=2, only=True)
            request = replace(routed(request_id=f"r{i}"), adapter=SQL, scoring=scoring)
            await router.dispatcher.run(request, QuickReader())
        assert lacking.scorings.qsize() <= 1
        _assert_blameless(router)


async def test_dispatch_adapter_is_in_the_order_and_counted_while_it_runs() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker) as router, asyncio.timeout(WAIT_S):
        request = replace(routed(), adapter=SQL)
        stream = router.generate(request)
        await anext(stream)
        assert dict(router.dispatcher.adapters.running) == {"sql": 1}
        await stream.aclose()
        assert not router.dispatcher.adapters.running
        assert adapter_from_pb((await worker.submissions.get()).submit.adapter) == SQL
        await collect(router.generate(routed(request_id="r2")))
        assert not (await worker.submissions.get()).submit.HasField("adapter")


async def test_dispatch_older_worker_gets_no_adapter_also_when_the_other_refuses() -> None:
    async def refuse(submission: Submission) -> None:
        submission.refuse("Unavailable")

    old, new = _older("d0"), FakeWorker("d1", script=refuse)
    async with cluster(old, new, settings=DispatchSettings(max_attempts=2)) as router, asyncio.timeout(WAIT_S):
        with pytest.raises(Unavailable):
            await collect(router.generate(replace(routed(), adapter=SQL)))
        assert old.submissions.empty()
        assert (await collect(router.generate(routed(request_id="r2"))))[0] == expected_tokens(PROMPT, count=8, seed=3)


async def test_scoring_with_an_adapter_goes_to_a_worker_that_knows_adapters() -> None:
    old, new = _older("p0", WorkerRole.PREFILL), FakeWorker("d0")
    async with cluster(old, new) as router, asyncio.timeout(WAIT_S):
        request = replace(routed(), adapter=SQL, scoring=PromptScoringRequest(num_top=2, only=True))
        await router.dispatcher.run(request, QuickReader())
        assert adapter_from_pb((await new.scorings.get()).order.adapter) == SQL
        assert old.scorings.empty()
