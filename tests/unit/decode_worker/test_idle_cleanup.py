"""Cleaning up needs no timer and no later request to wake an idle engine (docs/extend/incidents.md)."""

import asyncio

from prefill_worker.worker import PrefillWorker
from tandem.errors import TransferError
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import TransferId
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts, settled
from tests.unit.decode_worker.test_worker import PROMPT, TRANSFER, WAIT_S, bench
from tests.unit.decode_worker.test_worker import Bench as DecodeBench
from tests.unit.prefill_worker.test_worker import IDENTITY, job
from tests.unit.prefill_worker.test_worker import Bench as PrefillBench
from worker.engine_host import EngineHost

__all__ = ["bench"]


async def until_free(host: EngineHost) -> None:
    """Look from outside: a call into the engine would wake it."""
    blocks = host.parts.scheduler.blocks
    async with asyncio.timeout(WAIT_S):
        while blocks.num_promised or blocks.pool.num_used:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_cancel_is_forwarded_in_next_loop_iteration(bench: DecodeBench) -> None:
    bench.submit()
    await bench.started()
    bench.order(cancel=pb.Cancel(request_id="r", attempt=1))
    await asyncio.sleep(0)
    assert bench.hub.cancelled == [TRANSFER]
    await until_free(bench.host)


async def test_idle_worker_expired_destinations_are_released(bench: DecodeBench) -> None:
    """24 blocks, reserved for three hand-offs that never come."""
    names = [TransferId(f"t{i}") for i in range(3)]
    for i, name in enumerate(names):
        bench.submit(f"{i}", prompt=[i, *PROMPT, *PROMPT], transfer_id=name)
    blocks = {}
    for name in names:
        blocks[name] = (await bench.owner.bind(name, (await bench.started()).num_blocks(ledger.BLOCK))).blocks
    assert (await settled(bench.host)).blocks.pool.num_free == 0
    for name in names:
        bench.owner.failed(name, (), TransferError("silent"))
        bench.owner.expired(name)
        bench.owner.released(name, blocks[name])
    await until_free(bench.host)


async def test_idle_worker_abandoned_sources_are_released() -> None:
    faults: list[BaseException] = []
    host = EngineHost(parts(num_blocks=5), on_fatal=faults.append)
    worker = PrefillWorker(IDENTITY, host)
    host.start(on_output=worker.on_output, ports=tuple)
    prefill = PrefillBench(host, worker)
    one = job()
    await worker.submit(one)
    await prefill.finished()
    assert (await settled(host)).blocks.pool.num_free == 0
    worker.abort(one.transfer_id)
    worker.release(one.transfer_id)
    await until_free(host)
    await host.stop()
    assert not faults
