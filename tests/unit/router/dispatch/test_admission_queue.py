"""Requests at admission, with real sessions and dispatch, and fake workers."""

import asyncio

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from router.admission.counts import Rejection
from router.admission.types import AdmissionEntry
from router.metrics.admission import AdmissionMetrics
from router.metrics.tenants import MAX_TENANTS, TenantLabels
from router.types.requests import MAX_PRIORITY, ResumePoint
from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.errors import Overloaded, RequestTooLarge, Unavailable
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from tests.support.fake_worker import FakeWorker, Submission, expected_tokens, hold
from tests.support.router.admission_queues import gated, of
from tests.support.router.cluster import PROMPT, collect, routed


async def test_queued_requests_run_in_turn_with_whole_answers() -> None:
    worker = FakeWorker("d0")
    async with gated(worker) as (gate, core):
        requests = [of(tenant, i) for i in range(4) for tenant in "ab"]
        answers = await asyncio.gather(*(collect(gate.generate(request)) for request in requests))
        assert all(tokens[0] == expected_tokens(PROMPT, count=8, seed=3) for tokens in answers)
        assert gate.queue.admission.num_inflight == gate.queue.admission.num_waiting == 0
        assert gate.queue.admission.counts.tenants["a"].requests == 4
        assert gate.queue.admission.counts.tenants["a"].output_tokens == 32
        core.assert_idle()


async def test_queued_tenants_alternate() -> None:
    order: list[str] = []

    async def note(submission: Submission) -> None:
        order.append(submission.submit.request_id)
        submission.give_all()

    worker = FakeWorker("d0", script=hold)
    async with gated(worker) as (gate, _):
        first = asyncio.create_task(collect(gate.generate(of("x", 0))))
        held = await worker.submissions.get()
        worker.script = note
        tasks = [asyncio.create_task(collect(gate.generate(of("a", i)))) for i in range(3)]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(collect(gate.generate(of("b", i)))) for i in range(2)]
        await asyncio.sleep(0)
        assert gate.queue.admission.num_waiting == 5
        held.give_all()
        await asyncio.gather(first, *tasks)
        assert order == ["a0-0", "b0-0", "a1-0", "b1-0", "a2-0"]


async def test_request_beyond_inflight_bound_waits() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, running=9, inflight=2) as (gate, core):
        tasks = [asyncio.create_task(collect(gate.generate(of("a", i)))) for i in range(4)]
        held = [await worker.submissions.get() for _ in range(2)]
        assert (gate.queue.admission.num_waiting, core.dispatcher.num_inflight) == (2, 2)
        for _ in range(2):
            held.pop().give_all()
            held.insert(0, await worker.submissions.get())
            assert core.dispatcher.num_inflight == 2
        for one in held:
            one.give_all()
        await asyncio.gather(*tasks)


async def test_drain_timeout_refuses_promised_streams() -> None:
    async with gated(FakeWorker("d0", script=hold)) as (gate, _):
        stuck = asyncio.create_task(collect(gate.generate(of("a", 0))))
        await asyncio.sleep(0)
        await gate.drain(most_s=0.01)
        assert gate.queue.admission.num_inflight == 1
        with pytest.raises(Unavailable, match="draining") as caught:
            await collect(
                gate.generate(replace(of("a", 1), resume=(ResumePoint(worker=Incarnation(9), num_tokens=0),)))
            )
        assert caught.value.retry_after_s == 1.0
        stuck.cancel()


async def test_client_leaving_queue_frees_its_place() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker) as (gate, core):
        running = asyncio.create_task(collect(gate.generate(of("a", 0))))
        held = await worker.submissions.get()
        waiting = asyncio.create_task(collect(gate.generate(of("a", 1))))
        await asyncio.sleep(0)
        assert gate.queue.admission.num_waiting == 1
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (gate.queue.admission.num_waiting, gate.queue.admission.num_inflight) == (0, 1)
        held.give_all()
        await running
        core.assert_idle()


async def test_queued_request_beyond_bound_is_refused() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, max_queue_s=0.3) as (gate, _):
        running = asyncio.create_task(collect(gate.generate(of("a", 0))))
        held = await worker.submissions.get()
        with pytest.raises(Unavailable) as caught:
            await collect(gate.generate(of("a", 1)))
        assert caught.value.retry_after_s is not None
        assert gate.queue.admission.counts.rejections[Rejection.HOPELESS] == 1
        held.give_all()
        await running


