"""A router process's instance id in traces."""

import os
from contextlib import AsyncExitStack

import pytest

import router.__main__ as process
from tandem.config.cluster import ClusterConfig
from tandem.process.lifetime import Lifetime, RouterPlace
from tandem.telemetry.tracing import NoTracer


async def test_router_processes_on_one_host_have_distinct_instance_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    instances: list[str] = []

    def record(*_: object, instance: str, **__: object) -> NoTracer:
        instances.append(instance)
        return NoTracer()

    monkeypatch.setattr(process, "open_tracer", record)
    async with AsyncExitStack() as stack:
        for pid in (11, 12):
            monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
            process._open_tracer(stack, ClusterConfig(), RouterPlace(), Lifetime())
    assert len(set(instances)) == 2
    assert {instance.partition(".")[0] for instance in instances} == {"router"}
