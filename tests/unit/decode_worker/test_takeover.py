"""Streams that lost their router: they continue, another router gets all tokens, and orphans expire."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from decode_worker.takeover import OrphanedStreams
from decode_worker.task import DecodeTask, TaskPhase
from decode_worker.worker import DecodeWorker
from engine.types.request import Batch
from tandem.errors import TransferError
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation, RequestId
from tandem.values.outputs import SampledToken
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts
from tests.unit.decode_worker.test_bookkeeping import task
from tests.unit.decode_worker.test_worker import (
    IDENTITY,
    LENGTH,
    PROMPT,
    TRANSFER,
    WAIT_S,
    Bench,
    expected,
    first_token_of,
)
from worker.engine_host import EngineHost
from worker.session_port import SessionPort

LONG = 60
PLENTY = 1 << 20


class Paced(Bench):
    """Its engine makes as many sampling steps as the test allows."""

    def __init__(self, host: EngineHost, made: DecodeWorker, num_steps: int) -> None:
        super().__init__(host, made)
        self._steps = threading.Semaphore(num_steps)
        runner: Any = host.parts.runner
        execute = runner.execute

        def execute_when_allowed(batch: Batch) -> list[SampledToken]:
            if any(item.samples for item in batch.items):
                self._steps.acquire()
            return execute(batch)

        runner.execute = execute_when_allowed

    def go_on(self) -> None:
        """Run without pauses from now on."""
        self._steps.release(PLENTY)


@asynccontextmanager
async def worker(takeover_s: float = 30.0, *, num_steps: int = 1) -> AsyncIterator[Paced]:
    """Pauses once the first token is sent."""
    faults: list[BaseException] = []
    host = EngineHost(parts(), on_fatal=faults.append)
    async with asyncio.TaskGroup() as group:
        made = DecodeWorker(IDENTITY, host, group, takeover_s=takeover_s)
        host.start(on_output=made.on_output, ports=tuple)
        bench = Paced(host, made, num_steps)
        try:
            yield bench
        finally:
            bench.go_on()
        await bench.worker.finish()
        await bench.assert_empty()
        await host.stop()
    assert not faults


def leave(bench: Bench) -> SessionPort:
    """Replace the bench's router. Returns the former's port."""
    former, bench.port = bench.port, SessionPort(Incarnation(3))
    former.close()
    bench.worker.closed(former)
    return former


def adopt(bench: Bench, *, attempt: int = 1 << 16, num_shown: int = 0, name: str = "r", handle: int = 0) -> None:
    bench.order(take_over=pb.TakeOver(request_id=name, attempt=attempt, num_shown=num_shown, handle=handle))


async def until_finished(bench: Bench) -> None:
    await bench.worker._idle.wait()


async def test_takeover_router_gets_all_tokens_from_the_first() -> None:
    async with worker() as bench:
        bench.submit(prefill=False, max_tokens=LONG)
        first = (await bench.next_message("tokens")).deltas[0]
        assert first.started.cached_tokens == 0
        leave(bench)
        adopt(bench, num_shown=1)
        bench.go_on()
        delta = (await bench.next_message("tokens")).deltas[0]
        assert (delta.attempt, delta.first_index, delta.HasField("started")) == (1 << 16, 0, True)
        tokens = list(delta.token_ids)
        while len(tokens) < LONG:
            for delta in (await bench.next_message("tokens")).deltas:
                assert delta.first_index == len(tokens)
                tokens += delta.token_ids
        assert tokens == expected(LONG)
        assert delta.finish.reason == common.FINISH_REASON_LENGTH


async def test_takeover_answer_ended_meanwhile_keeps_its_end() -> None:
    async with worker() as bench:
        bench.submit(prefill=False)
        await bench.next_message("tokens")
        leave(bench)
        bench.go_on()
        await until_finished(bench)
        adopt(bench, num_shown=1)
        delta = (await bench.next_message("tokens")).deltas[0]
        assert list(delta.token_ids) == expected()
        assert delta.finish.reason == common.FINISH_REASON_LENGTH
        adopt(bench, attempt=2 << 16)
        assert (await bench.next_message("refused")).failure.code == "Unavailable", "it was given away once"


async def test_takeover_orphaned_stream_ends_after_timeout() -> None:
    async with worker(takeover_s=0.05) as bench:
        bench.submit(prefill=False, max_tokens=100)
        await bench.next_message("tokens")
        leave(bench)
        async with asyncio.timeout(WAIT_S):
            while len(bench.worker._takeovers._orphans):  # noqa: ASYNC110 - a timer ends it, without an event
                await asyncio.sleep(0.01)
        assert bench.worker._idle.is_set()
        adopt(bench)
        assert (await bench.next_message("refused")).failure.code == "Unavailable"


def orphan(router: int) -> DecodeTask:
    return task(SessionPort(Incarnation(router)), "r")


def test_takeover_lapsed_choice_drops_all_its_tasks() -> None:
    first, second = orphan(1), orphan(2)
    orphans = OrphanedStreams(keep_s=10.0)
    orphans.add(first, now_s=0.0)
    orphans.add(second, now_s=1.0)
    assert len(orphans) == 2
    assert orphans.lapsed(10.0) == [first]
    assert orphans.of_router(Incarnation(1)) == []
    assert orphans.of_router(Incarnation(2)) == [second]
    assert len(orphans) == 0


def test_takeover_two_tasks_of_one_choice_yields_latest_good() -> None:
    orphans, tasks = OrphanedStreams(keep_s=10.0), [orphan(router) for router in range(1, 4)]
    for each in tasks:
        orphans.add(each, now_s=0.0)
    tasks[2].phase = TaskPhase.DONE
    assert orphans.claim(RequestId("r")) == (tasks[1], [tasks[0], tasks[2]])
    assert orphans.claim(RequestId("r")) == (None, [])
    assert orphans.lapsed(10.0) == []


async def test_takeover_choice_of_two_lost_routers_is_generated_once() -> None:
    async with worker() as bench:
        bench.submit(prefill=False, max_tokens=LONG)
        await bench.next_message("tokens")
        leave(bench)
        bench.submit(prefill=False, max_tokens=LONG)
        leave(bench)
        assert len(bench.worker._tasks) == 2
        adopt(bench)
        assert len(bench.worker._tasks) == 1
        bench.go_on()
        tokens: list[int] = []
        while len(tokens) < LONG:
            for delta in (await bench.next_message("tokens")).deltas:
                tokens += delta.token_ids
        assert tokens == expected(LONG)


async def test_takeover_disabled_cancels_streams_at_once() -> None:
    async with worker(takeover_s=0.0) as bench:
        bench.submit(prefill=False, max_tokens=100)
        await bench.next_message("tokens")
        leave(bench)
        assert bench.worker._idle.is_set()


async def test_takeover_returned_router_has_continued_elsewhere() -> None:
    async with worker() as bench:
        bench.submit(prefill=False, max_tokens=100)
        await bench.next_message("tokens")
        former = leave(bench)
        bench.worker.opened(SessionPort(Incarnation(4)))
        assert not bench.worker._idle.is_set()
        bench.worker.opened(SessionPort(former.router))
        assert bench.worker._idle.is_set()


async def test_takeover_keeps_tasks_until_former_session_leaves() -> None:
    async with worker() as bench:
        bench.submit(prefill=False, max_tokens=100)
        await bench.next_message("tokens")
        again = SessionPort(bench.port.router)
        bench.worker.opened(again)
        assert not bench.worker._idle.is_set(), "it may be refused: then the former session goes on"
        leave(bench)
        assert bench.worker._idle.is_set()


async def test_takeover_former_router_receives_stream_taken() -> None:
    async with worker() as bench:
        bench.submit(prefill=False, max_tokens=100)
        await bench.next_message("tokens")
        former, bench.port = bench.port, SessionPort(Incarnation(3))
        adopt(bench)
        while not (message := await former.next()).HasField("refused"):
            assert message.HasField("tokens")
        assert (message.refused.attempt, message.refused.failure.code) == (1, "StreamTaken")
        delta = (await bench.next_message("tokens")).deltas[0]
        assert list(delta.token_ids) == expected(100)[: len(delta.token_ids)]
        bench.go_on()
        bench.worker.closed(former)
        bench.order(cancel=pb.Cancel(request_id="r", attempt=1 << 16))
        await until_finished(bench)


async def test_takeover_same_router_continues_under_another_attempt() -> None:
    async with worker() as bench:
        bench.submit(prefill=False, max_tokens=100)
        await bench.next_message("tokens")
        adopt(bench)
        bench.go_on()
        while (delta := (await bench.next_message("tokens")).deltas[0]).attempt != 1 << 16:
            pass
        tokens = list(delta.token_ids)
        while len(tokens) < 100:
            tokens += [t for d in (await bench.next_message("tokens")).deltas for t in d.token_ids]
        assert tokens == expected(100)


async def test_takeover_prompt_in_transfer_arrives_for_next_router() -> None:
    async with worker(num_steps=PLENTY) as bench:
        bench.submit()
        blocks = await bench.bound(await bench.started())
        leave(bench)
        adopt(bench)
        bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
        bench.write(blocks, 0, len(blocks))
        await bench.commit(blocks, expected()[0])
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            tokens += [t for d in (await bench.next_message("tokens")).deltas for t in d.token_ids]
        assert tokens == expected()


@pytest.mark.parametrize("router_leaves", ["before", "after"])
async def test_takeover_failed_handoff_of_orphan_requests_no_route(router_leaves: str) -> None:
    """A hand-off fails while no router owns the stream: the prompt is computed here."""
    async with worker(num_steps=PLENTY) as bench:
        bench.submit()
        blocks = await bench.bound(await bench.started())
        if router_leaves == "after":
            leave(bench)
        bench.owner.failed(TRANSFER, (), TransferError("the link was lost"))
        bench.owner.released(TRANSFER, blocks)
        if router_leaves == "before":
            await bench.next_message("transfer_failed")
            leave(bench)
        else:
            await until_finished(bench)
        adopt(bench)
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            tokens += [t for d in (await bench.next_message("tokens")).deltas for t in d.token_ids]
        assert tokens == expected()


async def test_takeover_after_failed_handoff_needs_no_route() -> None:
    """The former router was asked for a route, and has no say any more."""
    async with worker(num_steps=PLENTY) as bench:
        bench.submit()
        blocks = await bench.bound(await bench.started())
        bench.owner.failed(TRANSFER, (), TransferError("the link was lost"))
        bench.owner.released(TRANSFER, blocks)
        await bench.next_message("transfer_failed")
        former, bench.port = bench.port, SessionPort(Incarnation(3))
        adopt(bench)
        assert (await former.next()).refused.failure.code == "StreamTaken"
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            tokens += [t for d in (await bench.next_message("tokens")).deltas for t in d.token_ids]
        assert tokens == expected()


async def test_takeover_without_kept_logprobs_is_refused() -> None:
    """For a stream that was itself continued here, whose first tokens came without them."""
    async with worker() as bench:
        sampling = common.SamplingParams(max_tokens=LONG, temperature=0.0, ignore_eos=True, num_logprobs=0)
        order = pb.Submit(request_id="r", attempt=1, hash_root=ledger.ROOT, sampling=sampling)
        order.prompt_token_ids.extend(PROMPT)
        order.generated_token_ids.extend(expected()[:3])
        bench.order(submit=order)
        delta = (await bench.next_message("tokens")).deltas[0]
        assert delta.first_index == 3
        leave(bench)
        adopt(bench, num_shown=2)
        assert (await bench.next_message("refused")).failure.code == "Unavailable"
