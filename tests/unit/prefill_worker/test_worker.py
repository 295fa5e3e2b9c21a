"""The prefill worker over a real engine thread and scheduler, with a hub that only records."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.protocol.messages import PrefillJob
from prefill_worker.worker import PrefillWorker
from tandem.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    RequestTooLarge,
    ServingError,
)
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockHash, BlockId, Incarnation, RequestId, TransferId, WorkerId
from tandem.values.outputs import CachedTokens, PhaseTimes, SampledToken
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams
from tandem.values.worker_identity import WorkerIdentity
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts, settled, stopping
from tests.unit.worker.test_adapters import FakeMemory
from tests.unit.worker.test_prepared_requests import adapter, request
from worker.engine_host import EngineHost
from worker.session_port import SessionPort

WAIT_S = 20.0
PROMPT = tuple((7 * i) % 90 for i in range(75))
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
IDENTITY = WorkerIdentity(
    worker_id=WorkerId("prefill-0"),
    incarnation=Incarnation(1),
    role=WorkerRole.PREFILL,
    model_name="ledger",
    address="127.0.0.1:1",
)


class FakeHub:
    """Records what the engine's events became."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, TransferId]] = []
        self.sent: dict[TransferId, list[BlockId]] = {}
        self.computed: list[int] = []
        self.tokens: list[SampledToken] = []
        self.cached: list[int] = []
        self.tail: BlockHash | None = None
        self.offered_tail: BlockHash | None = None
        self.errors: list[ServingError] = []
        self.done = asyncio.Event()

    def scheduled(self, transfer_id: TransferId, _queue_s: float, tail_hash: BlockHash | None) -> None:
        self.offered_tail = tail_hash
        self.reports.append(("scheduled", transfer_id))

    def progress(
        self, transfer_id: TransferId, num_computed_tokens: int, blocks: list[BlockId], *, windows: list[list[BlockId]]
    ) -> None:
        assert not windows
        self.reports.append(("progress", transfer_id))
        self.sent[transfer_id] = list(blocks)
        self.computed.append(num_computed_tokens)

    def first_token(self, transfer_id: TransferId, token: SampledToken, _cached: int, _by_source: CachedTokens) -> None:
        self.reports.append(("first_token", transfer_id))
        self.tokens.append(token)

    def finished(
        self,
        transfer_id: TransferId,
        blocks: list[BlockId],
        *,
        windows: list[list[BlockId]],
        cached_tokens: int,
        times: PhaseTimes,
        tail_hash: BlockHash | None,
    ) -> None:
        self.reports.append(("finished", transfer_id))
        assert times.prefill_s >= 0.0
        self.sent[transfer_id] = list(blocks)
        self.cached.append(cached_tokens)
        self.tail = tail_hash
        self.done.set()

    def failed(self, transfer_id: TransferId, error: ServingError) -> None:
        self.reports.append(("failed", transfer_id))
        self.errors.append(error)
        self.done.set()


