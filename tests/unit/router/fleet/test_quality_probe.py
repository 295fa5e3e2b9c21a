"""Every worker scores the probe's text, and a metric shows its probability."""

import asyncio
import time
from array import array
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from router.fleet.probes import ProbeSchedule, QualityProbe, loss_of
from router.types.prompt_logprobs import ScoredPrompt
from tandem.config.cluster import load
from tandem.errors import ConfigError
from tandem.values.block_hash import root_hash
from tandem.values.roles import WorkerRole
from tests.support.fake_worker import SECRET, FakeWorker, ScoringAttempt
from tests.support.router.cluster import Cluster, cluster
from tests.support.router.worker_views import worker

ROOT = root_hash(secret=SECRET, model_fingerprint="model-a", salt="quality")
TEXT = (7, 8, 12)
WAIT_S = 20.0


def probe_of(router: Cluster) -> tuple[QualityProbe, CollectorRegistry]:
    made = QualityProbe(router.registry, router.dispatcher, tokens=TEXT, hash_root=ROOT, period_s=60.0)
    registry = CollectorRegistry()
    registry.register(made)
    return made, registry


def exported_loss(registry: CollectorRegistry, name: str, role: str) -> float | None:
    return registry.get_sample_value("tandem_quality_loss_nats", {"worker": name, "role": role})


def test_probe_schedule_is_due_on_join_and_each_period() -> None:
    schedule = ProbeSchedule(60.0)
    first, second = worker("d0"), worker("p0")
    assert schedule.due([first], 1.0) == [(first.info.key, WorkerRole.DECODE)]
    assert schedule.due([first, second], 2.0) == [(second.info.key, WorkerRole.PREFILL)]
    assert schedule.due([first, second], 60.9) == []
    assert schedule.due([first], 61.0) == [(first.info.key, WorkerRole.DECODE)]
    assert not schedule.knows(second.info.key), "it has left"
    assert schedule.due([first, second], 61.5) == [(second.info.key, WorkerRole.PREFILL)], "and is another now"


def test_quality_loss_is_mean_negative_logprob() -> None:
    assert loss_of(ScoredPrompt(logprobs=array("f", [-1.0, -2.0, -6.0]))) == 3.0


async def test_quality_probe_reports_each_worker() -> None:
    decode, scorer = FakeWorker("d0"), FakeWorker("p0", role=WorkerRole.PREFILL)
    async with cluster(decode, scorer) as router:
        probe, registry = probe_of(router)
        await probe.probe_due()
        assert (exported_loss(registry, "d0", "decode"), exported_loss(registry, "p0", "prefill")) == (10.0, 10.0)
        for one in (decode, scorer):
            order = one.scorings.get_nowait().order
            assert (list(order.prompt_token_ids), order.hash_root, order.num_top) == (list(TEXT), ROOT, 0)
            assert one.scorings.empty(), "one of each"
        assert router.observed.modes == [], "no request of a client's"
        await probe.probe_due()
        assert decode.scorings.empty(), "not before its period is over"
        router.assert_idle()


async def test_quality_probe_skips_refusing_and_departed_workers() -> None:
    decode, scorer = FakeWorker("d0"), FakeWorker("p0", role=WorkerRole.PREFILL)
    decode.scoring_script = lambda scoring: scoring.refuse("Overloaded")
    async with cluster(decode, scorer) as router:
        probe, registry = probe_of(router)
        await probe.probe_due()
        assert (exported_loss(registry, "d0", "decode"), exported_loss(registry, "p0", "prefill")) == (None, 10.0)
        assert scorer.scorings.qsize() == 1
        await scorer.crash()
        await router.registry.until_live(1)
        await probe.probe_due()
        assert exported_loss(registry, "p0", "prefill") is None


@pytest.mark.parametrize(
    "broken_script", [lambda scoring: scoring.refuse("Overloaded"), lambda scoring: scoring.give(scale=float("nan"))]
)
async def test_quality_probe_failure_removes_earlier_loss(broken_script: Callable[[ScoringAttempt], None]) -> None:
    decode = FakeWorker("d0")
    async with cluster(decode) as router:
        later_s = 0.0
        probe = QualityProbe(
            router.registry,
            router.dispatcher,
            tokens=TEXT,
            hash_root=ROOT,
            period_s=60.0,
            clock=lambda: time.monotonic() + later_s,
        )
        registry = CollectorRegistry()
        registry.register(probe)
        await probe.probe_due()
        assert exported_loss(registry, "d0", "decode") == 10.0
        later_s = 61.0
        decode.scoring_script = broken_script
        await probe.probe_due()
        assert exported_loss(registry, "d0", "decode") is None


async def test_quality_probe_runs_only_while_entered() -> None:
    decode = FakeWorker("d0")
    called = asyncio.Event()

    def hold(_: ScoringAttempt) -> None:
        called.set()

    decode.scoring_script = hold
    async with cluster(decode) as router:
        probe, _ = probe_of(router)
        async with probe:
            await asyncio.wait_for(called.wait(), WAIT_S)
        router.assert_idle()


def test_quality_probe_is_off_by_default() -> None:
    assert load(None).router.quality.period_s is None
    with pytest.raises(ConfigError, match=r"router\.quality\.text"):
        load(None, {"router.quality.text": "short"})