async def test_oversized_request_is_refused_at_once_when_busy() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, running=2) as (gate, core):
        running = [asyncio.create_task(collect(gate.generate(of("a", i)))) for i in range(3)]
        held = [await worker.submissions.get() for _ in range(2)]
        assert gate.queue.admission.num_waiting == 1
        (info,) = (w.info for w in core.registry.snapshots())
        with pytest.raises(RequestTooLarge, match="the largest pool holds"):
            await collect(gate.generate(replace(of("a", 9), prompt_token_ids=(1,) * info.pool_tokens)))
        assert (gate.queue.admission.num_waiting, worker.submissions.qsize()) == (1, 0)
        for submission in held:
            submission.give_all()
        (await worker.submissions.get()).give_all()
        await asyncio.gather(*running)
        core.assert_idle()


async def _answer(submission: Submission) -> None:
    submission.give_all()


@pytest.mark.parametrize(
    ("tenant", "requested", "given"),
    [
        ("b", -1000, 5),
        ("b", 7, 7),
        # Of a key nobody has said that it goes before others; without keys there is one tenant.
        ("a", -1000, 0),
        ("a", 7, 7),
        ("", -1000, -1000),
        ("c", -1000, -1000),
    ],
)
async def test_tenant_priority_bound_reaches_workers(tenant: str, requested: int, given: int) -> None:
    worker = FakeWorker("d0")
    best = {"b": TenantLimits(best_priority=5), "c": TenantLimits(best_priority=-MAX_PRIORITY)}
    limits = LimitsConfig(tenants=best)
    async with gated(worker, limits=limits) as (gate, _):
        await collect(gate.generate(replace(routed(priority=requested), tenant=tenant)))
        assert worker.submissions.get_nowait().submit.priority == given


async def test_drain_lets_queued_requests_run() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker) as (gate, core):
        running = asyncio.create_task(collect(gate.generate(of("a", 0))))
        held = await worker.submissions.get()
        worker.script = _answer
        waiting = asyncio.create_task(collect(gate.generate(of("a", 1))))
        await asyncio.sleep(0)
        drain = asyncio.create_task(gate.drain(most_s=60.0))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="draining"):
            await collect(gate.generate(of("a", 2)))
        held.give_all()
        await asyncio.gather(running, waiting, drain)
        core.assert_idle()


async def test_metrics_show_the_queue_and_cap_the_tenants() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, running=2000) as (gate, _):
        registry = CollectorRegistry()
        registry.register(AdmissionMetrics(gate.queue.admission, TenantLabels()))
        counts = gate.queue.admission.counts
        counts.rejected(Rejection.DEADLINE, "named")
        for number in range(MAX_TENANTS + 5):
            counts.served(f"{number:032x}", 10, 3)
        shown = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
        }
        assert shown["tandem_queue_requests", "prefill"] == shown["tandem_queue_tokens", "both"] == 0.0
        assert shown["tandem_refused_choices",] == 0.0
        assert shown["tandem_queue_oldest_seconds",] == 0.0
        assert shown["tandem_rejections_total", "deadline"] == 1.0
        assert shown["tandem_tenant_rejections_total", "named"] == 1.0
        assert shown["tandem_tenant_requests_total", "other"] == 6.0
        assert sum(name == "tandem_tenant_requests_total" for name, *_ in shown) <= MAX_TENANTS + 1


async def test_refused_newcomer_evicts_no_other() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, max_tokens=36) as (gate, core):
        running = asyncio.create_task(collect(gate.generate(of("x", 0))))
        held = await worker.submissions.get()
        waiting = [asyncio.create_task(collect(gate.generate(of(tenant, i)))) for i, tenant in enumerate("aab")]
        await asyncio.sleep(0)
        assert gate.queue.admission.num_waiting == 3
        # The end of a's line would give way to it, b's shorter one would not, and both would have to.
        with pytest.raises(Overloaded):
            await collect(gate.generate(replace(routed(tuple(range(20)), request_id="c0"), tenant="c")))
        worker.script = _answer
        held.give_all()
        await asyncio.gather(running, *waiting)
        core.assert_idle()


