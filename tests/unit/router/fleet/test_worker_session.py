"""Sessions over real sockets: connecting, reporting, losing and reconnecting workers."""

import asyncio
import errno
import logging
import socket
import sys
import time
from array import array
from collections import deque
from contextlib import AsyncExitStack
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest

from router.fleet import worker_session
from router.fleet.connections import RECONNECTS
from router.fleet.native_streams import NativeStreams
from router.fleet.session_carriers import GrpcCarrier
from router.fleet.session_wire import ProtocolError, batch_orders, hello_from_pb, submit_to_pb, tokens_from_pb
from router.fleet.worker_session import SessionSettings, WorkerSession, choose_load_period
from router.types.requests import PlainEvents, PlainStream
from router.types.session_events import AttemptReader, PrefillRoute, StreamOffer, SubmitOrder
from router.types.worker_view import WorkerKey
from router.workers.prefix_map import PrefixMap
from tandem.backoff import Backoff
from tandem.errors import ConfigError, Unavailable
from tandem.protocol.wire import sampling_from_pb
from tandem.rpc.worker_directory import ChangingDirectory, stated_addresses
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import BlockHash, Incarnation, RequestId, TransferId, WorkerId
from tandem.values.roles import WorkerRole
from tandem.values.sampling import SamplingParams
from tests.support.fake_worker import SECRET, FakeWorker, hold
from tests.support.router.cluster import (
    PROMPT,
    ROOT,
    WatchedRegistry,
    cluster,
    collect,
    fleet_of,
    routed,
    session_settings,
)
from tests.support.router.native_world import make_native_streams
from worker.session_port import orders_of

_NAMES: list[BlockHash] = []
BlockHasher(SECRET).extend(ROOT, _NAMES, range(64))
both_carriers = pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "grpc"])
_IGNORED = AttemptReader(on_event=lambda _event: None, on_token=lambda _index, _token_id: None)


def _events(first: int, *changes: tuple[int, bool], cleared: bool = False) -> pb.WorkerMessage:
    events = [pb.KVEvent(block_hash=_NAMES[index], stored=stored) for index, stored in changes]
    return pb.WorkerMessage(kv_events=pb.KVEvents(first_sequence=first, cleared=cleared, events=events))


@pytest.mark.parametrize(
    ("num_workers", "silence_s", "period_s"),
    [(1, 1.5, 0.25), (500, 1.5, 0.25), (800, 1.5, 0.4), (5000, 1.5, 0.5), (5000, 0.5, 0.25), (5000, 0.9, 0.3)],
)
def test_router_with_many_workers_asks_for_fewer_load_reports(
    num_workers: int, silence_s: float, period_s: float
) -> None:
    assert choose_load_period(num_workers, silence_s) == pytest.approx(period_s)


async def test_hello_registers_the_worker() -> None:
    async with cluster(FakeWorker("d0"), FakeWorker("p0", role=WorkerRole.PREFILL)) as router:
        status = router.registry.status()
        assert status.ready
        assert (status.model_name, status.max_model_len, status.model_fingerprint) == ("toy", 1024, "model-a")
        assert sorted((w.info.key.worker_id, w.info.role.value) for w in status.workers) == [
            ("d0", "decode"),
            ("p0", "prefill"),
        ]


async def test_prefill_workers_without_decode_worker_are_not_ready() -> None:
    async with cluster(FakeWorker("p0", role=WorkerRole.PREFILL)) as router:
        assert not router.registry.status().ready


@both_carriers
async def test_load_and_cache_events_reach_the_registry(is_direct: bool) -> None:
    worker = FakeWorker("d0", is_direct=is_direct)
    worker.first_messages = [_events(7, (0, True), (1, True), cleared=True)]
    async with cluster(worker) as router:
        prefix_map = router.registry.prefix_map
        worker.send(_events(7, (2, True), (3, True), (3, False)))
        worker.send(pb.WorkerMessage(load=pb.LoadSnapshot(num_running=2, backlog_tokens=50, num_free_blocks=9)))
        await router.registry.until(lambda: router.registry.snapshots()[0].load.num_running == 2)
        (snapshot,) = router.registry.snapshots()
        assert (snapshot.backlog_tokens, snapshot.num_active, snapshot.load.num_free_blocks) == (50, 2, 9)
        assert prefix_map.longest_prefix(_NAMES) == {"d0": 3}
        assert not prefix_map.is_approximate(WorkerId("d0"))


