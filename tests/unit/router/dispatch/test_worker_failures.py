"""Failures of workers: the client gets the undisturbed text, or a clear error."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence

import pytest
from msgspec.structs import replace

from router.dispatch.choices.context import DispatchSettings
from router.types.requests import ChoiceDelta, ChoiceFinish
from tandem.errors import ContextLengthExceeded, InternalError, RequestTooLarge, Unavailable
from tandem.v1 import session_pb2 as pb
from tandem.values.outputs import FinishReason, PredictionUse
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Script, Submission, answer, expected_tokens, hold
from tests.support.router.cluster import LONG_PROMPT, PROMPT, cluster, collect, routed


async def _overloaded(submission: Submission) -> None:
    submission.refuse("Overloaded", retry_after_s=2.5)


async def test_refused_request_goes_to_another_worker() -> None:
    busy = FakeWorker("d0", script=_overloaded)
    free = FakeWorker("d1")
    async with cluster(busy, free) as router:
        for i in range(6):
            tokens = await collect(router.generate(routed(request_id=f"r{i}")))
            assert tokens[0] == expected_tokens(PROMPT, count=8, seed=3)
        # Once refused, the worker is left alone for the time that it asked for.
        assert busy.submissions.qsize() <= 1
        assert router.observed.retries == ["refused"] * busy.submissions.qsize()
        router.assert_idle()


async def test_invalid_request_is_not_retried() -> None:
    async def too_long(submission: Submission) -> None:
        submission.refuse("ContextLengthExceeded", "too long")

    one = FakeWorker("d0", script=too_long)
    two = FakeWorker("d1", script=too_long)
    async with cluster(one, two) as router:
        with pytest.raises(ContextLengthExceeded, match="too long"):
            await collect(router.generate(routed()))
        assert one.submissions.qsize() + two.submissions.qsize() == 1


async def test_request_too_large_for_one_pool_runs_on_larger() -> None:
    async def too_large(submission: Submission) -> None:
        submission.refuse("RequestTooLarge", "the pool holds less")

    small = FakeWorker("d0", script=too_large, num_blocks=32)
    async with cluster(small, FakeWorker("d1", num_blocks=64)) as router:
        for i in range(4):
            await collect(router.generate(routed(request_id=f"r{i}")))
    async with cluster(FakeWorker("d2", script=too_large)) as router:
        with pytest.raises(RequestTooLarge, match="the pool holds less"):
            await collect(router.generate(routed()))


async def test_request_larger_than_every_pool_is_refused_unsent() -> None:
    worker = FakeWorker("d0", num_blocks=2)
    async with cluster(worker) as router:
        with pytest.raises(RequestTooLarge):
            await collect(router.generate(routed(LONG_PROMPT)))
        assert worker.submissions.empty()


def _first_attempt_stalls_after(count: int) -> Script:
    """The first attempt gives so many tokens and then hangs; later ones answer in full."""

    async def script(submission: Submission) -> None:
        if submission.submit.attempt > 1:
            await answer(submission)
        elif count > 0:
            submission.give(submission.tokens[:count], cached=9)

    return script


async def _holder_first(workers: Sequence[FakeWorker]) -> list[FakeWorker]:
    """The workers, beginning with the one that gets the first submission."""
    takers = {asyncio.create_task(worker.submissions.get()): worker for worker in workers}
    done, pending = await asyncio.wait(takers, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    holder = takers[done.pop()]
    return [holder, *(w for w in workers if w is not holder)]


@pytest.mark.parametrize("survivors", [0, 1, 5, 8])
async def test_crash_mid_stream_continues_on_another_worker(survivors: int) -> None:
    """The text equals the undisturbed one, wherever the crash falls."""
    workers = [FakeWorker(name, script=_first_attempt_stalls_after(survivors)) for name in ("d0", "d1")]
    tokens: list[int] = []
    finishes: list[ChoiceFinish] = []
    received = asyncio.Event()

    async def client(stream: AsyncIterator[ChoiceDelta]) -> None:
        async for delta in stream:
            tokens.extend(t.token_id for t in delta.tokens)
            if len(tokens) == survivors:
                received.set()
            if delta.finish is not None:
                finishes.append(delta.finish)

    async with cluster(*workers) as router, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client(router.generate(routed())))
        holder, other = await _holder_first(workers)
        if survivors > 0:
            await received.wait()
        await holder.crash()
        await running
        assert tokens == expected_tokens(PROMPT, count=8, seed=3)
        # The figure of the first attempt that reported one.
        assert [(f.reason, f.cached_tokens) for f in finishes] == [(FinishReason.LENGTH, 9 if survivors else 3)]
        if survivors < 8:
            submit = other.submissions.get_nowait().submit
            assert list(submit.generated_token_ids) == tokens[:survivors]
            assert (submit.attempt, submit.request_id) == (2, "r1-0")
        router.assert_idle()


async def test_crash_with_four_choices_loses_none() -> None:
    doomed = FakeWorker("d0", script=_first_attempt_stalls_after(3))
    async with cluster(doomed) as router:
        tokens: dict[int, list[int]] = {c: [] for c in range(4)}
        restarted = FakeWorker("d0", incarnation=2, port=doomed.port)
        async for delta in router.generate(routed(n=4)):
            tokens[delta.choice_index] += [t.token_id for t in delta.tokens]
            if all(len(t) == 3 for t in tokens.values()):
                await doomed.crash()
                await restarted.start()
        await restarted.crash()
        assert tokens == {c: expected_tokens(PROMPT, count=8, seed=3, choice=c) for c in range(4)}
        router.assert_idle()


async def test_lost_stream_waits_for_restarted_worker() -> None:
    worker = FakeWorker("d0", script=_first_attempt_stalls_after(2))
    async with cluster(worker) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        await worker.submissions.get()
        await worker.crash()
        await router.registry.until_live(0)
        async with FakeWorker("d0", incarnation=2, port=worker.port) as restarted:
            assert (await client)[0] == expected_tokens(PROMPT, count=8, seed=3)
            assert (await restarted.submissions.get()).submit.attempt == 2
            router.assert_idle()


async def test_lost_stream_ends_after_rejoin_timeout() -> None:
    settings = DispatchSettings(rejoin_s=0.05)
    worker = FakeWorker("d0", script=hold)
    async with cluster(worker, settings=settings) as router:
        client = asyncio.create_task(collect(router.generate(routed())))
        await worker.submissions.get()
        await worker.crash()
        with pytest.raises(Unavailable) as caught:
            await client
        assert caught.value.retry_after_s == 1.0
        router.assert_idle()


async def test_attempts_without_progress_are_bounded() -> None:
    async def broken(submission: Submission) -> None:
        submission.give([], finish=FinishReason.ERROR)

    workers = [FakeWorker(f"d{i}", script=broken) for i in range(6)]
    async with cluster(*workers) as router:
        with pytest.raises(InternalError):
            await collect(router.generate(routed()))
        assert sum(w.submissions.qsize() for w in workers) == 4
        assert router.observed.retries == ["worker_fault"] * 3
        router.assert_idle()


async def test_worker_token_gap_is_retried_and_repeats_are_dropped() -> None:
    """A gap is the worker's fault and another continues; tokens that the client has are dropped."""

    async def repeat_then_skip_tokens(submission: Submission) -> None:
        if submission.submit.attempt > 1:
            await answer(submission)
            return
        tokens = submission.tokens
        submission.give(tokens[:3])
        submission.give(tokens[1:4], first_index=1)
        submission.give(tokens[6:], first_index=6)

    workers = [FakeWorker(name, script=repeat_then_skip_tokens) for name in ("d0", "d1")]
    async with cluster(*workers) as router:
        assert (await collect(router.generate(routed())))[0] == expected_tokens(PROMPT, count=8, seed=3)
        assert router.observed.retries == ["worker_fault"]
        router.assert_idle()


