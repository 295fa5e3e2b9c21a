"""The decode worker over a real engine thread and scheduler, with a hub scripted by each test."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from engine.kv_cache.pool import PoolExhausted
from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.messages import FirstToken, PrefillJob
from kv_transfer.session.peer import Route
from kv_transfer.session.stats import TransferStats
from tandem.errors import TransferError
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockId, Incarnation, TransferId, WorkerId
from tandem.values.outputs import PhaseTimes, SampledToken
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams
from tandem.values.worker_identity import WorkerIdentity
from tests.support.engine import drafts, ledger
from tests.support.engine.ledger_host import parts, settled
from worker.engine_host import EngineHost
from worker.session_port import SessionPort

WAIT_S = 20.0
PROMPT = [(7 * i) % 90 for i in range(60)]
TRANSFER = TransferId("t")
LENGTH = 6
IDENTITY = WorkerIdentity(
    worker_id=WorkerId("decode-0"),
    incarnation=Incarnation(1),
    role=WorkerRole.DECODE,
    model_name="ledger",
    address="127.0.0.1:1",
)


class FakeHub:
    """The hub's interface as the worker uses it."""

    def __init__(self) -> None:
        self.stats = TransferStats()
        self.jobs: asyncio.Queue[tuple[PrefillJob, Route]] = asyncio.Queue()
        self.reroutes: list[Route] = []
        self.cancelled: list[TransferId] = []
        self.refusal: TransferError | None = None

    def start(self, job: PrefillJob, route: Route) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.jobs.put_nowait((job, route))

    def reroute(self, _transfer_id: TransferId, route: Route, _holder: object) -> None:
        self.reroutes.append(route)

    def cancel(self, transfer_id: TransferId, _reason: str = "") -> None:
        self.cancelled.append(transfer_id)

    async def drain(self) -> None:
        """Do nothing: there is nothing to wait for."""


class Bench:
    """One worker, one router's port, one hub."""

    def __init__(self, host: EngineHost, worker: DecodeWorker) -> None:
        self.host = host
        self.worker = worker
        self.owner = worker.handoffs
        self.hub = FakeHub()
        self.port = SessionPort(Incarnation(2))
        worker.use(SimpleNamespace(receiver_hub=self.hub, transports=("shm",), finish=self.hub.drain))

    def order(self, **fields: Any) -> None:
        self.worker.order(self.port, pb.RouterMessage(**fields))

    def submit(self, name: str = "r", *, prefill: bool = True, max_tokens: int = LENGTH, **more: Any) -> None:
        transfer_id = more.pop("transfer_id", None)
        sampling = common.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        order = pb.Submit(request_id=name, attempt=1, hash_root=ledger.ROOT, sampling=sampling)
        order.prompt_token_ids.extend(more.pop("prompt", PROMPT))
        for key, value in more.items():
            setattr(order, key, value)
        if prefill:
            order.prefill.CopyFrom(route_pb())
            order.prefill.transfer_id = transfer_id or order.prefill.transfer_id
        self.order(submit=order)

    async def next_message(self, kind: str) -> Any:
        """The next message of a kind."""
        async with asyncio.timeout(WAIT_S):
            while True:
                message = await self.port.next()
                assert message is not None
                if message.HasField(kind):
                    return getattr(message, kind)

    async def answer(self) -> tuple[list[int], pb.Finish]:
        """Tokens until an end, each at its place."""
        tokens: list[int] = []
        while True:
            for delta in (await self.next_message("tokens")).deltas:
                assert delta.first_index == len(tokens)
                tokens += delta.token_ids
                if delta.HasField("finish"):
                    return tokens, delta.finish

    async def started(self) -> PrefillJob:
        async with asyncio.timeout(WAIT_S):
            return (await self.hub.jobs.get())[0]

    async def bound(self, job: PrefillJob) -> tuple[BlockId, ...]:
        return (await self.owner.bind(TRANSFER, job.num_blocks(ledger.BLOCK))).blocks

    def write(self, blocks: tuple[BlockId, ...], first: int, count: int) -> None:
        """What a peer does: KV of the prompt's blocks `first` to `first + count` into `blocks`."""
        runner: Any = self.host.parts.runner
        entries = ledger.kv_of(PROMPT)[first * ledger.BLOCK : (first + count) * ledger.BLOCK]
        for position, entry in enumerate(entries):
            runner.write(blocks, position, entry)

    async def commit(self, blocks: tuple[BlockId, ...], first_token: int | None, *, exposed_s: float = 0.0) -> None:
        token = None if first_token is None else first_token_of(first_token)
        times = PhaseTimes(prefill_s=1.0, transfer_s=2.0 + exposed_s)
        info = CommitInfo(blocks=blocks, first_token=token, cached_tokens=16, times=times, exposed_s=exposed_s)
        await self.owner.commit(TRANSFER, info)

    async def assert_empty(self) -> None:
        assert self.owner.num_destinations == 0
        scheduler = await settled(self.host)
        ledger.assert_empty(scheduler)


