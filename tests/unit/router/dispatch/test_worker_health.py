"""WorkerBreakers, quarantine and hedging as dispatch applies them: real sessions, fake workers."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest

from router.dispatch.choices.choice_run import ChoiceRun
from router.dispatch.choices.context import DispatchSettings, HedgingSettings
from router.metrics.worker_health import HealthMetrics
from router.types.requests import ResumePoint
from tandem.circuit_breaker import BreakerState
from tandem.errors import Unavailable
from tandem.values.ids import Incarnation
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import FakeWorker, Script, Submission, answer, expected_tokens, hold
from tests.support.router.cluster import LONG_PROMPT, PROMPT, cluster, collect, routed

pytestmark = pytest.mark.alone
"""Whether a first token is late is measured."""
HEDGED = DispatchSettings(hedging=HedgingSettings(quantile=0.9, budget=0.5))


async def broken(submission: Submission) -> None:
    submission.refuse("InternalError", "out of order")


def deadly(worker: FakeWorker):
    """Ends the worker at a request for more than eight tokens."""

    async def script(submission: Submission) -> None:
        if submission.submit.sampling.max_tokens > 8:
            await worker.crash()
        else:
            await answer(submission)

    return script


async def test_failing_worker_is_avoided_until_it_recovers() -> None:
    broken_worker, well = FakeWorker("d0", script=broken), FakeWorker("d1")
    async with cluster(broken_worker, well) as router:
        health, registry = router.dispatcher.health, router.registry
        registry.penalise = lambda *_: None  # the breaker alone keeps it out
        for i in range(30):
            assert (await collect(router.generate(routed(request_id=f"r{i}"))))[0]
        assert broken_worker.submissions.qsize() == 5
        key = next(w.info.key for w in registry.snapshots() if w.info.key.worker_id == "d0")
        assert health.breakers.states(time.monotonic()) == {key: BreakerState.OPEN}
        text = generate_latest(_registry(router)).decode()
        assert 'tandem_worker_breaker{state="open",worker="d0"} 1.0' in text
        # Alone it is asked all the same: better one that may fail than none.
        broken_worker.script = answer
        await well.crash()
        await registry.until_live(1)
        assert await collect(router.generate(routed()))


@pytest.mark.parametrize("role", list(WorkerRole))
async def test_health_of_departed_worker_is_forgotten(role: WorkerRole) -> None:
    """Idle when it leaves, so no request fails. It comes back on the same address."""
    failing, decode = FakeWorker("w0", role=role, script=broken), FakeWorker("d1", script=_transfers_fail)
    async with cluster(failing, decode) as router:
        health, registry = router.dispatcher.health, router.registry
        registry.penalise = lambda *_: None
        num_requests = 0
        for life in (2, 3, 4):
            while not any(key.worker_id == "w0" for key in health.breakers.states(time.monotonic())):
                num_requests += 1
                await collect(router.generate(routed((num_requests, *LONG_PROMPT))))
            await failing.crash()
            await registry.until_live(1)
            assert not any(key.worker_id == "w0" for key in health.breakers.states(time.monotonic()))
            failing.hello.incarnation = life
            await failing.start()
            await registry.until_live(2)
        lines = [line for line in generate_latest(_registry(router)).decode().splitlines() if "w0" in line]
        assert lines == []


async def _transfers_fail(submission: Submission) -> None:
    if submission.submit.HasField("prefill"):
        submission.fail_transfer()
        await submission.reroutes.get()
    await answer(submission)


def _registry(router) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(HealthMetrics(router.dispatcher.health, router.dispatcher.hedging, time.monotonic))
    return registry


async def test_request_crashing_two_workers_is_refused() -> None:
    workers = [FakeWorker(f"d{i}") for i in range(4)]
    for worker in workers:
        worker.script = deadly(worker)
    async with cluster(*workers) as router:
        poison = routed(max_tokens=9)
        with pytest.raises(Unavailable, match="two workers"):
            await collect(router.generate(poison))
        await router.registry.until_live(2)
        # Its client tries again, with another seed.
        with pytest.raises(Unavailable, match="like this one"):
            await collect(router.generate(replace(poison, sampling=poison.sampling._replace(seed=99))))
        tokens = await collect(router.generate(routed((1, 2, 3), request_id="r3")))
        assert tokens[0] == expected_tokens((1, 2, 3), count=8, seed=3)
        text = generate_latest(_registry(router)).decode()
        assert "tandem_quarantined_requests_total 1.0" in text
        assert "tandem_quarantine_refusals_total 1.0" in text
        assert router.dispatcher.health.poison.check([])
        router.assert_idle()


async def test_requests_next_to_poison_request_are_answered() -> None:
    workers = [FakeWorker(f"d{i}", script=hold) for i in range(4)]
    async with cluster(*workers) as router:
        innocents = [
            asyncio.create_task(collect(router.generate(routed(request_id=f"i{i}", seed=i)))) for i in range(4)
        ]
        poison = asyncio.create_task(collect(router.generate(routed((9, 9), request_id="p", max_tokens=9))))
        first = None
        while first is None:
            await asyncio.sleep(0.01)
            first = next((w for w in workers if any(key == "p-0" for key in w._live)), None)
        for worker in workers:
            worker.script = deadly(worker)
        beside = len(first._live)
        await first.crash()
        for worker in workers:
            if worker is not first:
                for submission in list(worker._live.values()):
                    submission.give_all()
        with pytest.raises(Unavailable, match="two workers"):
            await poison
        assert [tokens[0] for tokens in await asyncio.gather(*innocents)] == [
            expected_tokens(PROMPT, count=8, seed=i) for i in range(4)
        ]
        assert beside >= 1
        await router.registry.until_live(2)
        assert router.dispatcher.health.poison.check([])


async def test_established_stream_survives_two_worker_losses() -> None:
    async def hang_after_two_tokens(submission: Submission) -> None:
        submission.give(submission.tokens[:2])

    workers = [FakeWorker(f"d{i}", script=hang_after_two_tokens) for i in range(3)]
    async with cluster(*workers) as router:
        async with aclosing(router.generate(routed())) as stream:
            got = [token.token_id for token in (await anext(stream)).tokens]
            rest = asyncio.create_task(_rest(stream))
            for script in (hold, answer):
                for worker in workers:
                    worker.script = script
                victim = await _running_worker(workers)
                workers.remove(victim)
                await victim.crash()
            got += await rest
        assert got == expected_tokens(PROMPT, count=8, seed=3)


async def _rest(stream) -> list[int]:
    return [token.token_id async for delta in stream for token in delta.tokens]


async def _running_worker(workers: list[FakeWorker]) -> FakeWorker:
    while not (found := [w for w in workers if w._live]):  # noqa: ASYNC110 - a fake worker wakes nobody
        await asyncio.sleep(0.01)
    return found[0]


async def warm(router, count: int = 80) -> None:
    for i in range(count):
        await collect(router.generate(routed(request_id=f"w{i}")))


@pytest.mark.parametrize("prompt", [PROMPT, LONG_PROMPT], ids=["local", "handed_over"])
async def test_hedge_on_late_first_token_first_answer_wins(prompt: tuple[int, ...]) -> None:
    workers = [FakeWorker("d0"), FakeWorker("d1")]
    async with cluster(*workers, FakeWorker("p0", role=WorkerRole.PREFILL), settings=HEDGED) as router:
        await warm(router)
        slow: list[Submission] = []
        hedging = router.dispatcher.hedging
        assert hedging is not None
        started, won = hedging.num_started, hedging.num_won

        async def hang_first_attempt(submission: Submission) -> None:
            slow.append(submission)
            if len(slow) > 1:
                await answer(submission)

        for worker in workers:
            worker.script = hang_first_attempt
        tokens = await collect(router.generate(routed(prompt)))
        assert tokens[0] == expected_tokens(prompt, count=8, seed=3)
        await slow[0].cancelled.wait()
        assert (hedging.num_started - started, hedging.num_won - won) == (1, 1)
        if prompt is LONG_PROMPT:
            assert slow[0].submit.prefill.transfer_id != slow[1].submit.prefill.transfer_id
        router.assert_idle()


async def test_hedge_without_worker_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, tried, beside = FakeWorker("d0"), asyncio.Event(), ChoiceRun.submit_hedge

    def noted(twin: ChoiceRun, other: ChoiceRun, *, apart: int) -> None:
        tried.set()
        beside(twin, other, apart=apart)

    async with cluster(worker, settings=HEDGED) as router:
        await warm(router)
        monkeypatch.setattr(ChoiceRun, "submit_hedge", noted)
        worker.script = hold
        client = asyncio.create_task(collect(router.generate(routed())))
        await tried.wait()
        held = [worker.submissions.get_nowait() for _ in range(worker.submissions.qsize())]
        held[-1].give_all()
        await client
        assert router.dispatcher.hedging.num_started == 0
        router.assert_idle()


async def test_hedge_replaces_failed_first_run() -> None:
    workers = [FakeWorker("d0"), FakeWorker("d1")]
    async with cluster(*workers, settings=HEDGED) as router:
        await warm(router)
        for outcome in ("answer", "refuse"):
            submissions: asyncio.Queue[Submission] = asyncio.Queue()

            async def note(submission: Submission, received=submissions) -> None:
                received.put_nowait(submission)

            for worker in workers:
                worker.script = note
            client = asyncio.create_task(collect(router.generate(routed())))
            first, second = await submissions.get(), await submissions.get()
            if outcome == "answer":
                first.give_all()
                await second.cancelled.wait()
            else:
                first.refuse("InternalError")
                second.give_all()
            assert (await client)[0] == expected_tokens(PROMPT, count=8, seed=3)
            router.assert_idle()


async def test_hedging_is_off_by_default() -> None:
    async with cluster(FakeWorker("d0")) as router:
        assert router.dispatcher.hedging is None


async def test_hedged_request_crashing_two_workers_is_refused() -> None:
    workers = [FakeWorker(f"d{i}", incarnation=i + 1) for i in range(5)]
    crash_once_hedged(workers)
    async with cluster(*workers, settings=HEDGED) as router, asyncio.timeout(20.0):
        await warm(router)
        with pytest.raises(Unavailable, match="crashed"):
            await collect(router.generate(routed(max_tokens=9)))
        await router.registry.until_live(3)
        assert router.dispatcher.health.poison.num_condemned == 1
        router.assert_idle()
        assert router.dispatcher.health.poison.check(())


def crash_once_hedged(workers: Sequence[FakeWorker]) -> None:
    """Crash each as `deadly` does, once a second attempt of the request has begun."""
    begun: list[Submission] = []
    hedged = asyncio.Event()

    async def script(then: Script, submission: Submission) -> None:
        if submission.submit.sampling.max_tokens > 8:
            begun.append(submission)
            if len(begun) == 2:
                hedged.set()
            await hedged.wait()
        await then(submission)

    for worker in workers:
        worker.script = partial(script, deadly(worker))


async def test_prefill_failure_reported_before_loss_counts_once() -> None:
    decode = FakeWorker("d0", script=hold)
    prefill = {f"p{i}": FakeWorker(f"p{i}", role=WorkerRole.PREFILL, incarnation=i + 1) for i in range(5)}
    async with cluster(decode, *prefill.values()) as router, asyncio.timeout(20.0):
        running = asyncio.create_task(collect(router.generate(routed(LONG_PROMPT))))
        submission = await decode.submissions.get()
        route = submission.submit.prefill
        for num_dead in (1, 2):
            submission.fail_transfer(route.transfer_id)
            dying = prefill[route.worker_id]
            route = (await submission.reroutes.get()).prefill
            await dying.crash()
            await router.registry.until_live(6 - num_dead)
        submission.fail_transfer(route.transfer_id)
        with pytest.raises(Unavailable, match="crashed"):
            await running
        assert router.dispatcher.health.poison.check(())


async def test_superseded_run_leaves_health_unchanged() -> None:
    async def begin(submission: Submission) -> None:
        submission.give(submission.tokens[:2])

    worker = FakeWorker("d0", script=begin)
    async with cluster(worker) as router, asyncio.timeout(20.0), aclosing(router.generate(routed())) as former:
        await anext(former)
        point = ResumePoint(worker=Incarnation(1), num_tokens=2)
        again = replace(routed(), resume=(point,), resumptions=1)
        going_on = asyncio.create_task(collect(router.generate(again)))
        for _ in range(2):
            await worker.submissions.get()
        await former.aclose()
        (tracked,) = router.dispatcher.health.poison._choices.values()
        assert [key.worker_id for key in tracked.workers] == ["d0"]
        going_on.cancel()
        await asyncio.gather(going_on, return_exceptions=True)
