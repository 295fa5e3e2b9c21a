"""The undisturbed life of a request, and ends caused by the client."""

import asyncio
import time
from contextlib import aclosing
from functools import partial

import pytest
from msgspec.structs import replace

from router.dispatch.choices.context import DispatchSettings
from router.types.requests import ChoiceDelta, ResumePoint
from tandem.errors import DeadlineExceeded, InvariantError, Overloaded, Unavailable
from tandem.values.ids import Incarnation
from tandem.values.outputs import FinishReason
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Submission, answer, expected_tokens, hold
from tests.support.router.cluster import LONG_PROMPT, PROMPT, ROOT, cluster, collect, routed


async def test_dispatch_streams_tokens_in_order_and_ends_once() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker) as router:
        deltas = [d async for d in router.generate(routed())]
        assert [t.token_id for d in deltas for t in d.tokens] == expected_tokens(PROMPT, count=8, seed=3)
        assert [d.finish is not None for d in deltas] == [False] * 7 + [True]
        finish = deltas[-1].finish
        assert finish is not None
        assert (finish.reason, finish.cached_tokens, finish.times.decode_s) == (FinishReason.LENGTH, 3, 0.5)
        router.assert_idle()


async def test_running_request_iterates_over_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(FakeWorker("d0"), FakeWorker("d1", incarnation=2)) as router:
        calls: list[str] = []
        with monkeypatch.context() as patch:
            for name in ("snapshots", "live_decoders"):
                patch.setattr(router.registry, name, partial(calls.append, name))
            assert await collect(router.generate(routed()))
            point = ResumePoint(worker=Incarnation(2), num_tokens=3)
            assert await collect(router.generate(replace(routed(), resume=(point,), resumptions=1)))
        assert calls == []


async def test_submit_carries_the_request() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker) as router:
        await collect(router.generate(routed(deadline_s=time.monotonic() + 60.0, priority=-2)))
        submit = (await worker.submissions.get()).submit
        assert (submit.request_id, submit.attempt, submit.priority) == ("r1-0", 1, -2)
        assert tuple(submit.prompt_token_ids) == PROMPT
        assert submit.hash_root == ROOT
        assert 0.0 < submit.timeout_s <= 60.0
        assert (submit.sampling.max_tokens, submit.sampling.seed) == (8, 3)
        assert not submit.HasField("prefill")


async def test_long_prompt_is_routed_over_a_prefill_worker() -> None:
    decode = FakeWorker("d0")
    prefill = FakeWorker("p0", role=WorkerRole.PREFILL)
    async with cluster(decode, prefill) as router:
        deltas = [delta async for delta in router.generate(routed(LONG_PROMPT))]
        assert [delta.finish.prefilled_by for delta in deltas if delta.finish] == [WorkerRole.PREFILL]
        route = (await decode.submissions.get()).submit.prefill
        assert (route.worker_id, route.incarnation, route.address) == ("p0", 1, "p0:1")
        assert (route.transfer_id.rpartition(".")[0], route.attempt) == ("r1-0.1", 1)
        assert router.observed.modes == ["disaggregated"]
        router.assert_idle()


async def test_committed_handoff_is_learnt_while_its_stream_runs() -> None:
    async def answer_begins(submission: Submission) -> None:
        submission.give(submission.tokens[:1], cached=0)
        submission.commit_handoff(num_tokens=208, exposed_s=0.25)
        submission.give(submission.tokens[1:2], first_index=1)

    decode, prefill = FakeWorker("d0", script=answer_begins), FakeWorker("p0", role=WorkerRole.PREFILL)
    async with cluster(decode, prefill) as router, aclosing(router.generate(routed(LONG_PROMPT))) as stream:
        for _ in range(2):
            await anext(stream)
        ((pair, measured),) = router.registry.pairs.pairs.items()
        assert [key.worker_id for key in pair] == ["p0", "d0"]
        receiver = next(w.info for w in router.registry.snapshots() if w.info.role is WorkerRole.DECODE)
        assert (measured.seconds, measured.num_bytes) == (0.25, 208 * receiver.kv_bytes_per_token)


async def test_handoff_without_a_commit_is_not_learnt() -> None:
    """The answer ends with its first token, before the KV has come; or the worker is of the version before."""
    decode, prefill = FakeWorker("d0"), FakeWorker("p0", role=WorkerRole.PREFILL)
    async with cluster(decode, prefill) as router:
        for max_tokens in (1, 8):
            await collect(router.generate(routed(LONG_PROMPT, request_id=f"r{max_tokens}", max_tokens=max_tokens)))
        assert router.observed.modes == ["disaggregated"] * 2
        assert not router.registry.pairs.pairs
        assert not router.registry.pairs.classes