def route_pb(attempt: int = 1) -> pb.PrefillRoute:
    return pb.PrefillRoute(worker_id="p", incarnation=5, address="127.0.0.1:2", transfer_id=TRANSFER, attempt=attempt)


def first_token_of(token_id: int) -> FirstToken:
    return FirstToken(token=SampledToken(token_id=token_id), cached_tokens=16)


def expected(length: int = LENGTH) -> list[int]:
    return ledger.continuation(PROMPT, SamplingParams(max_tokens=length, ignore_eos=True))


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


async def test_decode_worker_without_route_computes_prompt(bench: Bench) -> None:
    bench.submit(prefill=False)
    tokens, finish = await bench.answer()
    assert tokens == expected()
    assert finish.reason == common.FINISH_REASON_LENGTH
    await bench.worker.finish()
    await bench.assert_empty()


async def test_decode_worker_handoff_runs_from_reservation_to_last_token(bench: Bench) -> None:
    bench.submit()
    job = await bench.started()
    assert (job.token_ids, job.held_tokens, job.resume) == (tuple(PROMPT), 0, False)
    blocks = await bench.bound(job)
    bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    assert (await bench.next_message("tokens")).deltas[0].token_ids == expected()[:1], "before its KV is here"
    bench.write(blocks, 0, len(blocks))
    await bench.commit(blocks, expected()[0])
    tokens = expected()[:1]
    while len(tokens) < LENGTH:
        tokens += [t for delta in (await bench.next_message("tokens")).deltas for t in delta.token_ids]
    assert tokens == expected()
    await bench.assert_empty()


async def test_decode_worker_landed_blocks_are_kept_when_rest_is_released(bench: Bench) -> None:
    """tcp proves a lost writer quiet at once: the hub reports `released` before `failed` is handled."""
    bench.submit()
    blocks = await bench.bound(await bench.started())
    bench.write(blocks, 0, 2)
    bench.owner.failed(TRANSFER, blocks[:2], TransferError("the link was lost"))
    bench.owner.released(TRANSFER, blocks[2:])
    failed = await bench.next_message("transfer_failed")
    assert failed.landed_tokens == 2 * ledger.BLOCK
    bench.order(reroute=pb.Reroute(request_id="r", attempt=1))
    tokens, _ = await bench.answer()
    assert tokens == expected()
    runner: Any = bench.host.parts.runner
    assert runner.num_computed == len(PROMPT) - 2 * ledger.BLOCK + LENGTH - 1
    await bench.assert_empty()


async def test_decode_worker_quarantine_ends_when_writer_is_quiet(bench: Bench) -> None:
    bench.submit()
    blocks = await bench.bound(await bench.started())
    bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    bench.owner.failed(TRANSFER, (), TransferError("silent"))
    bench.owner.quarantine(TRANSFER, blocks)
    await bench.next_message("transfer_failed")
    bench.order(reroute=pb.Reroute(request_id="r", attempt=1))
    bench.port.send_snapshot(0, ())
    tokens = expected()[:1]
    while len(tokens) < LENGTH:
        tokens += [t for delta in (await bench.next_message("tokens")).deltas for t in delta.token_ids]
    assert tokens == expected(), "the first token was sent already and is not sampled again"
    load = (await settled(bench.host)).load()
    assert load.num_quarantined_blocks == load.num_used_blocks == len(blocks)
    bench.owner.released(TRANSFER, blocks)
    await bench.assert_empty()


