"""A decode worker's part of a request's trace."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from decode_worker.worker import DecodeWorker
from engine.types.step_output import StepOutput
from tandem.errors import TransferError
from tandem.telemetry.tracing import MAX_TEXT_CHARS
from tandem.v1 import session_pb2 as pb
from tests.support.calls import calls_into
from tests.support.engine.ledger_host import parts
from tests.support.spans import CLIENT, CLIENT_SPAN_ID, CLIENT_TRACE_ID, Kept, keeping
from tests.unit.decode_worker.test_worker import IDENTITY, LENGTH, PROMPT, TRANSFER, expected, first_token_of, route_pb
from tests.unit.decode_worker.test_worker import Bench as WorkerBench
from worker.engine_host import EngineHost

TRACE = CLIENT.to_text()


class Bench(WorkerBench):
    """Counts what each step's news call of tracing."""

    def __init__(self, host: EngineHost, worker: DecodeWorker) -> None:
        super().__init__(host, worker)
        self.steps: list[tuple[StepOutput, Counter[str]]] = []

    def on_output(self, output: StepOutput) -> None:
        with calls_into("tandem/telemetry/otel_tracer.py", "decode_worker/spans.py") as calls:
            self.worker.on_output(output)
        if output.events:
            self.steps.append((output, calls))


@pytest.fixture
async def traced() -> AsyncIterator[tuple[Bench, Kept]]:
    faults: list[BaseException] = []
    tracer, kept = keeping()
    host = EngineHost(parts(), on_fatal=faults.append)
    async with asyncio.TaskGroup() as group:
        worker = DecodeWorker(IDENTITY, host, group, tracer)
        bench = Bench(host, worker)
        host.start(on_output=bench.on_output, ports=tuple)
        yield bench, kept
        await host.stop()
    assert not faults


async def rest(bench: Bench, count: int) -> list[int]:
    """So many tokens more."""
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += [t for delta in (await bench.next_message("tokens")).deltas for t in delta.token_ids]
    return tokens


async def test_spans_local_prefill_has_prefill_and_decode(traced: tuple[Bench, Kept]) -> None:
    bench, kept = traced
    bench.submit(prefill=False, trace=TRACE)
    await bench.answer()
    names = ["tandem.decode", "tandem.first_decode_step", "tandem.prefill", "tandem.prefill_queue"]
    assert kept.names() == names
    task = kept.one("tandem.decode")
    assert (task.parent_id, task.trace_id, task.error) == (CLIENT_SPAN_ID, CLIENT_TRACE_ID, None)
    assert (task.attributes["tandem.prompt_tokens"], task.attributes["tandem.output_tokens"]) == (len(PROMPT), LENGTH)
    assert {kept.parent_of(name) for name in names[1:]} == {"tandem.decode"}
    queue, prefill, step = (kept.one(name) for name in (names[3], names[2], names[1]))
    assert queue.end_s == prefill.start_s
    assert prefill.end_s == step.start_s
    assert task.start_s <= prefill.start_s <= prefill.end_s < step.end_s <= task.end_s


async def test_span_handoff_propagates_trace(traced: tuple[Bench, Kept]) -> None:
    bench, kept = traced
    bench.submit(trace=TRACE)
    job = await bench.started()
    blocks = await bench.bound(job)
    bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    bench.write(blocks, 0, len(blocks))
    await bench.commit(blocks, expected()[0])
    assert await rest(bench, LENGTH) == expected()
    assert kept.names() == ["tandem.decode", "tandem.first_decode_step", "tandem.reserve"]
    task = kept.one("tandem.decode")
    assert job.trace == task.context
    assert [event.name for event in task.events] == ["first_token"]
    assert kept.one("tandem.reserve").start_s == task.start_s


@pytest.mark.parametrize("trace", ["", "nonsense", TRACE[:-1] + "0", TRACE + " " + "a=" * MAX_TEXT_CHARS, "\x00" * 9])
async def test_span_invalid_context_is_ignored(traced: tuple[Bench, Kept], trace: str) -> None:
    bench, kept = traced
    bench.submit(prefill=False, trace=trace)
    tokens, _ = await bench.answer()
    assert tokens == expected()
    assert not kept.spans


async def test_spans_of_refused_and_failed_tasks_have_the_error(traced: tuple[Bench, Kept]) -> None:
    bench, kept = traced
    bench.hub.refusal = TransferError("no more hand-offs")
    bench.submit(trace=TRACE)
    await bench.next_message("refused")
    assert kept.one("tandem.decode").error == "no more hand-offs"
    bench.hub.refusal = None
    bench.submit("other", trace=TRACE)
    blocks = await bench.bound(await bench.started())
    bench.owner.failed(TRANSFER, (), TransferError("silent"))
    bench.owner.released(TRANSFER, blocks)
    await bench.next_message("transfer_failed")
    bench.owner.expired(TRANSFER)
    await bench.next_message("tokens")
    assert kept.spans[-1].error == "no route for the prompt's KV was named in time"


@pytest.mark.parametrize("trace", [None, TRACE])
async def test_span_token_adds_no_work(traced: tuple[Bench, Kept], trace: str | None) -> None:
    bench, kept = traced
    bench.submit(prefill=False, max_tokens=60, **({} if trace is None else {"trace": trace}))
    await rest(bench, 60)
    calls = [calls for _, calls in bench.steps]
    assert len(calls) == 60
    assert calls[0]["trace_own_prefill"] == 1
    assert calls[-1]["end_span"] == 1
    assert not any(calls[2:-1]), "no call, so nothing allocated"
    assert bool(kept.spans) == (trace is not None)


async def test_span_rerouted_handoff_keeps_task(traced: tuple[Bench, Kept]) -> None:
    bench, kept = traced
    bench.submit(trace=TRACE)
    blocks = await bench.bound(await bench.started())
    bench.owner.failed(TRANSFER, (), TransferError("silent"))
    bench.owner.released(TRANSFER, blocks)
    await bench.next_message("transfer_failed")
    bench.order(reroute=pb.Reroute(request_id="r", attempt=1, prefill=route_pb(2)))
    again = (await bench.owner.bind(TRANSFER, len(blocks))).blocks
    bench.owner.first_token(TRANSFER, first_token_of(expected()[0]))
    bench.write(again, 0, len(again))
    await bench.commit(again, expected()[0])
    assert await rest(bench, LENGTH) == expected()
    assert kept.parent_of("tandem.first_decode_step") == "tandem.decode"