async def test_four_choices_each_get_their_own_tokens() -> None:
    one = FakeWorker("d0")
    two = FakeWorker("d1")
    async with cluster(one, two) as router:
        tokens = await collect(router.generate(routed(n=4)))
        assert tokens == {c: expected_tokens(PROMPT, count=8, seed=3, choice=c) for c in range(4)}
        router.assert_idle()


async def test_concurrent_requests_share_one_session() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker) as router:
        results = await asyncio.gather(
            *(collect(router.generate(routed(request_id=f"r{i}", seed=i))) for i in range(40))
        )
        assert [r[0] for r in results] == [expected_tokens(PROMPT, count=8, seed=i) for i in range(40)]
        router.assert_idle()


async def test_closing_early_cancels_on_the_worker() -> None:
    async def one_token(submission: Submission) -> None:
        submission.give(submission.tokens[:1])

    worker = FakeWorker("d0", script=one_token)
    async with cluster(worker) as router:
        async with aclosing(router.generate(routed(n=2))) as stream:
            await anext(stream)
        for _ in range(2):
            await (await worker.submissions.get()).cancelled.wait()
        router.assert_idle()


async def test_cancelled_client_task_cancels_on_the_worker() -> None:
    worker = FakeWorker("d0", script=hold)
    async with cluster(worker) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        submission = await worker.submissions.get()
        client.cancel()
        await submission.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await client
        router.assert_idle()


async def test_finish_choice_ends_with_known_figures() -> None:
    async def two_tokens(submission: Submission) -> None:
        submission.give(submission.tokens[:2], cached=5)

    worker = FakeWorker("d0", script=two_tokens)
    async with cluster(worker) as router:
        deltas: list[ChoiceDelta] = []
        async for delta in router.generate(routed()):
            deltas.append(delta)
            if delta.tokens:
                router.dispatcher.finish_choice(routed().request_id, 0)
        finish = deltas[-1].finish
        assert len(deltas) == 2
        assert finish is not None
        assert (finish.reason, finish.cached_tokens, finish.times.prefill_s) == (FinishReason.STOP, 5, 0.25)
        await (await worker.submissions.get()).cancelled.wait()
        router.assert_idle()
        router.dispatcher.finish_choice(routed().request_id, 0)


async def test_finish_choice_leaves_other_choice_running() -> None:
    async def hang_first_choice(submission: Submission) -> None:
        if submission.submit.choice_index == 0:
            submission.give(submission.tokens[:1])
        else:
            await answer(submission)

    worker = FakeWorker("d0", script=hang_first_choice)
    async with cluster(worker) as router:
        ends: dict[int, FinishReason] = {}
        async for delta in router.generate(routed(n=2)):
            if delta.finish is not None:
                ends[delta.choice_index] = delta.finish.reason
            elif delta.choice_index == 0:
                router.dispatcher.finish_choice(routed().request_id, 0)
        assert ends == {0: FinishReason.STOP, 1: FinishReason.LENGTH}
        router.assert_idle()


async def test_deadline_raises_and_cancels() -> None:
    worker = FakeWorker("d0", script=hold)
    async with cluster(worker) as router:
        with pytest.raises(DeadlineExceeded):
            await collect(router.generate(routed(deadline_s=time.monotonic() + 0.05)))
        await (await worker.submissions.get()).cancelled.wait()
        router.assert_idle()


async def test_slow_reader_overflows_alone() -> None:
    has_read = asyncio.Event()

    async def flood(submission: Submission) -> None:
        submission.give(submission.tokens[:8])
        await has_read.wait()
        for start in range(8, 64, 8):
            submission.give(submission.tokens[start : start + 8], first_index=start)

    settings = DispatchSettings(stream_buffer_tokens=24)
    worker = FakeWorker("d0", script=flood)
    async with cluster(worker, settings=settings) as router:
        slow = router.generate(routed(max_tokens=64))
        async with aclosing(slow):
            await anext(slow)
            has_read.set()
            submission = await worker.submissions.get()
            await submission.cancelled.wait()
            worker.script = answer
            other = await collect(router.generate(routed(request_id="r2")))
            assert other[0] == expected_tokens(PROMPT, count=8, seed=3)
            with pytest.raises(Overloaded):
                await anext(slow)
        router.assert_idle()


async def test_dispatch_without_workers_is_unavailable_at_once() -> None:
    async with cluster() as router:
        with pytest.raises(Unavailable) as caught:
            await collect(router.generate(routed()))
        assert caught.value.retry_after_s == 1.0
        router.assert_idle()


async def test_request_id_in_use_is_refused() -> None:
    worker = FakeWorker("d0", script=hold)
    async with cluster(worker) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        await worker.submissions.get()
        with pytest.raises(InvariantError):
            await collect(router.generate(routed()))
        client.cancel()
