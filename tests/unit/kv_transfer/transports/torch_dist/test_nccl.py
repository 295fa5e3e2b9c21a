"""torch_dist between GPUs, as far as testable without one.

What is real: who may take that way, the handshake, limits, aborts and environment, over a real gloo group. What is not:
NCCL itself and CUDA's streams.
"""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.device_pool import DevicePool
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.interface import WriteOrder
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.torch_dist import nccl
from kv_transfer.transports.torch_dist import receiver as torch_dist_receiver
from kv_transfer.transports.torch_dist import sender as torch_dist_sender
from kv_transfer.transports.torch_dist.communicator import (
    RECEIVER,
    SENDER,
    Communicator,
    CommunicatorBroken,
    Rendezvous,
    reach_store,
    serve_store,
)
from kv_transfer.transports.torch_dist.device_to_device import can_write_directly, direct_device
from kv_transfer.transports.torch_dist.nccl import NcclCommunicator, over_nccl
from kv_transfer.transports.torch_dist.receiver import TorchDistReceiver
from kv_transfer.transports.torch_dist.sender import TorchDistSender
from kv_transfer.transports.torch_dist.wire import (
    MessageHeader,
    MessageKind,
    RendezvousOffer,
    pack_header,
    unpack_rendezvous,
)
from tandem.errors import TransferError
from tandem.values.ids import TransferId
from tests.support.kv_transfer.device_fakes import on_device
from tests.support.kv_transfer.transport_peer import (
    LAYOUT,
    PAIRING,
    block_views,
    cell_range,
    landing,
    make_region,
    order,
)

CPU = torch.device("cpu")
LIMIT_S = 0.5
WAIT_S = 20.0
INT8 = Pairing.from_layouts(LAYOUT, replace(LAYOUT, dtype="int8"), wire_dtype="int8")


class Named(TorchPool):
    """A pool that claims to be on some device."""

    def __init__(self, identity: str) -> None:
        super().__init__(torch.zeros(4 * LAYOUT.block_bytes, dtype=torch.uint8), LAYOUT)
        self._identity = identity

    @property
    def identity(self) -> str:
        return self._identity


def pool_on(identity: str) -> KVRegion:
    return KVRegion.on_device(Named(identity)) if identity else make_region(seed=0, num_blocks=4)


@pytest.fixture
def with_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "problem", lambda: None)


@pytest.mark.usefixtures("with_nccl")
@pytest.mark.parametrize(
    ("own", "theirs", "isolated", "pairing", "direct"),
    [
        ("cuda a", "cuda b", (True, True), PAIRING, True),
        ("cuda a", "cuda b", (False, False), PAIRING, False),  # NCCL neither encrypts nor authenticates
        ("cuda a", "cuda b", (True, False), PAIRING, False),
        ("cuda a", "cuda b", (False, True), PAIRING, False),
        ("cuda a", "cuda a", (True, True), PAIRING, False),  # and joins no GPU to itself
        ("cuda a", "cuda b", (True, True), INT8, False),
        ("cuda a", "cpu", (True, True), PAIRING, False),
        ("cuda a", "", (True, True), PAIRING, False),
        ("", "cuda b", (True, True), PAIRING, False),
        ("xpu a", "xpu b", (True, True), PAIRING, False),
        ("cpu", "cpu", (False, False), PAIRING, True),
    ],
)
def test_torch_dist_direct_path_requires_matching_pools(
    own: str, theirs: str, isolated: tuple[bool, bool], pairing: Pairing, direct: bool
) -> None:
    ours, others = isolated
    meeting = RendezvousOffer(store_port=1, prefix="p", device=direct_device(pool_on(theirs), isolated_network=others))
    assert can_write_directly(pool_on(own), pairing, meeting, isolated_network=ours) is direct


def test_nccl_absent_offers_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: False)
    assert nccl.problem()
    assert direct_device(pool_on("cuda a"), isolated_network=True) == ""


class Stream:
    """A stream that remembers what was done while it was the current one, or to it."""

    def __init__(self, _device: torch.device, priority: int = 0) -> None:
        self.priority = priority
        self.done: list[str] = []

    def synchronize(self) -> None:
        self.done.append("synchronized")


