"""Requests with an adapter over real sessions: what the workers are ordered, and who gets such orders."""

import asyncio

import pytest
from msgspec.structs import replace

from router.dispatch.choices.context import DispatchSettings
from router.types.prompt_logprobs import PromptScoringRequest
from tandem.errors import Unavailable
from tandem.protocol.session_versions import ADAPTERS_SINCE
from tandem.protocol.wire import adapter_from_pb
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Submission, expected_tokens
from tests.support.router.adapters import adapter_of
from tests.support.router.cluster import PROMPT, cluster, collect, routed
from tests.support.router.delta_readers import QuickReader

WAIT_S = 20.0
SQL = adapter_of("sql")


def _older(name: str, role: WorkerRole = WorkerRole.DECODE) -> FakeWorker:
    worker = FakeWorker(name, role=role)
    worker.hello.newest_version = ADAPTERS_SINCE - 1
    return worker


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
