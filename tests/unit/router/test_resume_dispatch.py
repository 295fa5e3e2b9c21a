"""A stream that another router began: taken over from its worker, or generated again where that is not possible."""

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from router.requests import ResumePoint, RoutedRequest
from tandem.errors import InvalidRequest, RequestTooLarge, StreamTaken, Unavailable
from tandem.ids import Incarnation
from tandem.outputs import FinishReason
from tests.fake_worker import FakeWorker, Submission, expected_tokens
from tests.unit.router.cluster import PROMPT, cluster, collect, routed

LENGTH = 8


def continued(*, worker: int = 1, num_tokens: int = 2, resumptions: int = 1, n: int = 1) -> RoutedRequest:
    point = ResumePoint(worker=Incarnation(worker), num_tokens=num_tokens)
    return replace(routed(max_tokens=LENGTH, n=n), resume=(point,) * n, resumptions=resumptions)


def whole(choice: int = 0) -> list[int]:
    return expected_tokens(PROMPT, count=LENGTH, seed=3, choice=choice)


async def test_its_worker_gives_it_away() -> None:
    worker = FakeWorker("d0")
    worker.keeps = {"r1-0": whole(), "r1-1": whole(1)}
    async with cluster(worker, FakeWorker("d1", incarnation=2)) as router:
        assert await collect(router.generate(continued(n=2))) == {0: whole(), 1: whole(1)}
        asked = [worker.adoptions.get_nowait() for _ in range(2)]
        assert [(a.request_id, a.num_shown, a.attempt) for a in asked] == [
            ("r1-0", 2, (1 << 16) + 1),
            ("r1-1", 2, (1 << 16) + 1),
        ]
        assert worker.submissions.empty()
        assert router.observed.modes == ["adopted", "adopted"]
        router.assert_idle()


async def test_a_worker_that_has_it_no_more_generates_it_again() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker) as router:
        assert await collect(router.generate(continued())) == {0: whole()}
        assert worker.adoptions.qsize() == 1
        submit = worker.submissions.get_nowait().submit
        assert (submit.sampling.seed, list(submit.generated_token_ids)) == (3, [])
        assert router.observed.retries == []
        router.assert_idle()


async def test_a_worker_that_is_gone_is_not_asked() -> None:
    worker = FakeWorker("d0", incarnation=9)
    async with cluster(worker) as router:
        assert await collect(router.generate(continued(worker=1))) == {0: whole()}
        assert worker.adoptions.empty()
        router.assert_idle()


async def test_a_worker_lost_while_it_is_asked_is_followed_by_another() -> None:
    async def silent(_: Submission) -> None: ...

    dying = FakeWorker("d0", script=silent)
    dying._give_away = lambda adopt: dying.adoptions.put_nowait(adopt)  # type: ignore[method-assign]
    async with cluster(dying, FakeWorker("d1", incarnation=2)) as router:
        answer = asyncio.create_task(collect(router.generate(continued())))
        await dying.adoptions.get()
        await dying.crash()
        assert await answer == {0: whole()}
        router.assert_idle()


async def test_its_former_reader_here_is_told_and_ends_nothing() -> None:
    held = asyncio.Event()

    async def begin(submission: Submission) -> None:
        submission.give(whole()[:2])
        await held.wait()

    worker = FakeWorker("d0", script=begin)
    worker.keeps = {"r1-0": whole()}
    async with cluster(worker) as router:
        async with aclosing(router.generate(routed(max_tokens=LENGTH))) as former:
            await anext(former)
            assert await collect(router.generate(continued())) == {0: whole()}
            with pytest.raises(StreamTaken):
                await anext(former)
        assert not worker.submissions.get_nowait().cancelled.is_set()
        router.assert_idle()


async def test_two_readers_of_one_place_are_one_too_many() -> None:
    worker = FakeWorker("d0")
    worker._give_away = lambda adopt: worker.adoptions.put_nowait(adopt)  # type: ignore[method-assign]
    async with cluster(worker) as router:
        first = asyncio.create_task(collect(router.generate(continued())))
        await worker.adoptions.get()
        with pytest.raises(InvalidRequest, match="already"):
            await collect(router.generate(continued()))
        second = asyncio.create_task(collect(router.generate(continued(resumptions=2))))
        await worker.adoptions.get()
        with pytest.raises(StreamTaken):
            await first
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        router.assert_idle()


async def test_a_long_answer_comes_back_in_one_piece() -> None:
    """More tokens than a slow reader may have waiting."""
    long = replace(continued(num_tokens=6000), sampling=replace(continued().sampling, max_tokens=6001))
    worker = FakeWorker("d0")
    worker.keeps = {"r1-0": [7] * 6001}
    async with cluster(worker) as router:
        assert await collect(router.generate(long)) == {0: [7] * 6001}


async def test_a_full_router_takes_a_stream_that_goes_on() -> None:
    async def begin(submission: Submission) -> None:
        submission.give(whole()[:2])

    worker = FakeWorker("d0", script=begin)
    worker.keeps = {"r1-0": whole()}
    async with (
        cluster(worker, max_inflight=1) as router,
        aclosing(router.generate(routed(max_tokens=LENGTH))) as former,
    ):
        await anext(former)
        assert await collect(router.generate(continued())) == {0: whole()}
        with pytest.raises(StreamTaken):
            await anext(former)
        await former.aclose()
        router.assert_idle()


async def test_a_continuation_that_is_refused_leaves_the_stream_where_it_was() -> None:
    async def begin(submission: Submission) -> None:
        submission.give(whole()[:2])

    worker = FakeWorker("d0", script=begin)
    async with cluster(worker) as router, aclosing(router.generate(routed(max_tokens=LENGTH))) as former:
        await anext(former)
        router.dispatcher._admission.close()
        with pytest.raises(Unavailable, match="draining"):
            await collect(router.generate(continued()))
        (submission,) = [worker.submissions.get_nowait()]
        submission.give(whole()[2:], first_index=2, finish=FinishReason.LENGTH)
        assert [t.token_id for delta in [d async for d in former] for t in delta.tokens] == whole()[2:]
        router.assert_idle()


async def test_a_continuation_that_nobody_can_run_ends_the_stream() -> None:
    async def begin(submission: Submission) -> None:
        submission.give(whole()[:2])

    worker = FakeWorker("d0", script=begin)
    async with cluster(worker) as router, aclosing(router.generate(routed(max_tokens=LENGTH))) as former:
        await anext(former)
        too_long = replace(continued(worker=9), prompt_token_ids=tuple(range(5000)))
        with pytest.raises(RequestTooLarge):
            await collect(router.generate(too_long))
        with pytest.raises(StreamTaken):
            await anext(former)
        await worker.submissions.get_nowait().cancelled.wait()
        await former.aclose()
        router.assert_idle()