async def test_stale_attempts_are_not_delivered() -> None:
    async def send_other_attempts(submission: Submission) -> None:
        submission.give([1, 2, 3], attempt=submission.submit.attempt + 1)
        submission.give([4, 5, 6], attempt=0)
        await answer(submission)

    worker = FakeWorker("d0", script=send_other_attempts)
    async with cluster(worker) as router:
        assert (await collect(router.generate(routed())))[0] == expected_tokens(PROMPT, count=8, seed=3)
        assert router.observed.retries == []


async def test_prefill_workers_final_refusal_ends_the_request() -> None:
    async def refused(submission: Submission) -> None:
        submission.fail_transfer(code="ContextLengthExceeded")

    prefillers = [FakeWorker(f"p{i}", role=WorkerRole.PREFILL) for i in range(2)]
    decode = FakeWorker("d0", script=refused)
    async with cluster(decode, *prefillers) as router:
        with pytest.raises(ContextLengthExceeded):
            await collect(router.generate(routed(LONG_PROMPT)))
        submission = await decode.submissions.get()
        await submission.cancelled.wait()
        assert submission.reroutes.empty()
        assert all(w.penalty_ms == 0.0 for w in router.registry.snapshots())
        assert router.observed.retries == []
        router.assert_idle()


async def test_tokens_precede_error_delivered_with_them() -> None:
    async def finish_with_error(submission: Submission) -> None:
        submission.give(submission.tokens[:3], finish=FinishReason.ERROR)

    async with cluster(FakeWorker("d0", script=finish_with_error)) as router:
        tokens: list[int] = []

        async def client() -> None:
            async for delta in router.generate(routed()):
                tokens.extend(t.token_id for t in delta.tokens)

        with pytest.raises(InternalError):
            await client()
        assert tokens == expected_tokens(PROMPT, count=8, seed=3)[:3]
        router.assert_idle()