@dataclass
class Fakes:
    """The fakes for CUDA, and what they recorded."""

    options: list[SimpleNamespace] = field(default_factory=list)
    current: Stream | None = None
    aborted: int = 0
    abort_fails: bool = False

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.current, before = stream, self.current
        try:
            yield
        finally:
            self.current = before

    def note(self, what: str) -> None:
        assert self.current is not None, f"{what} on the engine's own stream"
        self.current.done.append(what)


class Work:
    """Progresses by itself like NCCL's; gloo's does so while waited for."""

    def __init__(self, work: distributed.Work) -> None:
        self._done = threading.Event()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: distributed.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout: timedelta) -> None:
        if not self._done.wait(timeout.total_seconds()):
            raise RuntimeError("timed out in blocking wait")
        if self._error is not None:
            raise self._error


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    seen = Fakes()

    class Group:
        """As ProcessGroupNCCL is used, over gloo."""

        @staticmethod
        def Options(*, is_high_priority_stream: bool) -> SimpleNamespace:
            config = SimpleNamespace(blocking=1)
            return SimpleNamespace(_timeout=None, config=config, high=is_high_priority_stream)

        def __init__(self, store: distributed.Store, rank: int, _size: int, options: SimpleNamespace) -> None:
            seen.options.append(options)
            self._store, self._rank, self._timeout = store, rank, options._timeout
            self._gloo: distributed.ProcessGroupGloo | None = None

        def connected(self) -> distributed.ProcessGroupGloo:
            """Like NCCL's, it meets its peer at the first operation."""
            if self._gloo is None:
                options = distributed.ProcessGroupGloo._Options()
                options._timeout = self._timeout
                options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
                self._gloo = distributed.ProcessGroupGloo(self._store, self._rank, 2, options)
            return self._gloo

        def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
            seen.note("sent")
            return Work(self.connected().send(tensors, peer, tag))

        def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work:
            seen.note("received")
            return Work(self.connected().recv(tensors, peer, tag))

        def abort(self) -> None:
            seen.aborted += 1
            if seen.abort_fails:
                raise RuntimeError("the device is lost")

    real_zeros = torch.zeros

    def zeros(*size: int, device: torch.device | None = None, **options: object) -> torch.Tensor:
        if device is not None:
            seen.note("allocated")
        return real_zeros(*size, **options)

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(Stream=Stream, stream=seen.stream))
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Group, raising=False)
    return seen


def rendezvous(store: distributed.Store, rank: int) -> Rendezvous:
    meeting = RendezvousOffer(store_port=store.port, prefix="p", device="cuda b")
    return Rendezvous(store=store, meeting=meeting, number=0, rank=rank, address="127.0.0.1", limit_s=LIMIT_S)


@pytest.fixture
def pair(fakes: Fakes) -> Iterator[tuple[NcclCommunicator, NcclCommunicator]]:
    store = serve_store("127.0.0.1", LIMIT_S)
    theirs = reach_store("127.0.0.1", store.port, LIMIT_S)
    with ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(over_nccl, rendezvous(store, RECEIVER), CPU),
            threads.submit(over_nccl, rendezvous(theirs, SENDER), CPU),
        ]
        yield ends[0].result(10), ends[1].result(10)


def test_nccl_tensors_arrive_in_order(pair: tuple[NcclCommunicator, NcclCommunicator], fakes: Fakes) -> None:
    receiver, sender = pair
    sent = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (1, 5, 70_000)]
    came = [torch.zeros_like(tensor) for tensor in sent]
    coming = [receiver.start(tensor) for tensor in came]
    for work in [sender.start(tensor) for tensor in sent]:
        sender.finish(work)
    for work in coming:
        receiver.finish(work)
    assert all(torch.equal(a, b) for a, b in zip(sent, came, strict=True))
    # Made without blocking, and on streams that the engine has none of.
    assert [(made.config.blocking, made.high) for made in fakes.options] == [(0, True)] * 2
    assert sender._stream.priority == receiver._stream.priority == -1
    assert sender._stream.done == ["allocated", *["sent"] * 4]
    assert receiver._stream.done == ["allocated", *["received"] * 4]
    sender.close()
    receiver.close()


