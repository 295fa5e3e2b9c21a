"""A router unsure of its copy of a worker's cache requests a snapshot."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from decode_worker.worker import DecodeWorker
from tandem.v1 import session_pb2 as pb
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts
from tests.unit.decode_worker.test_worker import IDENTITY, PROMPT, Bench
from worker.engine_host import EngineHost


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    faults: list[BaseException] = []
    host = EngineHost(parts(), on_fatal=faults.append)
    async with asyncio.TaskGroup() as group:
        worker = DecodeWorker(IDENTITY, host, group)
        host.start(on_output=worker.on_output, ports=tuple)
        yield Bench(host, worker)
        await host.stop()
    assert not faults


async def test_resync_returns_snapshot_of_cache(bench: Bench) -> None:
    for least in (0, len(PROMPT) // ledger.BLOCK):
        bench.order(resync=pb.Resync())
        snapshot = await bench.next_message("kv_events")
        assert snapshot.cleared
        assert len(snapshot.events) >= least
        bench.submit(prefill=False)
        await bench.answer()