async def test_handoff_from_a_worker_that_left_is_ignored() -> None:
    worker = FakeWorker("d0")
    async with cluster(worker, FakeWorker("p0", role=WorkerRole.PREFILL)) as router:
        handoffs = [
            pb.CommittedHandoff(worker_id=name, incarnation=life, num_tokens=16, exposed_s=0.1)
            for name, life in (("p0", 2), ("p1", 1), ("p0", 1))
        ]
        worker.send(pb.WorkerMessage(tokens=pb.StepTokens(handoffs=handoffs)))
        worker.send(pb.WorkerMessage(load=pb.LoadSnapshot(num_running=2)))
        await router.registry.until(lambda: any(w.load.num_running == 2 for w in router.registry.snapshots()))
        (measured,) = router.registry.pairs.pairs.values()
        assert measured.count == 1.0


async def test_missed_events_make_worker_approximate_until_snapshot() -> None:
    worker = FakeWorker("d0")
    worker.first_messages = [_events(1, (0, True), cleared=True)]
    async with cluster(worker) as router:
        prefix_map, d0 = router.registry.prefix_map, WorkerId("d0")
        worker.send(_events(5, (1, True)))
        await router.registry.until(lambda: prefix_map.is_approximate(d0) and prefix_map.num_blocks(d0) == 1)
        assert prefix_map.longest_prefix(_NAMES) == {}
        worker.send(_events(6, (0, True), (1, True), cleared=True))
        await router.registry.until(lambda: not prefix_map.is_approximate(d0))
        assert prefix_map.longest_prefix(_NAMES) == {"d0": 2}


async def test_missed_events_request_a_snapshot() -> None:
    worker, d0 = FakeWorker("d0"), WorkerId("d0")
    worker.first_messages = [_events(1, (0, True), (1, True), cleared=True)]
    registry = WatchedRegistry(PrefixMap(silence_s=0.0))
    async with worker, fleet_of(worker, registry=registry):
        await registry.until_live(1)
        worker.send(_events(5, (1, True)))
        await registry.until(lambda: registry.prefix_map.is_approximate(d0) and len(registry.prefix_map) == 1)
        # The first report shows that it lives, the second that it had time to tell by itself.
        for _ in range(2):
            worker.send(pb.WorkerMessage(load=pb.LoadSnapshot()))
        await registry.until(lambda: not registry.prefix_map.is_approximate(d0))
        assert registry.prefix_map.longest_prefix(_NAMES) == {"d0": 2}
        assert worker.num_resyncs == 1


@both_carriers
async def test_session_orders_are_batched_in_order(is_direct: bool) -> None:
    worker = FakeWorker("d0", script=hold, is_direct=is_direct)
    async with cluster(worker) as router:
        assert worker.num_direct == is_direct
        (port,) = [router.registry.port(w.info.key) for w in router.registry.snapshots()]
        assert port is not None
        names = [RequestId(f"r{i}") for i in range(40)]
        for name in names:
            port.submit(_order(name, attempt=1), _IGNORED)
        port.cancel(names[0], 1)
        arrived = [(await worker.submissions.get()).submit.request_id for _ in names]
        assert arrived == names
        await worker.submission(names[0]).cancelled.wait()


def test_session_order_batches_stay_below_message_bound() -> None:
    long = submit_to_pb(_order(prompt=tuple(range(1 << 17, (1 << 17) + 100_000))), 1)
    short = submit_to_pb(_order(), 2)
    waiting = iter([short, short, long, long, long, short])
    sizes = []
    while (batch := batch_orders(lambda: next(waiting, None))) is not None:
        sizes.append(len(orders_of(batch)))
    assert sizes == [5, 1]
    assert orders_of(short) == (short,)