async def test_failed_transfer_is_rerouted_then_computed_locally() -> None:
    async def transfers_fail(submission: Submission) -> None:
        submission.fail_transfer("another transfer")
        submission.fail_transfer()
        first = await submission.reroutes.get()
        assert first.prefill.worker_id != submission.submit.prefill.worker_id
        assert (first.prefill.transfer_id, first.prefill.attempt) == (submission.submit.prefill.transfer_id, 2)
        submission.fail_transfer()
        second = await submission.reroutes.get()
        assert not second.HasField("prefill")
        await answer(submission)

    prefillers = [FakeWorker(f"p{i}", role=WorkerRole.PREFILL) for i in range(2)]
    decode = FakeWorker("d0", script=transfers_fail)
    async with cluster(decode, *prefillers) as router:
        deltas = [delta async for delta in router.generate(routed(LONG_PROMPT))]
        tokens = [token.token_id for delta in deltas for token in delta.tokens]
        assert tokens == expected_tokens(LONG_PROMPT, count=8, seed=3)
        assert router.observed.retries == ["transfer_failed"] * 2
        # Who read it in the end, not who was to.
        assert (finish := deltas[-1].finish) is not None
        assert finish.prefilled_by is WorkerRole.DECODE
        assert decode.submissions.qsize() == 1
        router.assert_idle()


async def test_prefill_worker_lost_before_dispatch_falls_back_to_local() -> None:
    prefill = FakeWorker("p0", role=WorkerRole.PREFILL)
    decode = FakeWorker("d0")
    async with cluster(decode, prefill) as router:
        await prefill.crash()
        await router.registry.until_live(1)
        await collect(router.generate(routed(LONG_PROMPT)))
        assert router.observed.modes == ["no_prefill_worker"]


async def test_draining_worker_gets_no_new_requests() -> None:
    one = FakeWorker("d0")
    two = FakeWorker("d1")
    async with cluster(one, two) as router:
        one.send(pb.WorkerMessage(draining=pb.Draining(reason="SIGTERM")))
        await router.registry.until(lambda: any(w.draining for w in router.registry.snapshots()))
        for i in range(5):
            await collect(router.generate(routed(request_id=f"r{i}")))
        assert (one.submissions.qsize(), two.submissions.qsize()) == (0, 5)


@pytest.mark.parametrize("taken", [False, True], ids=["refused", "taken"])
async def test_request_failed_by_live_workers_does_not_wait(taken: bool) -> None:
    """A listed address is awaited while no worker serves, not to fail on it as well."""

    async def fails(submission: Submission) -> None:
        if taken:
            submission.give([], finish=FinishReason.ERROR)
        else:
            submission.refuse("InternalError", "boom")

    settings = DispatchSettings(max_queue_s=0.05, rejoin_s=0.05)
    async with cluster(FakeWorker("d0", script=fails), settings=settings) as router:
        router.registry.expected.named({"10.9.9.9:1"})
        with pytest.raises(InternalError, match="the workers failed on this request"):
            await collect(router.generate(routed()))
        router.assert_idle()


async def test_request_waiting_next_to_live_workers_gets_workers_error() -> None:
    """One worker failed it and still serves; the other leaves, and its successor does not come in time."""

    async def script(submission: Submission) -> None:
        if submission.submit.attempt == 1:
            submission.refuse("InternalError", "boom")
            return
        submission._send(pb.WorkerMessage(draining=pb.Draining(reason="SIGTERM")))
        submission.refuse("Unavailable", "this worker is draining", retry_after_s=1.0)

    workers = [FakeWorker(name, script=script) for name in ("d0", "d1")]
    async with cluster(*workers, settings=DispatchSettings(max_queue_s=0.05)) as router:
        router.registry.expected.named({"10.9.9.9:1"})
        with pytest.raises(Unavailable, match="this worker is draining"):
            await collect(router.generate(routed()))
        router.assert_idle()


async def test_prediction_goes_to_every_attempt_and_its_use_adds_up() -> None:
    """Of the attempt whose worker is lost, what it reported with tokens that the client has."""

    async def fail_after_three(submission: Submission) -> None:
        tokens = submission.tokens
        if submission.submit.attempt > 1:
            submission.give(tokens[:1], prediction=(0, 2), cached=3)
            first = len(submission.submit.generated_token_ids) + 1
            submission.give(tokens[1:], first_index=first, prediction=(4, 2), finish=FinishReason.LENGTH)
            return
        submission.give(tokens[:3], prediction=(2, 5), cached=3)
        submission.give([], finish=FinishReason.ERROR)

    workers = [FakeWorker(f"d{i}", script=fail_after_three) for i in range(2)]
    expected = array("i", [5, 6, 7])
    async with cluster(*workers) as router:
        deltas = [delta async for delta in router.generate(replace(routed(), prediction=expected))]
        assert [t.token_id for delta in deltas for t in delta.tokens] == expected_tokens(PROMPT, count=8, seed=3)
        (finish,) = [delta.finish for delta in deltas if delta.finish is not None]
        assert finish.prediction == PredictionUse(2 + 4, 5 + 2)
        sent = [one.submissions.get_nowait().submit.prediction for one in workers]
        assert sent == [expected.tobytes()] * 2
        router.assert_idle()
