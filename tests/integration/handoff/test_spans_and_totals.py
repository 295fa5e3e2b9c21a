"""Spans and totals of hand-offs between two real hubs, by outcome."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import chain, repeat

import pytest

from kv_transfer.protocol.messages import PrefillJob
from kv_transfer.session.receiver_hub import ReceiverHub
from kv_transfer.session.stats import AttemptOutcome, TransferStats
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from router.fleet.session_wire import transfers_from_pb
from router.types.worker_view import TransferReport
from tandem.telemetry.tracing import TraceContext
from tests.support.kv_transfer.handoff_fakes import (
    LAYOUT,
    SETTINGS,
    WAIT_S,
    DecodeOwner,
    Pool,
    Prefill,
    begin,
    decode_worker,
    make_job,
    prefill_worker,
)
from tests.support.spans import CLIENT, CLIENT_SPAN_ID, CLIENT_TRACE_ID, Kept, KeptSpan, context_of, keeping
from worker.kv_exchange.fetcher import FetchStats
from worker.kv_exchange.service import transfer_report

RECEIVED = ["tandem.bind", "tandem.commit", "tandem.handoff"]
SENT = ["tandem.prefill", "tandem.prefill_queue", "tandem.send"]


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - nobody tells of gauges
            await asyncio.sleep(0.01)


@dataclass
class Watched:
    transport: str
    hub: ReceiverHub
    decode: DecodeOwner
    prefill: Prefill
    received: Kept
    sent: Kept

    async def closed(self) -> None:
        """Nothing is left on either side."""
        await self.hub.drain()
        await wait_for(lambda: not self.prefill.hub.num_transfers)

    def report(self) -> TransferReport:
        """The transfer report that a worker with both hubs sends to routers."""
        report_pb = transfer_report(self.prefill.hub, self.hub, FetchStats(), num_loans=0, num_lent_tokens=0)
        return transfers_from_pb(report_pb)


def starved() -> Callable[[], float]:
    """The clock of a process that stalled shortly after its start."""
    behind_s = chain([1000.0], repeat(0.0))
    return lambda: time.monotonic() - next(behind_s)


@pytest.fixture(params=["memory", "shm", "tcp"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Watched]:
    fabric, choice = MemoryFabric(), request.param
    (receiving, received), (sending, sent) = keeping(), keeping()
    settings = replace(SETTINGS, lease_s=WAIT_S)  # a busy machine must not end what the test is about
    async with AsyncExitStack() as stack:
        senders = prefill_worker(
            lambda region: open_senders(region, choice=choice, fabric=fabric),
            pool=Pool(64), settings=settings, tracer=sending, clock=starved(),
        )  # fmt: skip
        prefill = await stack.enter_async_context(senders)
        receivers = decode_worker(
            lambda region: open_receivers(region, choice=choice, fabric=fabric),
            pool=Pool(48), settings=settings, tracer=receiving, clock=starved(),
        )  # fmt: skip
        hub, decode = await stack.enter_async_context(receivers)
        yield Watched(choice, hub, decode, prefill, received, sent)


def job(name: str, num_tokens: int = 40, *, trace: TraceContext | None = CLIENT) -> PrefillJob:
    return make_job(name, num_tokens, trace=trace)


def ended(stats: TransferStats) -> dict[tuple[str, AttemptOutcome], int]:
    return {(key.transport, key.outcome): totals.count for key, totals in stats.ended.items()}


def within(inner: KeptSpan, outer: KeptSpan) -> bool:
    return outer.start_s <= inner.start_s <= inner.end_s <= outer.end_s


async def test_handoff_is_one_trace_over_both_workers(pair: Watched) -> None:
    sent_s = time.monotonic()
    transfer = begin(pair.hub, pair.decode, job("a"), pair.prefill.route(1))
    record = await pair.decode.until(transfer, lambda r: r.committed)
    await pair.closed()
    timed_here = [*pair.received.spans, pair.sent.one("tandem.send")]
    assert all(span.start_s >= sent_s for span in timed_here), "lease time is no time of day"
    assert (pair.received.names(), pair.sent.names()) == (RECEIVED, SENT)
    handoff, send = pair.received.one("tandem.handoff"), pair.sent.one("tandem.send")
    assert handoff.parent_id == CLIENT_SPAN_ID
    assert send.parent_id == handoff.span_id
    assert {span.trace_id for span in pair.received.spans + pair.sent.spans} == {CLIENT_TRACE_ID}
    for name in ("tandem.bind", "tandem.commit"):
        assert pair.received.parent_of(name) == "tandem.handoff"
        assert within(pair.received.one(name), handoff)
    for name in ("tandem.prefill", "tandem.prefill_queue"):
        assert pair.sent.parent_of(name) == "tandem.send"
    assert handoff.start_s <= send.start_s <= handoff.end_s
    assert (handoff.error, send.error) == (None, None)
    for span in (handoff, send):
        attributes = span.attributes
        chunks = [event.attributes for event in span.events if event.name == "chunk"]
        assert attributes["tandem.transfer.bytes"] == sum(chunk["bytes"] for chunk in chunks)
        assert attributes["tandem.transfer.bytes"] == len(record.bound) * LAYOUT.block_bytes
        assert attributes["tandem.transfer.chunks"] == len(chunks) > 1
        assert attributes["tandem.transfer.seconds"] == pytest.approx(sum(chunk["write_s"] for chunk in chunks))
        assert attributes["tandem.transfer.outcome"] == "committed"


async def test_handoff_without_sampled_trace_has_no_spans(pair: Watched) -> None:
    for name, trace in (("none", None), ("unsampled", context_of(CLIENT_TRACE_ID, CLIENT_SPAN_ID, sampled=False))):
        transfer = begin(pair.hub, pair.decode, job(name, trace=trace), pair.prefill.route(1))
        await pair.decode.until(transfer, lambda r: r.committed)
    await pair.closed()
    assert not pair.received.spans
    assert not pair.sent.spans


async def test_handoff_outcomes_bytes_and_seconds_are_counted(pair: Watched) -> None:
    await pair.decode.until(begin(pair.hub, pair.decode, job("a"), pair.prefill.route(1)), lambda r: r.committed)

    pair.prefill.owner.gate.clear()
    pair.prefill.owner.gate_after_tokens = 24
    left = begin(pair.hub, pair.decode, job("b"), pair.prefill.route(1))
    already = pair.hub.stats.num_bytes
    await wait_for(lambda: pair.hub.stats.num_bytes >= already + 6 * LAYOUT.block_bytes)
    report = pair.report()
    assert (report.leased_blocks, report.pinned_blocks) == (10, 6)
    assert [side.live for side in report.sides] == [1, 1]
    pair.hub.cancel(left)
    pair.decode.end(left)
    await wait_for(lambda: not pair.prefill.hub.num_transfers)
    pair.prefill.owner.gate.set()  # not before: a write that meets the revoked grant fails, and so would the attempt

    refused = begin(pair.hub, pair.decode, job("c", 300), pair.prefill.route(1))
    await pair.decode.until(refused, lambda r: r.errors)
    pair.hub.cancel(refused)
    await pair.closed()

    each = {
        (pair.transport, outcome): 1
        for outcome in (AttemptOutcome.COMMITTED, AttemptOutcome.CANCELLED, AttemptOutcome.FAILED)
    }
    for stats in (pair.hub.stats, pair.prefill.hub.stats):
        assert ended(stats) == each
        assert stats.started == sum(totals.count for totals in stats.ended.values())
        assert stats.num_bytes == sum(totals.num_bytes for totals in stats.ended.values())
        assert stats.seconds == pytest.approx(sum(totals.seconds for totals in stats.ended.values()))
        assert all((totals.num_bytes > 0) == (totals.seconds > 0.0) for totals in stats.ended.values())
    report = pair.report()
    assert (report.leased_blocks, report.pinned_blocks, report.quarantined_blocks) == (0, 0, 0)
    assert [side.live for side in report.sides] == [0, 0]
    outcomes = [span.attributes["tandem.transfer.outcome"] for span in pair.received.spans if "handoff" in span.name]
    assert outcomes == ["committed", "cancelled", "failed"]
    assert pair.received.spans[-1].error == "larger than the pool"


async def test_unreachable_peer_is_counted_without_transport(pair: Watched) -> None:
    nobody = replace(pair.prefill.route(1), address="127.0.0.1:1")
    transfer = begin(pair.hub, pair.decode, job("a"), nobody)
    await pair.decode.until(transfer, lambda r: r.errors)
    pair.hub.cancel(transfer)
    await pair.closed()
    assert ended(pair.hub.stats) == {("", AttemptOutcome.FAILED): 1}
    [received] = [side for side in pair.report().sides if side.direction == "received"]
    assert [(ends.transport, ends.outcome, ends.kind) for ends in received.ended] == [("none", "failed", "handoff")]
