"""A stream of another router: taken over from its worker, or generated again where that is not possible."""

import asyncio
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from router.fleet.worker_session import WorkerSession
from router.types.requests import ResumePoint, RoutedRequest
from tandem.errors import InvalidRequest, RequestTooLarge, StreamTaken, Unavailable
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from tandem.values.outputs import FinishReason
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Submission, answer, expected_tokens
from tests.support.router.admission_queues import gated
from tests.support.router.cluster import LONG_PROMPT, PROMPT, cluster, collect, routed

LENGTH = 8


def continued(*, worker: int = 1, num_tokens: int = 2, resumptions: int = 1, n: int = 1) -> RoutedRequest:
    point = ResumePoint(worker=Incarnation(worker), num_tokens=num_tokens)
    return replace(routed(max_tokens=LENGTH, n=n), resume=(point,) * n, resumptions=resumptions)


def whole(choice: int = 0) -> list[int]:
    return expected_tokens(PROMPT, count=LENGTH, seed=3, choice=choice)


async def test_adopting_worker_hands_over_the_stream() -> None:
    worker = FakeWorker("d0")
    worker.keeps = {"r1-0": whole(), "r1-1": whole(1)}
    async with cluster(worker, FakeWorker("d1", incarnation=2)) as router:
        assert await collect(router.generate(continued(n=2))) == {0: whole(), 1: whole(1)}
        adoptions = [worker.adoptions.get_nowait() for _ in range(2)]
        assert [(a.request_id, a.num_shown, a.attempt) for a in adoptions] == [
            ("r1-0", 2, (1 << 16) + 1),
            ("r1-1", 2, (1 << 16) + 1),
        ]
        assert worker.submissions.empty()
        assert router.observed.modes == ["adopted", "adopted"]
        router.assert_idle()


async def test_resumed_stream_unknown_to_worker_is_generated_again() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker) as router:
        assert await collect(router.generate(continued())) == {0: whole()}
        assert worker.adoptions.qsize() == 1
        submit = worker.submissions.get_nowait().submit
        assert (submit.sampling.seed, list(submit.generated_token_ids)) == (3, [])
        assert router.observed.retries == []
        router.assert_idle()


async def test_resumed_stream_of_lost_worker_is_not_adopted() -> None:
    worker = FakeWorker("d0", incarnation=9)
    async with cluster(worker) as router:
        assert await collect(router.generate(continued(worker=1))) == {0: whole()}
        assert worker.adoptions.empty()
        router.assert_idle()


async def test_worker_lost_during_adoption_is_replaced() -> None:
    async def silent(_: Submission) -> None: ...

    dying = FakeWorker("d0", script=silent)
    dying._give_away = lambda adopt: dying.adoptions.put_nowait(adopt)  # type: ignore[method-assign]
    async with cluster(dying, FakeWorker("d1", incarnation=2)) as router:
        answer = asyncio.create_task(collect(router.generate(continued())))
        await dying.adoptions.get()
        await dying.crash()
        assert await answer == {0: whole()}
        router.assert_idle()


async def test_tokens_generated_again_after_a_lost_adoption_are_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    dying = FakeWorker("d0")
    dying._give_away = lambda adopt: dying.adoptions.put_nowait(adopt)  # type: ignore[method-assign]
    async with gated(dying, FakeWorker("d1", incarnation=2)) as (gate, router):
        adopted, charged = list[object](), list[int]()
        monkeypatch.setattr(gate.queue.admission, "adopted", adopted.append)
        monkeypatch.setattr(gate.queue.admission, "generated", lambda _, num_tokens=1: charged.append(num_tokens))
        answer = asyncio.create_task(collect(gate.generate(continued())))
        await dying.adoptions.get()
        await dying.crash()
        assert await answer == {0: whole()}
        assert not adopted
        assert sum(charged) == LENGTH
        router.assert_idle()


async def test_full_worker_after_a_lost_adoption_is_not_asked_again_at_once() -> None:
    async def full_at_first(submission: Submission) -> None:
        if full.submissions.qsize() == 1:
            submission.refuse("Overloaded", retry_after_s=0.01)
        else:
            await answer(submission)

    dying = FakeWorker("d0")
    dying._give_away = lambda adopt: dying.adoptions.put_nowait(adopt)  # type: ignore[method-assign]
    full = FakeWorker("d1", incarnation=2, script=full_at_first)
    async with cluster(dying, full) as router:
        collected = asyncio.create_task(collect(router.generate(continued())))
        await dying.adoptions.get()
        await dying.crash()
        assert await collected == {0: whole()}
        assert router.observed.retries == ["worker_lost", "refused"]
        router.assert_idle()


async def test_former_reader_is_superseded_without_cancelling() -> None:
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


@pytest.mark.parametrize("is_asked", [True, False], ids=["refuses_adoption", "is_not_asked"])
@pytest.mark.parametrize("is_draining", [False, True], ids=["same_worker", "another_worker"])
async def test_former_attempt_that_is_not_adopted_is_cancelled(is_asked: bool, is_draining: bool) -> None:
    """It would be generated to its end, for nobody, beside the new one."""

    async def begin(submission: Submission) -> None:
        submission.give(whole()[:2])

    workers = [FakeWorker(f"d{i}", incarnation=1 + i, script=begin) for i in range(1 + is_draining)]
    async with cluster(*workers) as router:
        former = router.generate(routed(max_tokens=LENGTH))
        await anext(former)
        holder = next(worker for worker in workers if not worker.submissions.empty())
        old = holder.submissions.get_nowait()
        for worker in workers:
            worker.script = answer
        if is_draining:
            holder.send(pb.WorkerMessage(draining=pb.Draining(reason="SIGTERM")))
            await router.registry.until(lambda: any(worker.draining for worker in router.registry.snapshots()))
        seen_at = holder.hello.incarnation if is_asked else 8
        assert await collect(router.generate(continued(worker=seen_at))) == {0: whole()}
        async with asyncio.timeout(10.0):
            await old.cancelled.wait()
        with pytest.raises(StreamTaken):
            await anext(former)
        router.assert_idle()