class Bench:
    def __init__(self, host: EngineHost, worker: PrefillWorker) -> None:
        self.host = host
        self.worker = worker
        self.hub = FakeHub()
        fabric: Any = SimpleNamespace(sender_hub=self.hub, transports=("shm",))
        worker.fabric = fabric

    async def finished(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.hub.done.wait()
        self.hub.done.clear()

    async def assert_empty(self) -> None:
        ledger.assert_empty(await settled(self.host))


def job(name: str = "t", **changes: Any) -> PrefillJob:
    made = PrefillJob(
        transfer_id=TransferId(name),
        request_id=RequestId(name),
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        held_tokens=0,
        sampling=PARAMS,
        hash_root=ledger.ROOT,
    )
    return replace(made, **changes)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    faults: list[BaseException] = []
    host = EngineHost(parts(), on_fatal=faults.append)
    worker = PrefillWorker(IDENTITY, host)
    host.start(on_output=worker.on_output, ports=tuple)
    yield Bench(host, worker)
    await host.stop()
    assert not faults


async def test_prefill_worker_reports_chunks_and_holds_blocks_until_release(bench: Bench) -> None:
    one = job()
    await bench.worker.submit(one)
    await bench.finished()
    kinds = [kind for kind, _ in bench.hub.reports]
    assert kinds == ["scheduled", *["progress"] * (len(kinds) - 3), "first_token", "finished"]
    assert len(kinds) > 4, "several chunks"
    assert bench.hub.computed == sorted(bench.hub.computed)
    assert [token.token_id for token in bench.hub.tokens] == ledger.continuation(PROMPT, PARAMS)[:1]
    blocks = bench.hub.sent[one.transfer_id]
    runner: Any = bench.host.parts.runner
    assert runner.read(blocks, len(PROMPT)) == ledger.kv_of(PROMPT)
    chain: list[BlockHash] = []
    bench.host.parts.hasher.extend(ledger.ROOT, chain, PROMPT)
    assert bench.hub.tail == chain[-1]
    assert (await settled(bench.host)).load().num_used_blocks == len(blocks)
    bench.worker.release(one.transfer_id)
    await bench.assert_empty()

    await bench.worker.submit(job("again"))
    await bench.finished()
    assert bench.hub.cached == [0, 64]
    bench.worker.release(TransferId("again"))
    await bench.assert_empty()


async def test_prefill_worker_resumed_prompt_reports_no_token(bench: Bench) -> None:
    await bench.worker.submit(job(resume=True))
    await bench.finished()
    assert bench.hub.tokens == []
    bench.worker.release(TransferId("t"))
    await bench.assert_empty()


async def test_prefill_worker_aborted_prompt_keeps_blocks_until_release(bench: Bench) -> None:
    one = job()
    await bench.worker.submit(one)
    await bench.finished()
    bench.worker.abort(one.transfer_id)
    assert (await settled(bench.host)).load().num_used_blocks == len(bench.hub.sent[one.transfer_id])
    bench.worker.release(one.transfer_id)
    await bench.assert_empty()


async def test_prefill_worker_prompt_released_before_computing_leaves_nothing(bench: Bench) -> None:
    busy = threading.Event()
    bench.host.post(lambda _: busy.wait(WAIT_S))
    submitted = asyncio.ensure_future(bench.worker.submit(job()))
    await asyncio.sleep(0)
    bench.worker.abort(TransferId("t"))
    bench.worker.release(TransferId("t"))
    busy.set()
    await submitted
    await bench.assert_empty()
    assert ("finished", TransferId("t")) not in bench.hub.reports
    await bench.worker.submit(job())
    await bench.finished()
    bench.worker.release(TransferId("t"))
    await bench.assert_empty()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"token_ids": (ledger.VOCAB,), "num_prompt_tokens": 1}, InvalidRequest),
        ({"sampling": SamplingParams(max_tokens=8, logit_bias={ledger.VOCAB: 1.0})}, InvalidRequest),
        ({"token_ids": (1,) * 201, "num_prompt_tokens": 201}, ContextLengthExceeded),
        ({"num_prompt_tokens": 0}, InvalidRequest),
    ],
)
async def test_prefill_worker_impossible_prompt_is_refused_and_leaves_nothing(
    bench: Bench, changes: dict[str, Any], error: type[ServingError]
) -> None:
    with pytest.raises(error):
        await bench.worker.submit(job(**changes))
    assert bench.hub.reports == []
    await bench.assert_empty()
    await bench.worker.submit(job())
    await bench.finished()
    bench.worker.release(TransferId("t"))


async def test_prefill_worker_prompt_larger_than_pool_is_refused() -> None:
    host = EngineHost(parts(num_blocks=4), on_fatal=lambda _: None)
    worker = PrefillWorker(IDENTITY, host)
    host.start(on_output=worker.on_output, ports=tuple)
    try:
        with pytest.raises(RequestTooLarge):
            await worker.submit(job())
    finally:
        await host.stop()


