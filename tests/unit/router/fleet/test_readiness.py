"""Missing workers in the metrics used by alarms; a desired size is no loss."""

import asyncio
from pathlib import Path

from router.fleet.configured_workers import ConfiguredPoolSizes
from router.fleet.readiness import ReadinessCheck
from router.metrics.router_metrics import RouterMetrics
from router.types.session_events import CLOSED_HERE
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.config.cluster import load
from tests.support.router.worker_views import port, worker

_STATED = "tandem_pool_stated_workers"


def _shown(metrics: RouterMetrics, name: str, role: str) -> float | None:
    metrics.render()
    return metrics.registry.get_sample_value(name, {"role": role})


def test_drained_worker_does_not_count_as_lost() -> None:
    registry, metrics = WorkerRegistry(prefix_map=PrefixMap(), clock=lambda: 0.0), RouterMetrics("m")
    ReadinessCheck(registry, metrics, lambda _: True)
    assert _shown(metrics, "tandem_workers_lost_total", "decode") == 0
    for name in ("d0", "d1", "d2", "p0"):
        registry.joined(worker(name).info, port())
    registry.draining(worker("d0").info.key, "SIGTERM")
    registry.left(worker("d0").info.key, "the worker closed the session")
    registry.left(worker("d1").info.key, CLOSED_HERE)
    assert _shown(metrics, "tandem_workers_lost_total", "decode") == 0
    registry.left(worker("d2").info.key, "silent for 1.5 s")
    assert _shown(metrics, "tandem_workers_lost_total", "decode") == 1
    assert _shown(metrics, "tandem_workers_lost_total", "prefill") == 0


async def test_unconfigured_pool_differs_from_lost_pool(tmp_path: Path) -> None:
    path, metrics = tmp_path / "cluster.yaml", RouterMetrics("m")
    path.write_text("prefill: {replicas: 2}\n")
    pools = ConfiguredPoolSizes(path, load(path), metrics.stated_workers)
    assert [_shown(metrics, _STATED, role) for role in ("prefill", "decode")] == [2, 1]
    for text in ("prefill: {replicas: 0}\n", "nonsense: 1\n"):
        path.write_text(text)
        await asyncio.to_thread(pools.read)
        assert _shown(metrics, _STATED, "prefill") == 0
    path.unlink()
    await asyncio.to_thread(pools.read)
    assert _shown(metrics, _STATED, "prefill") == 0