@both_carriers
async def test_restarted_worker_is_new_with_empty_prefix_map(is_direct: bool) -> None:
    worker = FakeWorker("d0", is_direct=is_direct)
    worker.first_messages = [_events(1, (0, True), cleared=True)]
    async with cluster(worker) as router:
        registry = router.registry
        await registry.until(lambda: registry.prefix_map.num_blocks(WorkerId("d0")) == 1)
        old_port = registry.port(WorkerKey(WorkerId("d0"), Incarnation(1)))
        await worker.crash()
        await registry.until_live(0)
        assert len(registry.prefix_map) == 0
        async with FakeWorker("d0", incarnation=2, port=worker.port):
            await registry.until_live(1)
            assert registry.snapshots()[0].info.key == ("d0", 2)
            assert registry.port(WorkerKey(WorkerId("d0"), Incarnation(1))) is None
            assert old_port is not None
            with pytest.raises(Unavailable):
                old_port.submit(_order(), _IGNORED)
            assert await collect(router.generate(routed()))


async def test_fleet_asks_workers_for_the_reports_that_suffice_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_session, "_MOST_REPORTS_PER_S", 10)
    registry, workers = WatchedRegistry(), [FakeWorker(f"d{number}") for number in range(3)]
    async with AsyncExitStack() as stack:
        for worker in workers:
            await stack.enter_async_context(worker)
        await stack.enter_async_context(fleet_of(*workers, registry=registry))
        await registry.until_live(3)
    assert [worker.load_period_s for worker in workers] == [pytest.approx(0.3)] * 3


@both_carriers
async def test_silent_worker_is_removed(is_direct: bool) -> None:
    registry, worker = WatchedRegistry(), FakeWorker("d0", is_direct=is_direct)
    async with worker, fleet_of(worker, registry=registry, settings=session_settings(silence_s=0.05)):
        await registry.until_live(1)
        await registry.until_live(0)


