"""A whole engine on its thread over the ledger instead of a model, for tests of what stands on it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from decode_worker.worker import DecodeWorker
from engine.assembly import EngineParts
from engine.scheduler.scheduler import Scheduler
from prefill_worker.worker import PrefillWorker
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.roles import WorkerRole
from tandem.values.worker_identity import WorkerIdentity
from tests.support.engine import ledger
from tests.support.engine.ledger import LedgerRunner
from worker.engine_host import EngineHost


def parts(**changes: int) -> EngineParts:
    """The parts that workers touch; the others are absent."""
    made: Any = {
        "scheduler": ledger.scheduler(**changes),
        "runner": LedgerRunner(),
        "config": ledger.config(**changes),
        "model": SimpleNamespace(vocab_size=ledger.VOCAB, flops_per_token=0, weight_format=None),
        "layout": SimpleNamespace(
            block_size=changes.get("block_size", ledger.BLOCK),
            worker_block_bytes=1 << 10,
            tp_size=1,
            windowed_layers=(),
        ),
        "budget": SimpleNamespace(weights_bytes=0, kv_bytes=0),
        "hasher": BlockHasher(ledger.SECRET),
    }
    return EngineParts(**made)


@asynccontextmanager
async def stopping(host: EngineHost) -> AsyncIterator[None]:
    """Stop the engine in the end, whatever happened."""
    try:
        yield
    finally:
        await host.stop()


async def settled(host: EngineHost) -> Scheduler:
    """The scheduler, once everything that was posted before has happened."""
    return await host.call(lambda scheduler: scheduler)


@asynccontextmanager
async def started_worker(role: WorkerRole) -> AsyncIterator[tuple[EngineHost, PrefillWorker | DecodeWorker]]:
    """A worker of this kind over a running engine, without sessions; nothing may fail inside."""
    faults: list[BaseException] = []
    host = EngineHost(parts(), on_fatal=faults.append)
    identity = WorkerIdentity(
        worker_id=WorkerId("w"), incarnation=Incarnation(1), role=role, model_name="ledger", address="127.0.0.1:1"
    )
    async with asyncio.TaskGroup() as tasks:
        is_decoder = role is WorkerRole.DECODE
        worker = DecodeWorker(identity, host, tasks) if is_decoder else PrefillWorker(identity, host)
        host.start(on_output=worker.on_output, ports=tuple)
        yield host, worker
        await host.stop()
    assert not faults