async def test_evicted_request_is_refused_at_once() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, max_tokens=36) as (gate, _):
        running = asyncio.create_task(collect(gate.generate(of("x", 0))))
        held = await worker.submissions.get()
        waiting = [asyncio.create_task(collect(gate.generate(of("a", i)))) for i in range(3)]
        await asyncio.sleep(0)
        other = asyncio.create_task(collect(gate.generate(of("b", 0))))
        with pytest.raises(Overloaded):
            await waiting[2]
        worker.script = _answer
        held.give_all()
        await asyncio.gather(running, *waiting[:2], other)


async def test_request_no_worker_accepted_is_not_charged() -> None:
    worker = FakeWorker("d0", script=_too_full)
    limits = LimitsConfig(default=TenantLimits(tokens_per_minute=1000, requests_per_minute=100))
    async with gated(worker, limits=limits) as (gate, core):
        refused = asyncio.Event()
        core.observed.retried = lambda _: refused.set()
        full = asyncio.create_task(collect(gate.generate(of("a", 0))))
        await refused.wait()
        full.cancel()
        await asyncio.gather(full, return_exceptions=True)
        await worker.crash()
        await core.registry.until_live(0)
        core.registry.expected.named(())
        with pytest.raises(Unavailable):
            await collect(gate.generate(of("a", 1)))
        account = gate.queue.admission._limiter._account("a")
        assert (account.requests_taken, account.tokens_taken, account.usage.num_inflight) == (0, 0.0, 0)
        assert gate.queue.admission._counters.counter("a") == 0.0
        assert "a" not in gate.queue.admission.counts.tenants
        core.assert_idle()


async def test_request_during_last_drain_waits_for_successor() -> None:
    leaving = FakeWorker("d0", script=hold)
    async with gated(leaving) as (gate, core):
        leaving.send(pb.WorkerMessage(draining=pb.Draining(reason="SIGTERM")))
        await core.registry.until(lambda: not core.registry.live_decoders())
        waiting = asyncio.create_task(collect(gate.generate(of("a", 0))))
        await asyncio.sleep(0)
        assert gate.queue.admission.num_waiting == 1
        await leaving.crash()
        await core.registry.until_live(0)
        gate.queue._pump()
        assert gate.queue.admission.num_waiting == 1, "it is expected at its address"
        async with FakeWorker("d0", incarnation=2, port=leaving.port):
            assert (await waiting)[0] == expected_tokens(PROMPT, count=8, seed=3)
        core.assert_idle()


async def test_request_without_expected_worker_is_refused_at_once() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker) as (gate, core):
        await worker.crash()
        await core.registry.until_live(0)
        core.registry.expected.named(())
        with pytest.raises(Unavailable, match="no decode worker is available"):
            await collect(gate.generate(of("a", 0)))
        assert gate.queue.admission.num_inflight == 0


async def test_client_leaving_at_its_turn_is_not_charged() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, limits=LimitsConfig(default=TenantLimits(tokens_per_minute=1000))) as (gate, _):
        running = asyncio.create_task(collect(gate.generate(of("x", 0))))
        held = await worker.submissions.get()
        waiting = asyncio.create_task(collect(gate.generate(of("a", 0))))
        await asyncio.sleep(0)
        turns: list[AdmissionEntry] = []
        pump = gate.queue.admission.pump

        def cancel_when_admitted() -> list[AdmissionEntry]:
            if given := pump():
                turns.extend(given)
                waiting.cancel()
            return given

        gate.queue.admission.pump = cancel_when_admitted
        held.give_all()
        await asyncio.gather(running, waiting, return_exceptions=True)
        assert [entry.ticket.tenant for entry in turns] == ["a"]
        assert gate.queue.admission._limiter._account("a").tokens_taken == 0.0
        assert gate.queue.admission.num_inflight == 0


async def test_client_leaving_during_prefill_is_charged() -> None:
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, limits=LimitsConfig(default=TenantLimits(tokens_per_minute=1000))) as (gate, core):
        leaving = asyncio.create_task(collect(gate.generate(of("a", 0))))
        await worker.submissions.get()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert gate.queue.admission._limiter._account("a").tokens_taken == len(PROMPT)
        assert gate.queue.admission._counters.counter("a") == len(PROMPT)
        assert gate.queue.admission.counts.tenants["a"].requests == 1
        core.assert_idle()


async def _too_full(submission: Submission) -> None:
    submission.refuse("Overloaded", "full", retry_after_s=60.0)
