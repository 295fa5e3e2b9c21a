"""A prompt that is cancelled while a peer's prefix is fetched for it."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from decode_worker.worker import DecodeWorker
from engine.types.request import Request
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import RequestId
from tandem.values.prefix_holder import PrefixHolder
from tests.support.engine.ledger_host import parts
from tests.unit.decode_worker.test_worker import IDENTITY, Bench
from worker.engine_host import EngineHost


class Fetcher:
    """Returns nothing until the request is abandoned."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.gone = asyncio.Event()
        self.abandoned: list[RequestId] = []

    async def fetch(self, _request: Request, _holder: PrefixHolder, _trace: object) -> int:
        self.requested.set()
        await self.gone.wait()
        return 0

    def abandon(self, request_id: RequestId) -> None:
        self.abandoned.append(request_id)
        self.gone.set()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    faults: list[BaseException] = []
    host = EngineHost(parts(), on_fatal=faults.append)
    async with asyncio.TaskGroup() as group:
        worker = DecodeWorker(IDENTITY, host, group)
        host.start(on_output=worker.on_output, ports=tuple)
        made = Bench(host, worker)
        yield made
        await host.stop()
    assert not faults


async def test_decode_worker_cancelled_prompt_abandons_its_fetch(bench: Bench) -> None:
    fetcher = Fetcher()
    bench.worker.use(SimpleNamespace(receiver_hub=bench.hub, transports=(), finish=bench.hub.drain, fetcher=fetcher))
    order = pb.Submit(request_id="r", attempt=1, hash_root=bytes(16), prompt_token_ids=range(40))
    order.sampling.CopyFrom(common.SamplingParams(max_tokens=2, temperature=0.0))
    order.holder.CopyFrom(common.PrefixHolder(worker_id="d1", incarnation=1, address="127.0.0.1:1", num_tokens=32))
    bench.order(submit=order)
    async with asyncio.timeout(20):
        await fetcher.requested.wait()
        bench.order(cancel=pb.Cancel(request_id="r", attempt=1))
        await bench.worker.finish()
    assert [name.endswith(":r") for name in fetcher.abandoned] == [True]
    await bench.assert_empty()