@pytest.mark.parametrize("resumptions", [1, 2, 7])
async def test_resumed_stream_belongs_to_latest_reader(resumptions: int) -> None:
    """A client resends the id while its former connection is half open, out of order or not."""
    worker = FakeWorker("d0")
    worker._give_away = lambda adopt: worker.adoptions.put_nowait(adopt)  # type: ignore[method-assign]
    async with cluster(worker) as router:
        readers, numbers = [], []
        for _ in range(3):
            readers.append(asyncio.create_task(collect(router.generate(continued(resumptions=resumptions)))))
            numbers.append((await worker.adoptions.get()).attempt)
            resumptions = 2
        assert numbers == sorted(set(numbers)), "no attempt is taken for a former one"
        for former in readers[:-1]:
            with pytest.raises(StreamTaken):
                await former
        readers[-1].cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        router.assert_idle()


async def test_stream_continued_too_often_is_refused_and_goes_on() -> None:
    """Attempt numbers are of 32 bits, and what a worker has seen is not reused."""
    most = (1 << 16) - 1
    worker = FakeWorker("d0", script=begun)
    async with cluster(worker) as router:
        former = continued(worker=9, num_tokens=0, resumptions=most)
        async with aclosing(router.generate(former)) as stream:
            await anext(stream)
            assert router.dispatcher.num_inflight == 1
            with pytest.raises(InvalidRequest, match=f"continued {most} times"):
                await collect(router.generate(former))
            worker.submissions.get_nowait().give(whole()[2:], first_index=2, finish=FinishReason.LENGTH)
            assert [t.token_id for delta in [d async for d in stream] for t in delta.tokens] == whole()[2:]
        router.assert_idle()


@pytest.mark.parametrize("seen_at", [1, 9], ids=["adopt", "submit"])
async def test_attempt_that_no_message_can_carry_leaves_nothing_behind(seen_at: int) -> None:
    async with cluster(FakeWorker("d0")) as router:
        with pytest.raises(ValueError, match="out of range"):
            await collect(router.generate(continued(worker=seen_at, resumptions=1 << 16)))
        router.assert_idle()
        session = router.registry.port(router.registry.snapshots()[0].info.key)
        assert isinstance(session, WorkerSession)
        assert not session._attempts
        assert not session._readers
        assert await collect(router.generate(routed(max_tokens=LENGTH))) == {0: whole()}


async def test_two_continuations_have_distinct_handoffs() -> None:
    """Both attempts have the same number, and the first hand-off may still be at the worker that gets both."""
    decode, prefill = FakeWorker("d0", incarnation=9), FakeWorker("p0", role=WorkerRole.PREFILL)
    again = replace(continued(worker=8), prompt_token_ids=LONG_PROMPT)
    async with cluster(decode, prefill) as router:
        for _ in range(2):
            await collect(router.generate(again))
        orders = [decode.submissions.get_nowait().submit for _ in range(2)]
        assert [order.attempt for order in orders] == [(1 << 16) + 1] * 2
        assert len({order.prefill.transfer_id for order in orders}) == 2
        assert all(order.prefill.transfer_id.startswith("r1-0.65537.") for order in orders)


async def test_resumed_long_answer_is_complete() -> None:
    """More tokens than may be buffered for a slow reader."""
    long = replace(continued(num_tokens=6000), sampling=continued().sampling._replace(max_tokens=6001))
    worker = FakeWorker("d0")
    worker.keeps = {"r1-0": [7] * 6001}
    async with cluster(worker) as router:
        assert await collect(router.generate(long)) == {0: [7] * 6001}


async def begun(submission: Submission) -> None:
    """Gives two tokens, and nothing more by itself."""
    submission.give(whole()[:2])


async def test_full_router_accepts_continued_stream() -> None:
    worker = FakeWorker("d0", script=begun)
    worker.keeps = {"r1-0": whole()}
    async with (
        gated(worker, running=9, inflight=1) as (gate, router),
        aclosing(gate.generate(routed(max_tokens=LENGTH))) as former,
    ):
        await anext(former)
        assert await collect(gate.generate(continued())) == {0: whole()}
        with pytest.raises(StreamTaken):
            await anext(former)
        await former.aclose()
        router.assert_idle()


async def test_refused_continuation_leaves_stream_running() -> None:
    worker = FakeWorker("d0", script=begun)
    async with gated(worker) as (gate, router), aclosing(gate.generate(routed(max_tokens=LENGTH))) as former:
        await anext(former)
        gate.queue.admission.ended = True
        with pytest.raises(Unavailable, match="draining"):
            await collect(gate.generate(continued()))
        (submission,) = [worker.submissions.get_nowait()]
        submission.give(whole()[2:], first_index=2, finish=FinishReason.LENGTH)
        assert [t.token_id for delta in [d async for d in former] for t in delta.tokens] == whole()[2:]
        router.assert_idle()


async def test_continuation_without_worker_ends_the_stream() -> None:
    worker = FakeWorker("d0", script=begun)
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
