"""A call with several prompts is admitted as a whole or not at all; a refused one costs nothing."""

import asyncio
import time

import httpx
import pytest

from router.admission.counts import Rejection
from router.admission.types import AdmissionRequest
from router.http.app import create_app
from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.errors import InvalidRequest, Overloaded, Unavailable
from tests.support.fake_worker import FakeWorker, hold
from tests.support.router.admission_queues import gated, of
from tests.support.router.admission_world import AdmissionBench
from tests.support.router.cluster import collect
from tests.support.router.servers import fakes
from tests.support.router.servers.http_client import PLAIN, error_of

WAIT_S = 20.0


def wanted(tenant: str = "a", *, tokens: int = 100) -> AdmissionRequest:
    return AdmissionRequest(tenant=tenant, priority=0, num_tokens=tokens, max_output_tokens=1, deadline_s=None)


def limits(**bounds: int) -> LimitsConfig:
    return LimitsConfig(default=TenantLimits(**bounds))


@pytest.mark.parametrize(
    ("bounds", "name"),
    [({"concurrent_requests": 1}, "concurrent_requests"), ({"requests_per_minute": 1}, "requests_per_minute")],
)
def test_call_beyond_tenant_bound_is_invalid_and_free(bounds: dict[str, int], name: str) -> None:
    bench = AdmissionBench(limits=limits(**bounds))
    for _ in range(5):
        with pytest.raises(InvalidRequest, match=f"2 prompts: this API key's limit {name} is 1") as caught:
            bench.admission.enter_call([wanted(), wanted()])
        assert caught.value.param == name
    assert not bench.enter().waiting


def test_refused_call_is_free() -> None:
    bench = AdmissionBench(limits=limits(concurrent_requests=2, requests_per_minute=3, tokens_per_minute=1000))
    held = bench.enter()
    for _ in range(5):
        with pytest.raises(Overloaded) as caught:
            bench.admission.enter_call([wanted(), wanted()])
        assert caught.value.param == "concurrent_requests"
    assert bench.admission.num_inflight == 1
    bench.admission.end(held)
    entered = bench.admission.enter_call([wanted(), wanted()])
    assert (len(entered.entries), entered.refusal) == (2, None)
    assert bench.admission.num_inflight == 2


def test_call_larger_than_bucket_is_admitted_when_full() -> None:
    bench = AdmissionBench(limits=limits(tokens_per_minute=500))
    assert bench.admission.enter_call([wanted(tokens=300), wanted(tokens=300)]).refusal is None
    with pytest.raises(Overloaded):
        bench.admission.enter_call([wanted(tokens=300), wanted(tokens=300)])
    # 602 were taken of 500, and a full account is 500.
    bench.now_s += 60.0 * 603 / 500
    assert bench.admission.enter_call([wanted(tokens=300), wanted(tokens=300)]).refusal is None


def test_call_refused_at_second_prompt_is_free() -> None:
    bench = AdmissionBench(limits=limits(requests_per_minute=2), max_requests=1)
    bench.fill()
    for _ in range(5):
        entered = bench.admission.enter_call([wanted(), wanted()])
        assert isinstance(entered.refusal, Overloaded)
        assert all(entry.ended for entry in entered.entries[:1])
    assert (bench.admission.num_inflight, bench.admission.num_waiting) == (0, 0)
    assert bench.admission.counts.rejections == {Rejection.QUEUE_FULL: 10}, "a call is, with all its requests"
    assert bench.admission.counts.tenants["a"].rejected == 10
    assert bench.enter().waiting
    assert bench.admission.counts.tenants["a"].requests == 0


async def test_admitted_call_runs_all_and_frees_slots() -> None:
    worker = FakeWorker("d0")
    async with gated(worker, limits=limits(concurrent_requests=3)) as (gate, core), asyncio.timeout(WAIT_S):
        for turn in range(3):
            call = [of("a", 10 * turn + i) for i in range(3)]
            with gate.admitted(call):
                # One runs, the others wait in the line: their turns come whether or not somebody asks for them yet.
                answers = [await collect(gate.generate(request)) for request in call]
            assert all(len(tokens[0]) == 8 for tokens in answers)
        assert gate.queue.admission.num_inflight == gate.queue.admission.num_waiting == 0
        core.assert_idle()


async def test_admitted_call_never_run_frees_slots() -> None:
    worker = FakeWorker("d0", script=hold)
    bounds = limits(concurrent_requests=2, requests_per_minute=2)
    async with gated(worker, limits=bounds) as (gate, core):
        for _ in range(3):
            with gate.admitted([of("a", 1), of("a", 2)]):
                assert gate.queue.admission.num_inflight == 2
            assert gate.queue.admission.num_inflight == gate.queue.admission.num_waiting == 0
        with pytest.raises(InvalidRequest), gate.admitted([of("a", i) for i in range(3)]):
            pytest.fail("was let in")
        with gate.admitted([of("a", 1)]), pytest.raises(Overloaded), gate.admitted([of("a", 2), of("a", 3)]):
            pytest.fail("was let in")
        assert not gate.queue.turns
        assert not gate.queue._entered
        core.assert_idle()


async def test_evicted_request_of_call_is_refused_on_run() -> None:
    """Once entered it is queued; a decision made there before `run` is kept."""
    worker = FakeWorker("d0", script=hold)
    async with gated(worker, max_queue_s=0.3) as (gate, _), asyncio.timeout(WAIT_S):
        running = asyncio.create_task(collect(gate.generate(of("x", 0))))
        await worker.submissions.get()
        with gate.admitted([of("a", 1), of("a", 2)]):
            while gate.queue.admission.num_waiting:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for number in (1, 2):
                with pytest.raises(Unavailable):
                    await collect(gate.generate(of("a", number)))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_call_over_http_names_limit_and_frees_slots() -> None:
    parts = fakes.make_servers(fakes.make_tokenizer())
    parts.frontend.clock = time.monotonic
    bounds = limits(concurrent_requests=1, requests_per_minute=1)
    async with gated(FakeWorker("d0"), limits=bounds) as (gate, _), asyncio.timeout(WAIT_S):
        app = create_app(parts.frontend, gate, parts.ready, parts.config, parts.metrics)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            for stream in (False, True, False):
                answer = await client.post(PLAIN, json={"prompt": ["a b", "c d"], "stream": stream})
                assert answer.status_code == 400
                assert "retry-after" not in answer.headers
                assert error_of(answer)["param"] == "concurrent_requests"
            assert (await client.post(PLAIN, json={"prompt": "a b"})).status_code == 200
            assert (await client.post(PLAIN, json={"prompt": "a b"})).status_code == 429
    failures = parts.metrics.registry.get_sample_value
    assert failures("tandem_request_failures_total", {"code": "INVALID_ARGUMENT"}) == 6.0
    page = parts.metrics.render().decode()
    assert next(line for line in page.splitlines() if line.startswith("vllm:num_requests_waiting{")).endswith(" 0.0")