async def test_decode_worker_second_attempt_requests_only_missing_tokens(bench: Bench) -> None:
    bench.submit()
    blocks = await bench.bound(await bench.started())
    bench.write(blocks, 0, 1)
    bench.owner.failed(TRANSFER, blocks[:1], TransferError("the link was lost"))
    bench.owner.released(TRANSFER, blocks[1:])
    await bench.next_message("transfer_failed")
    bench.order(reroute=pb.Reroute(request_id="r", attempt=1, prefill=route_pb(2)))
    assert [route.attempt for route in bench.hub.reroutes] == [2]
    rest = (await bench.owner.bind(TRANSFER, len(blocks) - 1)).blocks
    bench.write(rest, 1, len(rest))
    await bench.commit(rest, expected()[0])
    tokens = expected()[:1]
    while len(tokens) < LENGTH:
        tokens += [t for delta in (await bench.next_message("tokens")).deltas for t in delta.token_ids]
    assert tokens == expected()
    await bench.assert_empty()


async def test_decode_worker_cancel_during_failed_handoff_leaves_nothing(bench: Bench) -> None:
    bench.submit()
    blocks = await bench.bound(await bench.started())
    bench.owner.failed(TRANSFER, (), TransferError("the link was lost"))
    bench.order(cancel=pb.Cancel(request_id="r", attempt=1))
    bench.owner.released(TRANSFER, blocks)
    await bench.worker.finish()
    await bench.assert_empty()
    assert bench.hub.cancelled == [TRANSFER]


@pytest.mark.parametrize("phase", ["submitted", "reserved", "bound", "first token", "rerouting", "running"])
async def test_decode_worker_cancel_at_any_stage_leaves_nothing(bench: Bench, phase: str) -> None:
    bench.submit(max_tokens=100)
    blocks: tuple[BlockId, ...] = ()
    if phase != "submitted":
        job = await bench.started()
        if phase != "reserved":
            blocks = await bench.bound(job)
    if phase == "first token":
        bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    if phase == "rerouting":
        bench.owner.failed(TRANSFER, (), TransferError("the link was lost"))
        await bench.next_message("transfer_failed")
    if phase == "running":
        bench.write(blocks, 0, len(blocks))
        await bench.commit(blocks, expected()[0])
        blocks = ()
    bench.order(cancel=pb.Cancel(request_id="r", attempt=1))
    await asyncio.sleep(0)
    if blocks:
        assert bench.owner.num_destinations == len(blocks)
        bench.owner.released(TRANSFER, blocks)
    await bench.worker.finish()
    await bench.assert_empty()


async def test_decode_worker_one_token_request_ends_with_first_token(bench: Bench) -> None:
    bench.submit(max_tokens=1)
    blocks = await bench.bound(await bench.started())
    bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    tokens, finish = await bench.answer()
    assert tokens == expected()[:1]
    assert finish.reason == common.FINISH_REASON_LENGTH
    # The commit was on its way already.
    await bench.commit(blocks, expected()[0])
    await bench.assert_empty()
    assert bench.hub.cancelled == [TRANSFER]


async def test_decode_worker_committed_handoff_is_reported_once_with_next_tokens(bench: Bench) -> None:
    bench.submit()
    blocks = await bench.bound(await bench.started())
    bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    assert not (await bench.next_message("tokens")).handoffs, "its KV is not here yet"
    bench.write(blocks, 0, len(blocks))
    await bench.commit(blocks, expected()[0], exposed_s=0.25)
    step = await bench.next_message("tokens")
    handoffs = list(step.handoffs)
    num_tokens = len(blocks) * ledger.BLOCK
    assert handoffs == [pb.CommittedHandoff(worker_id="p", incarnation=5, num_tokens=num_tokens, exposed_s=0.25)]
    finish = pb.Finish()
    while not finish.reason:
        for delta in step.deltas:
            finish.MergeFrom(delta.finish)
        if not finish.reason:
            step = await bench.next_message("tokens")
            handoffs += step.handoffs
    assert len(handoffs) == 1
    assert finish.times.transfer_s == 2.25, "the fetches of the prefill worker are part of what clients see"