def test_nccl_timed_out_communicator_is_aborted(pair: tuple[NcclCommunicator, NcclCommunicator], fakes: Fakes) -> None:
    receiver, sender = pair
    work = receiver.start(torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(CommunicatorBroken):
        receiver.finish(work)
    receiver.close()
    assert fakes.aborted == 1
    assert receiver._stream.done[-1] == "synchronized"
    with pytest.raises(CommunicatorBroken):
        receiver.start(torch.zeros(8, dtype=torch.uint8))
    sender.close()
    assert fakes.aborted == 2


def test_nccl_absent_peer_costs_no_group(fakes: Fakes) -> None:
    store = serve_store("127.0.0.1", LIMIT_S)
    with pytest.raises(CommunicatorBroken):
        over_nccl(rendezvous(store, RECEIVER), CPU)
    assert not fakes.options, "NCCL leaves a thread behind that waits for it"


def test_nccl_failed_abort_does_not_break_close(
    pair: tuple[NcclCommunicator, NcclCommunicator], fakes: Fakes, caplog: pytest.LogCaptureFixture
) -> None:
    fakes.abort_fails = True
    for end in pair:
        end.close()
    assert fakes.aborted == 2
    assert "could not be aborted" in caplog.text


Ends = tuple[TorchDistReceiver, TorchDistSender, KVRegion, KVRegion]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Between pools on a device, not yet connected."""
    source, target = make_region(seed=1), make_region(seed=0)
    receiver = TorchDistReceiver(on_device(target), stall_s=LIMIT_S)
    yield receiver, TorchDistSender(on_device(source), stall_s=LIMIT_S), source, target
    receiver.close()
    os.close(source.fd)
    os.close(target.fd)


def writes(receiver: TorchDistReceiver, lands_in: KVRegion, attempt: int) -> WriteOrder:
    """An order with a grant of its own, of three blocks."""
    key = TransferKey(transfer_id=TransferId("t"), attempt=attempt)
    return order(key, receiver.open_grant(key, landing(lands_in, 4, 5, 6)), cell_range(0, 3), [1, 2, 3])


def test_torch_dist_without_nccl_uses_host_memory(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(_pool: DevicePool, _at: Rendezvous) -> Communicator:
        raise CommunicatorBroken("no way")

    for module in (torch_dist_sender, torch_dist_receiver):
        monkeypatch.setattr(module, "between_devices", unreachable)
    receiver, sender, source, target = ends
    writer = sender.connect(receiver.offer(), PAIRING)
    done = writes(receiver, on_device(target), 1)
    result = writer.write(done).result(WAIT_S)
    assert receiver.verify(done.key, done.cells, result.checksum)
    assert [bytes(view) for view in block_views(target, [4, 5, 6])] == [
        bytes(view) for view in block_views(source, [1, 2, 3])
    ]
    writer.close()


@pytest.mark.parametrize("where", ["pack_summed", "unpack_summed", "blank"])
def test_nccl_device_out_of_memory_fails_one_write_only(
    ends: Ends, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, sender, _source, target = ends
    writer = sender.connect(receiver.offer(), PAIRING)
    real = getattr(TorchPool, where)
    full = True

    def fails_once(pool: TorchPool, *args: object) -> object:
        nonlocal full
        if full:
            full = False
            with pool.working():
                raise torch.OutOfMemoryError("CUDA out of memory")
        return real(pool, *args)

    monkeypatch.setattr(TorchPool, where, fails_once)
    with pytest.raises(TransferError):
        writer.write(writes(receiver, on_device(target), 1)).result(WAIT_S)
    assert not writer.closed
    done = writes(receiver, on_device(target), 2)
    assert receiver.verify(done.key, done.cells, writer.write(done).result(WAIT_S).checksum)
    writer.close()


def test_nccl_path_not_offered_ends_connection() -> None:
    target = make_region(seed=0)
    receiver = TorchDistReceiver(target, stall_s=LIMIT_S)
    with socket.create_connection(receiver._server.getsockname(), WAIT_S) as sock:
        sock.sendall(one_sided_wire.pack(one_sided_wire.ClaimKind.HELLO, receiver._secret))
        assert unpack_rendezvous(one_sided_wire.receive_blob(sock)).device == ""
        sock.sendall(pack_header(MessageHeader(kind=MessageKind.RENEW_DIRECT, number=0)))
        assert sock.recv(1) == b"", "hung up on"
    receiver.close()
    os.close(target.fd)
