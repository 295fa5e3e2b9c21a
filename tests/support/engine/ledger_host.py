"""A whole engine on its thread over the ledger instead of a model, for tests of what stands on it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from engine.assembly import EngineParts
from engine.scheduler.scheduler import Scheduler
from tandem.values.block_hash import BlockHasher
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
            block_size=changes.get("block_size", ledger.BLOCK), worker_block_bytes=1 << 10, tp_size=1
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