async def test_decode_worker_abandoned_handoff_is_not_reported(bench: Bench) -> None:
    """The commit was on its way when the first token ended the answer."""
    bench.submit(max_tokens=1)
    blocks = await bench.bound(await bench.started())
    bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    await bench.commit(blocks, expected()[0])
    await bench.assert_empty()
    bench.submit("another", prefill=False, transfer_id="t2")
    finishes = 0
    while finishes < 2:
        step = await bench.next_message("tokens")
        assert not step.handoffs
        finishes += sum(delta.HasField("finish") for delta in step.deltas)


async def test_decode_worker_handoff_after_reroute_names_the_second_sender(bench: Bench) -> None:
    bench.submit()
    blocks = await bench.bound(await bench.started())
    bench.write(blocks, 0, 1)
    bench.owner.failed(TRANSFER, blocks[:1], TransferError("the link was lost"))
    bench.owner.released(TRANSFER, blocks[1:])
    await bench.next_message("transfer_failed")
    second = route_pb(2)
    second.worker_id, second.incarnation = "q", 6
    bench.order(reroute=pb.Reroute(request_id="r", attempt=1, prefill=second))
    rest = (await bench.owner.bind(TRANSFER, len(blocks) - 1)).blocks
    bench.write(rest, 1, len(rest))
    await bench.commit(rest, expected()[0], exposed_s=0.5)
    (handoff,) = (await bench.next_message("tokens")).handoffs
    assert (handoff.worker_id, handoff.incarnation, handoff.num_tokens) == ("q", 6, len(rest) * ledger.BLOCK)


async def test_decode_worker_full_pool_refuses_handoff_with_retry_time(bench: Bench) -> None:
    """24 blocks: three unfinished hand-offs of 8 blocks leave no room for a fourth."""
    for i in range(3):
        bench.submit(f"{i}", prompt=[i, *PROMPT, *PROMPT], transfer_id=f"t{i}")
    bench.submit("r", prompt=[4, *PROMPT, *PROMPT], transfer_id="t3")
    refused = await bench.next_message("refused")
    assert (refused.request_id, refused.failure.code) == ("r", "Unavailable")
    assert refused.failure.retry_after_s > 0
    bench.worker.closed(bench.port)
    await bench.worker.finish()
    await bench.assert_empty()


async def test_decode_worker_hub_refusal_releases_reservation(bench: Bench) -> None:
    bench.hub.refusal = TransferError("too many")
    bench.submit()
    assert (await bench.next_message("refused")).failure.code == "TransferError"
    await bench.assert_empty()


async def test_decode_worker_router_lost_ends_its_requests(bench: Bench) -> None:
    bench.submit("a", prefill=False, max_tokens=100)
    bench.submit("b")
    await bench.started()
    bench.worker.closed(bench.port)
    await bench.worker.finish()
    await bench.assert_empty()


@pytest.mark.parametrize("teller", ["worker", "engine"])
async def test_decode_worker_timeout_names_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch, teller: str) -> None:
    if teller == "engine":  # which ends who still waits in its queue
        monkeypatch.setattr(bench.worker, "_time_out", lambda _task: None)
    bench.submit(timeout_s=0.0, prefill=teller == "worker")
    tokens, finish = await bench.answer()
    assert tokens == []
    assert finish.failure.code == "DeadlineExceeded"
    assert finish.failure.message.endswith("in the queue") == (teller == "engine")
    await bench.worker.finish()
    await bench.assert_empty()


async def test_decode_worker_draining_refuses_and_ignores_stale_orders(bench: Bench) -> None:
    await bench.worker.finish()
    bench.submit()
    assert (await bench.next_message("refused")).failure.code == "Unavailable"
    bench.order(cancel=pb.Cancel(request_id="r", attempt=1))
    bench.order(reroute=pb.Reroute(request_id="r", attempt=1))
    await bench.assert_empty()


