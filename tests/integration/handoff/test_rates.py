"""A hub's expected rate of a peer: from recent transfers of its current incarnation."""

import pytest

from kv_transfer.transports.in_process import MemoryFabric
from tandem.values.ids import Incarnation
from tests.integration.handoff.test_failures import decoding, prefilling
from tests.support.kv_transfer.handoff_fakes import begin, make_job


async def test_peer_rate_retries_slow_peer_later_and_restarted_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        route = worker.route(1)
        assert hub.bytes_per_s(route.address, route.incarnation) == 0.0
        transfer = begin(hub, owner, make_job("a", 30), route)
        await owner.until(transfer, lambda r: r.committed)
        now = hub._reaper.now()
        assert hub.bytes_per_s(route.address, route.incarnation) > 0.0
        for _ in range(200):
            hub._rates.observe(route.address, route.incarnation, "memory", num_bytes=1, seconds=1.0, now=now)
            hub._rates.observe("another", route.incarnation, "memory", num_bytes=1000, seconds=0.001, now=now)
        assert hub.bytes_per_s(route.address, route.incarnation) < 100.0
        assert hub.bytes_per_s(route.address, Incarnation(route.incarnation + 1)) > 500.0

        monkeypatch.setattr(hub._reaper, "now", lambda: now + 600.0)
        assert hub.bytes_per_s(route.address, route.incarnation) > 1e6
        worker.owner.gate.clear()
        transfer = begin(hub, owner, make_job("b", 30), route)
        assert hub.bytes_per_s(route.address, route.incarnation) < 100.0, "an answer is awaited"
        worker.owner.gate.set()
        await owner.until(transfer, lambda r: r.committed)
        await hub.drain()