async def test_prefill_worker_submitted_request_is_refused_with_reason(bench: Bench) -> None:
    port = SessionPort(Incarnation(3))
    bench.worker.order(port, pb.RouterMessage(submit=pb.Submit(request_id="r", attempt=4)))
    message = await port.next()
    assert message is not None
    assert (message.refused.request_id, message.refused.attempt) == ("r", 4)
    assert message.refused.failure.code == "InvalidRequest"
    bench.worker.order(port, pb.RouterMessage(cancel=pb.Cancel(request_id="r", attempt=4)))


async def test_prefill_worker_job_passes_deadline_and_priority_to_engine(bench: Bench) -> None:
    """It has timed out on arrival: it never runs, and the decode worker gets the reason."""
    late = job("late", timeout_s=0.0, priority=3)
    await bench.worker.submit(late)
    await bench.finished()
    assert bench.hub.reports == [("failed", late.transfer_id)]
    assert isinstance(bench.hub.errors[0], DeadlineExceeded)
    request = bench.worker._tasks[late.transfer_id].request
    assert (request.priority, request.deadline_s) == (3, request.arrival_s)
    bench.worker.release(late.transfer_id)
    await bench.assert_empty()


async def test_prefill_worker_snapshot_request_reports_all_cached_blocks(bench: Bench) -> None:
    await bench.worker.submit(job())
    await bench.finished()
    port = SessionPort(Incarnation(3))
    bench.worker.order(port, pb.RouterMessage(resync=pb.Resync()))
    async with asyncio.timeout(WAIT_S):
        snapshot = await port.next()
    assert snapshot is not None
    assert snapshot.kv_events.cleared
    assert len(snapshot.kv_events.events) == len(PROMPT) // ledger.BLOCK
    bench.worker.release(TransferId("t"))


async def test_prefill_worker_cancelled_prompt_costs_no_step_after_current(bench: Bench) -> None:
    """75 tokens are four steps. The cancel comes during the first one; one more may have been planned by then."""
    runner: Any = bench.host.parts.runner
    under_way, go_on, execute = threading.Event(), threading.Event(), runner.execute

    def held_up(batch: Any) -> Any:
        under_way.set()
        assert go_on.wait(WAIT_S)
        return execute(batch)

    runner.execute = held_up
    await bench.worker.submit(job())
    assert await asyncio.to_thread(under_way.wait, WAIT_S)
    bench.worker.abort(TransferId("t"))
    bench.worker.release(TransferId("t"))
    go_on.set()
    await bench.assert_empty()
    assert runner.num_computed <= ledger.CONFIG.prefill_chunk_tokens
    assert ("finished", TransferId("t")) not in bench.hub.reports


async def test_prefill_worker_abandoned_prompt_waits_for_its_adapter_no_longer(tmp_path: Path) -> None:
    memory: Any = FakeMemory(num_slots=1)
    memory.gate.set()
    host = EngineHost(replace(parts(), adapters=memory), on_fatal=lambda _: None)
    worker = Bench(host, PrefillWorker(IDENTITY, host)).worker
    host.start(on_output=worker.on_output, ports=tuple)
    async with stopping(host):
        one, other = (adapter(tmp_path, name) for name in "ab")
        await host.prepare(first := request("first"), one)
        worker.abandon(TransferId("first"))  # none that waits: nothing happens
        waiting = asyncio.create_task(worker.submit(job("gone", adapter=other)))
        await asyncio.wait([waiting], timeout=0.05)
        assert (await host.load()).num_waiting == 1
        worker.abandon(TransferId("gone"))
        with pytest.raises(Cancelled, match="ended while it waited for its adapter"):
            await waiting
        assert (await host.load()).num_waiting == 0
        host.release(first)
        async with asyncio.timeout(WAIT_S):
            await worker.submit(job("next", adapter=other))
        worker.release(TransferId("next"))