async def test_decode_worker_failed_handoff_blocks_are_no_cache_hit(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when the pool has no room for another reservation, and the landed blocks are found as a prefix."""
    bench.submit()
    blocks = await bench.bound(await bench.started())
    bench.write(blocks, 0, 2)

    def refuse(*_: object, **__: object) -> None:
        raise PoolExhausted("no room")

    monkeypatch.setattr((await settled(bench.host)).reservations, "reserve", refuse)
    bench.owner.failed(TRANSFER, blocks[:2], TransferError("the link was lost"))
    bench.owner.released(TRANSFER, blocks[2:])
    await bench.next_message("transfer_failed")
    bench.order(reroute=pb.Reroute(request_id="r", attempt=1))
    tokens, finish = await bench.answer()
    assert (tokens, finish.cached_tokens) == (expected(), 0)
    runner: Any = bench.host.parts.runner
    assert runner.num_computed == len(PROMPT) - 2 * ledger.BLOCK + LENGTH - 1
    await bench.assert_empty()


async def test_decode_worker_timeline_keeps_both_workers_shares(bench: Bench) -> None:
    bench.submit()
    blocks = await bench.bound(await bench.started())
    bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    started = (await bench.next_message("tokens")).deltas[0].started
    assert started.times.prefill_s > 0, "a choice that ends with its first token has a prefill too"
    bench.write(blocks, 0, len(blocks))
    await bench.commit(blocks, expected()[0])
    finish = pb.Finish()
    while not finish.reason:
        finish = (await bench.next_message("tokens")).deltas[0].finish
    assert finish.times.prefill_s == 1.0, "the prefill worker's own figure replaces the estimate"
    assert finish.times.decode_queue_s >= started.times.decode_queue_s > 0, "the wait for the engine may come to it"


async def test_decode_worker_deadline_is_sent_to_prefill_worker(bench: Bench) -> None:
    bench.submit(timeout_s=60.0)
    timeout_s = (await bench.started()).timeout_s
    assert timeout_s is not None
    assert 0 < timeout_s <= 60.0
    bench.worker.closed(bench.port)
    await bench.worker.finish()


async def test_decode_worker_unreportable_step_ends_process() -> None:
    def fails(_output: object) -> None:
        raise ValueError("a bug")

    fault: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    host = EngineHost(parts(), on_fatal=lambda error: fault.done() or fault.set_result(error))
    async with asyncio.TaskGroup() as group:
        worker = DecodeWorker(IDENTITY, host, group)
        host.start(on_output=fails, ports=tuple)
        Bench(host, worker).submit(prefill=False)
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await fault, ValueError)
        await host.stop()


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("has_source", [True, False])
async def test_worker_drafts_from_prediction_and_counts_what_became_of_it(
    bench: Bench, *, prefill: bool, has_source: bool
) -> None:
    count = 30
    answer = expected(count)
    bench.host.parts.scheduler._speculation = drafts.speculation(None, "prediction" if has_source else "lookup")
    prediction = array("i", [*answer[:12], (answer[12] + 1) % ledger.VOCAB, *answer[13:]])
    bench.submit(prefill=prefill, max_tokens=count, prediction=prediction.tobytes(), handle=9)
    if prefill:
        blocks = await bench.bound(await bench.started())
        bench.owner.first_token(TRANSFER, first_token_of(answer[0]))
        bench.write(blocks, 0, len(blocks))
        await bench.commit(blocks, answer[0])
    tokens: dict[int, int] = {}
    counts: list[tuple[int, int]] = []
    is_over = False
    while not is_over:
        step = await bench.next_message("tokens")
        tokens |= dict(zip(step.indexes, step.token_ids, strict=True))
        for delta in step.deltas:
            tokens |= dict(enumerate(delta.token_ids, delta.first_index))
            if delta.HasField("prediction"):
                counts.append((delta.prediction.accepted, delta.prediction.rejected))
                assert counts[-1][0] < len(tokens)
            is_over |= delta.HasField("finish")
    assert [tokens[i] for i in sorted(tokens)] == answer
    if not has_source:
        assert counts == []
        return
    assert counts == sorted(counts)
    accepted, rejected = counts[-1]
    assert accepted > 15
    assert 1 <= rejected <= 8