async def test_killed_worker_is_noticed_by_closed_socket() -> None:
    """Long before a keepalive or the silence limit would."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.fake_worker", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    shadow = FakeWorker("d0", port=int(await process.stdout.readline()))
    registry = WatchedRegistry()
    async with fleet_of(shadow, registry=registry, settings=session_settings(silence_s=3600.0)):
        await registry.until_live(1)
        process.kill()
        await registry.until_live(0)
    await process.wait()


async def test_worker_of_another_model_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    ours, other = FakeWorker("d0"), FakeWorker("d1", model_fingerprint="model-b")
    registry = WatchedRegistry()
    async with ours, fleet_of(ours, registry=registry):
        await registry.until_live(1)
        async with other, fleet_of(other, registry=registry):
            await _until_logged(caplog, "model_fingerprint is 'model-b'")
        assert [w.info.key.worker_id for w in registry.snapshots()] == ["d0"]


async def test_router_without_workers_keeps_its_model(caplog: pytest.LogCaptureFixture) -> None:
    ours, other = FakeWorker("d0"), FakeWorker("d0", model_fingerprint="model-b", incarnation=2)
    renamed = FakeWorker("d0", incarnation=3)
    renamed.hello.model_name = "another name"
    registry = WatchedRegistry()
    async with ours, fleet_of(ours, registry=registry):
        await registry.until_live(1)
    await registry.until_live(0)
    async with other, fleet_of(other, registry=registry):
        await _until_logged(caplog, "model_fingerprint is 'model-b'; this router serves 'model-a', of its first worker")
    async with renamed, fleet_of(renamed, registry=registry):
        await _until_logged(caplog, "model is 'another name'; this router serves 'toy'")
    async with ours, fleet_of(ours, registry=registry):
        await registry.until_live(1)


async def test_second_worker_with_same_id_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    registry, one, two = WatchedRegistry(), FakeWorker("d0", incarnation=1), FakeWorker("d0", incarnation=2)
    async with one, two, fleet_of(one, registry=registry):
        await registry.until_live(1)
        async with fleet_of(two, registry=registry):
            await _until_logged(caplog, "worker id d0 is in use")
        assert registry.snapshots()[0].info.key.incarnation == 1
        async with asyncio.timeout(10.0):
            while not one.num_superseded:  # noqa: ASYNC110 - a fake worker wakes nobody
                await asyncio.sleep(0.01)
    assert two.num_superseded == 0, "this session might be the second one to the same worker, whose first one lives"


async def test_session_with_wrong_role_or_secret_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    registry, worker = WatchedRegistry(), FakeWorker("d0")
    async with worker:
        worker.role = WorkerRole.PREFILL
        async with fleet_of(worker, registry=registry):
            await _until_logged(caplog, "expected a prefill worker, found a decode worker")
        wrong_secret = SessionSettings(metadata=(("x", "y"),), incarnation=Incarnation(1))
        worker.role = WorkerRole.DECODE
        async with fleet_of(worker, registry=registry, settings=wrong_secret):
            await _until_logged(caplog, "UNAUTHENTICATED")
    assert registry.snapshots() == []


class _EndingCall:
    """A stream that a worker ends after these messages."""

    def __init__(self, *messages: pb.WorkerMessage) -> None:
        self._messages = deque(messages)

    async def write(self, _message: pb.RouterMessage) -> None: ...

    async def read(self) -> object:
        return self._messages.popleft() if self._messages else grpc.aio.EOF

    async def details(self) -> str:
        return ""

    def cancel(self) -> None: ...


@pytest.mark.parametrize(
    ("messages", "level", "text"),
    [
        (
            [pb.WorkerMessage(draining=pb.Draining(reason="the worker is stopping"))],
            "INFO",
            "worker d0 left: the worker has drained: the worker is stopping",
        ),
        ([], "WARNING", "worker d0 left: the worker closed the session without announcing a drain"),
    ],
)
async def test_session_end_is_logged_with_workers_reason(
    messages: list[pb.WorkerMessage], level: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    info = hello_from_pb(pb.WorkerMessage(hello=FakeWorker("d0").hello))
    session = WorkerSession(GrpcCarrier(_EndingCall(*messages)), info, session_settings())
    await session.converse(WatchedRegistry())
    left = [(record.levelname, record.getMessage()) for record in caplog.records if "left" in record.msg]
    assert left == [(level, text)]


@both_carriers
async def test_malformed_message_ends_session_and_reconnects(is_direct: bool) -> None:
    worker = FakeWorker("d0", is_direct=is_direct)
    async with cluster(worker) as router:
        left = router.registry.num_left
        worker.send(pb.WorkerMessage(hello=worker.hello))
        await router.registry.until(lambda: router.registry.num_left > left)
        await router.registry.until_live(1)
        assert await collect(router.generate(routed()))


_HUGE_BLOCKS = common.KVLayout(
    dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1, block_size=(1 << 32) - 1, tp_size=1
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol_version": 99}, "protocol version 99"),
        ({"worker_id": ""}, "lacks"),
        ({"num_blocks": 0}, "lacks"),
        ({"role": pb.WORKER_ROLE_UNSPECIFIED}, "lacks"),
        ({"layout": common.KVLayout(dtype="float3")}, "impossible"),
        ({"direct_port": 70_000, "direct_ticket": bytes(16)}, "direct_port 70000"),
        ({"direct_port": 7000}, "a ticket of 0 bytes"),
        ({"layout": common.KVLayout(dtype="float32")}, "impossible"),
        ({"num_blocks": (1 << 32) - 1, "num_blocks_below": (1 << 32) - 1, "layout": _HUGE_BLOCKS}, "a pool of"),
    ],
)
def test_impossible_hello_is_refused(change: dict[str, object], message: str) -> None:
    hello = FakeWorker("d0").hello
    for name, value in change.items():
        if isinstance(value, common.KVLayout):
            hello.layout.CopyFrom(value)
        else:
            setattr(hello, name, value)
    with pytest.raises(ProtocolError, match=message):
        hello_from_pb(pb.WorkerMessage(hello=hello))


def test_hello_names_the_rack() -> None:
    hello = FakeWorker("d0").hello
    assert hello_from_pb(pb.WorkerMessage(hello=hello)).rack == ""
    hello.rack = "r1"
    assert hello_from_pb(pb.WorkerMessage(hello=hello)).rack == "r1"


def test_first_message_must_be_hello() -> None:
    with pytest.raises(ProtocolError, match="got load"):
        hello_from_pb(pb.WorkerMessage(load=pb.LoadSnapshot()))


async def test_columns_reach_live_attempts_only() -> None:
    """Rows of an attempt that was cancelled or superseded, and of handles that never were, go nowhere."""
    worker = FakeWorker("d0", script=hold)
    async with cluster(worker) as router:
        (port,) = [router.registry.port(w.info.key) for w in router.registry.snapshots()]
        assert port is not None
        received: dict[str, list[tuple[int, int]]] = {}
        has_last = asyncio.Event()

        def read_into(name: str) -> AttemptReader:
            rows = received.setdefault(name, [])

            def on_token(index: int, token_id: int) -> None:
                rows.append((index, token_id))
                if token_id == 15:
                    has_last.set()

            return AttemptReader(on_event=lambda _event: None, on_token=on_token)

        for name, request_id, attempt in (("a", "r-0", 1), ("b", "r-1", 1), ("c", "r-2", 1), ("c2", "r-2", 2)):
            port.submit(_order(request_id, attempt=attempt), read_into(name))
        handles = [(await worker.submissions.get()).submit.handle for _ in range(4)]
        assert len({0, *handles}) == 5
        port.cancel(RequestId("r-1"), 1)
        await worker.submission("r-1").cancelled.wait()
        rows = [*handles, 999, handles[0]]
        step = pb.StepTokens(handles=rows, indexes=range(6), token_ids=range(10, 16))
        worker.send(pb.WorkerMessage(tokens=step))
        async with asyncio.timeout(20.0):
            await has_last.wait()
        assert received == {"a": [(0, 10), (5, 15)], "b": [], "c": [], "c2": [(3, 13)]}


@pytest.mark.parametrize("ends_by", ["tokens", "transfer_failed", "refused", "cancel", "end of the session"])
async def test_reader_knows_of_natively_written_tokens_before_anything_else(ends_by: str) -> None:
    worker = FakeWorker("d0", script=hold)
    here, there = socket.socketpair()
    log: list[Any] = []
    heard = asyncio.Event()
    texts = SimpleNamespace(text=b"ab", offsets=array("q", [0, 1, 2]))

    def note(what: Any) -> None:
        log.append(what)
        heard.set()

    async def logged(count: int) -> None:
        while len(log) < count:
            heard.clear()
            await heard.wait()

    def offer(next_index: int) -> StreamOffer:
        events = PlainEvents(here.fileno(), lambda rest: False, b"<", b">")
        stream = PlainStream(events, texts, frozenset(), time.monotonic())
        return StreamOffer(
            stream=stream, next_index=next_index, on_written=lambda ids, gaps: note(ids), write_rest=note
        )

    reader = AttemptReader(
        on_event=lambda event: note(type(event).__name__), on_token=lambda index, _id: note(index), offer=offer
    )
    with here, there:
        async with cluster(worker, new_native_streams=make_native_streams(9)) as router, asyncio.timeout(20.0):
            (port,) = [router.registry.port(w.info.key) for w in router.registry.snapshots()]
            assert port is not None
            port.submit(_order("r-0", attempt=1), reader)
            attempt = await worker.submissions.get()
            attempt.give([1], first_index=3)
            await logged(1)
            for index in (4, 5):
                attempt.give([1], first_index=index)
            there.setblocking(False)
            for _ in range(2):
                assert await asyncio.get_running_loop().sock_recv(there, 8) == b"3\r\n<b>\r\n"
            assert log == [3]
            match ends_by:
                case "tokens":
                    attempt.give([1, 0], first_index=6)
                case "transfer_failed":
                    attempt.fail_transfer("another")
                case "refused":
                    attempt.refuse("Overloaded")
                case "cancel":
                    port.cancel(RequestId("r-0"), 1)
                case _:
                    await worker.crash()
            await logged(2 if ends_by == "cancel" else 3)
    assert log[:2] == [3, [1, 1]]
    names = {"tokens": "TokensArrived", "transfer_failed": "TransferFailed", "refused": "AttemptRefused"}
    assert log[2:3] == ([] if ends_by == "cancel" else [names.get(ends_by, "WorkerLost")])


@both_carriers
async def test_columns_of_unequal_length_end_the_session(is_direct: bool) -> None:
    worker = FakeWorker("d0", script=hold, is_direct=is_direct)
    async with cluster(worker) as router:
        worker.send(pb.WorkerMessage(tokens=pb.StepTokens(handles=[1], indexes=[0], token_ids=[])))
        await router.registry.until_live(0)


async def test_session_that_cannot_begin_leaves_no_worker_behind() -> None:
    failures = [OSError(errno.ENOMEM, "no memory for streams")]

    def new_native_streams() -> NativeStreams:
        if failures:
            raise failures.pop()
        return MagicMock(spec=NativeStreams)

    async with cluster(FakeWorker("d0", script=hold), new_native_streams=new_native_streams) as router:
        async with asyncio.timeout(20.0):
            await router.registry.until(lambda: router.registry.num_left == 1)
            await router.registry.until_live(1)


def _order(name: str = "r-0", *, attempt: int = 2, prompt: tuple[int, ...] = PROMPT) -> SubmitOrder:
    return SubmitOrder(
        request_id=RequestId(name),
        attempt=attempt,
        choice_index=1,
        prompt_token_ids=array("i", prompt),
        generated_token_ids=(5, 6),
        sampling=SamplingParams(temperature=0.0, num_logprobs=0, logit_bias={3: -1.0}, stop_token_ids=(9,)),
        hash_root=ROOT,
        priority=-1,
        timeout_s=None,
        prefill=PrefillRoute(
            worker=WorkerKey(WorkerId("p0"), Incarnation(2**63 - 1)),
            address="h:1",
            transfer_id=TransferId("t"),
            attempt=3,
        ),
    )


def test_submit_on_the_wire_keeps_every_field() -> None:
    submit = submit_to_pb(_order(), 7).submit
    assert sampling_from_pb(submit.sampling) == _order().sampling
    assert list(submit.generated_token_ids) == [5, 6]
    assert not submit.HasField("timeout_s")
    assert (submit.prefill.incarnation, submit.prefill.attempt, submit.choice_index) == (2**63 - 1, 3, 1)


def test_logprobs_must_match_the_tokens() -> None:
    delta = pb.TokenDelta(token_ids=[1, 2], logprobs=[common.Logprobs(logprob=-0.5)])
    with pytest.raises(ProtocolError, match="2 tokens with 1"):
        tokens_from_pb(delta)
    delta.logprobs.append(common.Logprobs(logprob=-1.5, top=[common.TokenLogprob(token_id=4, logprob=-0.1)]))
    first, second = tokens_from_pb(delta).tokens
    assert (first.logprob, second.logprob, second.top_logprobs[0].token_id) == (-0.5, -1.5, 4)


@pytest.mark.parametrize("growth", [1.05, 1.25, 2.0])
def test_backoff_grows_to_bound_with_jitter(growth: float) -> None:
    backoff, rng = Backoff(first_s=0.1, most_s=2.0, growth=growth), Random(4)
    waits = [backoff.wait_s(n, rng) for n in range(1, 200)]
    for n, wait in enumerate(waits, 1):
        whole = min(2.0, 0.1 * growth ** (n - 1))
        assert whole / 2 <= wait <= whole
    assert len(set(waits)) == len(waits)
    assert backoff.wait_s(10_000, None) == 2.0


@pytest.mark.parametrize("outage_s", [0.3, 0.7, 1.3, 2.6, 5.0])
def test_reconnects_find_a_worker_soon_after_its_return(outage_s: float) -> None:
    for seed in range(100):
        rng, at_s, num_failures = Random(seed), 0.0, 0
        while at_s < outage_s:
            num_failures += 1
            at_s += RECONNECTS.wait_s(num_failures, rng)
        assert at_s - outage_s <= RECONNECTS.first_s + (RECONNECTS.growth - 1.0) * 2.0 * outage_s


async def test_directory_reports_stated_addresses_and_changes() -> None:
    stated = stated_addresses(prefill=["a:1"], decode=["b:2", "[::1]:3"])
    assert {(a.role.value, a.address) for a in stated} == {("prefill", "a:1"), ("decode", "b:2"), ("decode", "[::1]:3")}
    directory = ChangingDirectory(stated)
    watching = directory.watch()
    assert await anext(watching) == stated
    directory.replace(stated)
    fewer = stated_addresses(prefill=[], decode=["b:2"])
    directory.replace(fewer)
    assert await anext(watching) == fewer
    await watching.aclose()


@pytest.mark.parametrize("address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:-1", "host:x"])
def test_malformed_worker_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"decode\.addresses"):
        stated_addresses(prefill=[], decode=[address])


def test_duplicate_worker_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        stated_addresses(prefill=["a:1"], decode=["a:1"])


async def _until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    logged = asyncio.Event()

    def seen(record: logging.LogRecord) -> bool:
        if text in record.getMessage():
            logged.set()
        return True

    caplog.handler.addFilter(seen)
    try:
        if text not in caplog.text:
            await logged.wait()
    finally:
        caplog.handler.removeFilter(seen)
