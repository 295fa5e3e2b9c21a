"""Canaries: a live session over a dead engine is not ready."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

import pytest
from msgspec.structs import replace

from router.fleet.probes import Canary, CanarySchedule, CanarySettings
from router.fleet.readiness import ReadinessCheck
from router.metrics.router_metrics import RouterMetrics
from router.types.requests import ChoiceDelta, RoutedRequest
from tandem.errors import Unavailable
from tandem.values.block_hash import root_hash
from tests.support.fake_worker import SECRET, FakeWorker, answer, hold
from tests.support.router.admission_queues import gated, of
from tests.support.router.cluster import Cluster, cluster, collect, routed
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import client_of
from tests.support.router.worker_views import worker

CANARY_ROOT = root_hash(secret=SECRET, model_fingerprint="model-a", salt="canary")


@contextlib.asynccontextmanager
async def _canary(
    router: Cluster, *, timeout_s: float = 20.0, silence_s: float = 0.0
) -> AsyncIterator[tuple[Canary, ReadinessCheck]]:
    settings = CanarySettings(silence_s=silence_s, timeout_s=timeout_s, interval_s=0.01)
    canary = Canary(router.registry, router.dispatcher, hash_root=CANARY_ROOT, settings=settings)
    yield canary, ReadinessCheck(router.registry, RouterMetrics("m"), canary.answering)


async def test_readiness_with_dead_engine_fails_until_a_token() -> None:
    dead = FakeWorker("d0", script=hold)
    async with cluster(dead) as router, _canary(router, timeout_s=0.1) as (canary, readiness):
        assert readiness.not_ready_reason() is None
        async with canary:
            submission = await dead.submissions.get()
            await submission.cancelled.wait()
        assert readiness.not_ready_reason() == "no decode worker produces tokens"
        dead.script = answer
        await collect(router.generate(routed()))
        assert readiness.not_ready_reason() is None
        router.assert_idle()


async def test_readyz_without_accepted_key_is_503() -> None:
    parts, why = fakes.make_servers(fakes.make_tokenizer()), "no API key is accepted: the file was not read for 300 s"
    reason: list[str | None] = [None]
    async with cluster(FakeWorker("d0")) as router:
        parts.ready = ReadinessCheck(router.registry, RouterMetrics("m"), lambda _: True, lambda: reason[0])
        async with client_of(parts) as client:
            assert (await client.get("/readyz")).status_code == 200
            reason[0] = why
            answered = await client.get("/readyz")
            assert answered.status_code == 503
            assert why in answered.text
            assert (await client.get("/health")).status_code == 200


async def test_readyz_with_dead_engine_is_503() -> None:
    """At the server: /health stays 200 while the router lives, /readyz is 503 until the canary gets a token."""
    parts = fakes.make_servers(fakes.make_tokenizer())
    dead = FakeWorker("d0", script=hold)
    async with cluster(dead) as router, _canary(router, timeout_s=0.1) as (canary, readiness):
        parts.ready = readiness
        async with client_of(parts) as client:
            assert (await client.get("/readyz")).status_code == 200
            async with canary:
                await (await dead.submissions.get()).cancelled.wait()
            answered = await client.get("/readyz")
            assert (answered.status_code, answered.headers["retry-after"]) == (503, "1")
            assert "no decode worker produces tokens" in answered.text
            assert (await client.get("/health")).status_code == 200
            dead.script = answer
            await canary.probe(router.registry.snapshots()[0].info.key)
            assert (await client.get("/readyz")).status_code == 200


async def test_readyz_without_workers_ignores_pools_but_not_draining() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    async with cluster(FakeWorker("d0")) as router:
        parts.ready = readiness = ReadinessCheck(router.registry, RouterMetrics("m"), lambda _: False)
        async with client_of(parts) as client:
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/readyz?exclude=workers")).status_code == 200
            unknown = await client.get("/readyz?exclude=redis")
            assert unknown.status_code == 400
            assert unknown.json()["error"]["param"] == "exclude"
            readiness.drain()
            assert (await client.get("/readyz?exclude=workers")).status_code == 503


async def test_readyz_without_workers_still_needs_an_accepted_key() -> None:
    async with cluster(FakeWorker("d0")) as router:
        readiness = ReadinessCheck(
            router.registry, RouterMetrics("m"), lambda _: True, lambda: "no API key is accepted"
        )
        assert readiness.not_ready_reason(exclude_workers=True) == "no API key is accepted"


async def test_queue_with_all_engines_dead_refuses_until_a_token() -> None:
    dead = FakeWorker("d0", script=hold)
    async with gated(dead) as (gate, router), _canary(router, timeout_s=0.1) as (canary, _):
        gate.queue.refuse_while(canary.no_tokens_reason)
        [worker_key] = [w.info.key for w in router.registry.snapshots()]
        assert canary.no_tokens_reason() is None
        assert not await canary.probe(worker_key)
        with pytest.raises(Unavailable, match="no decode worker produces tokens") as refused:
            await collect(gate.generate(of("a", 0)))
        assert refused.value.retry_after_s == 5.0
        dead.script = answer
        assert await canary.probe(worker_key)
        await collect(gate.generate(of("a", 1)))
        assert canary.no_tokens_reason() is None
        router.assert_idle()


async def test_queue_with_one_live_engine_accepts_requests() -> None:
    workers = [FakeWorker("d0"), FakeWorker("d1", script=hold)]
    async with gated(*workers) as (gate, router), _canary(router, timeout_s=0.1) as (canary, _):
        gate.queue.refuse_while(canary.no_tokens_reason)
        keys = {w.info.key.worker_id: w.info.key for w in router.registry.snapshots()}
        assert not await canary.probe(keys["d1"])
        assert canary.no_tokens_reason() is None
        await collect(gate.generate(of("a", 0)))


async def test_canary_requests_one_uncounted_token_per_worker() -> None:
    workers = [FakeWorker("d0"), FakeWorker("d1", script=hold)]
    async with cluster(*workers) as router, _canary(router, timeout_s=0.3, silence_s=10.0) as (canary, readiness):
        keys = {w.info.key.worker_id: w.info.key for w in router.registry.snapshots()}
        for key in keys.values():
            await canary.probe(key)
        for fake in workers:
            submit = fake.submissions.get_nowait().submit
            assert fake.submissions.empty()
            assert (submit.sampling.max_tokens, len(submit.prompt_token_ids)) == (1, 1)
            assert submit.hash_root == CANARY_ROOT
        assert router.observed.modes == []
        # One that answers is enough; the other is avoided.
        assert readiness.not_ready_reason() is None
        answering = {w.info.key.worker_id: canary.answering(w) for w in router.registry.snapshots()}
        assert answering == {"d0": True, "d1": False}
        assert next(w for w in router.registry.snapshots() if w.info.key == keys["d1"]).penalty_ms > 0.0
        router.assert_idle()


async def test_canary_error_is_logged_and_probing_continues(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(FakeWorker("d0")) as router, _canary(router) as (canary, _):
        generate, called = router.dispatcher.generate, asyncio.Event()

        def fail_first_canary(request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
            if request.request_id == "canary-0":
                raise RuntimeError("a fault of ours")
            called.set()
            return generate(request)

        router.dispatcher.generate = fail_first_canary
        async with canary, asyncio.timeout(20.0):
            await called.wait()
        assert "a fault of ours" in caplog.text


async def test_canary_says_nothing_of_workers_that_leave_or_answer_before_their_turn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [FakeWorker(f"d{number}") for number in range(4)]
    async with cluster(*workers) as router, _canary(router, silence_s=0.1) as (canary, readiness):
        turns, others = iter(range(4)), asyncio.Event()

        async def turn() -> None:
            if next(turns):
                await others.wait()

        monkeypatch.setattr(canary, "_turn", turn)
        await asyncio.sleep(0.15)
        probing = asyncio.create_task(canary.probe_due())
        while not (first := [one for one in workers if not one.submissions.empty()]):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        silent, leaving, answering = (one for one in workers if one not in first)
        await leaving.crash()
        await router.registry.until_live(3)
        answered = worker(answering.worker_id).info.key
        router.registry.answered(answered)
        router.registry.find(answered).answered_s += 60.0
        others.set()
        await probing
        assert silent.submissions.qsize() == 1
        assert answering.submissions.empty()
        assert not canary._schedule.has_failures
        assert readiness.not_ready_reason() is None
    assert "produced no token" not in caplog.text


def test_canary_probes_silent_decode_workers_only() -> None:
    schedule = CanarySchedule(CanarySettings(silence_s=10.0))
    silent, busy = replace(worker("d0"), answered_s=5.0), replace(worker("d1"), answered_s=10.0)
    leaving, prefill = replace(worker("d2"), draining=True), worker("p0")
    assert schedule.due([silent, busy, leaving, prefill], 15.0) == [silent.info.key]
    schedule.failed(silent.info.key, 16.0)
    assert not schedule.answering(silent)
    assert schedule.answering(replace(silent, answered_s=17.0))
    assert schedule.answering(busy)
    # A worker that left and came back is believed again.
    schedule.due([busy], 18.0)
    assert schedule.answering(silent)


async def test_canary_stop_passes_its_callers_cancellation_on() -> None:
    probing, cancelled, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Canary):
        """Takes a while to end."""

        async def probe_due(self) -> None:
            try:
                probing.set()
                await asyncio.Event().wait()
            finally:
                cancelled.set()
                await may_end.wait()

    async with cluster(FakeWorker("d0")) as router, asyncio.timeout(20.0):
        canary = Slow(router.registry, router.dispatcher, hash_root=CANARY_ROOT)
        await canary.__aenter__()
        await probing.wait()
        stopping = asyncio.create_task(canary.stop())
        await cancelled.wait()
        stopping.cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        await canary.stop()  # again is nothing
