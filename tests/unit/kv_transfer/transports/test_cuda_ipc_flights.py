"""`cuda_ipc` with several chunks under way on the device: none is reported before its own end, whatever happens."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from kv_transfer.memory.move_table import MoveTable
from kv_transfer.memory.side_streams import SideStreams
from kv_transfer.memory.torch_pool import TorchPool
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.catalogue import candidates, open_receivers, open_senders
from kv_transfer.transports.cuda_ipc.sender import MAX_FLYING, CudaIpcWriter
from kv_transfer.transports.one_sided.receiver import send_goodbye
from tandem.errors import TransferError
from tests.support.kv_transfer.device_fakes import HostSharing, on_device
from tests.support.kv_transfer.stream_fakes import FakeCuda, FakeEvent
from tests.support.kv_transfer.transport_peer import cell_range, landing, order
from tests.unit.kv_transfer.transports.test_conformance import KEY, PAIRING, WAIT_S, Pair, block_bytes, make_region

OTHER = TransferKey(transfer_id=KEY.transfer_id, attempt=KEY.attempt + 1)
SOON_S = 0.1


class FakeKernel:
    """Copies at once, as if a device did it later."""

    def __init__(self, pool):
        self._pool = pool
        self.may_start = threading.Event()
        self.may_start.set()

    def launch(self, moves: MoveTable, source, target, _stream):
        self.may_start.wait()
        parts = []
        planes, rows = moves.planes.reshape(moves.num_layers, -1, 2), torch.tensor(moves.rows).view(-1, 4).tolist()
        for layer in planes.tolist():
            for here, there, span, plane in rows:
                length = span & 0xFFFFFFFF
                begin, end = layer[plane][0] + here, layer[plane][1] + there
                parts.append(source[begin : begin + length])
                target[end : end + length] = parts[-1]
        total = int(self._pool.sum_of(torch.cat(parts)).item()) & 0xFFFFFFFF
        return lambda: total


class Flights:
    """A connection whose device ends a copy when it is told to."""

    def __init__(self, pair: Pair, cuda: FakeCuda, kernel: FakeKernel) -> None:
        self.pair, self.cuda, self._kernel = pair, cuda, kernel
        self.grants: dict[TransferKey, bytes] = {}
        self.written = 0

    @property
    def events(self) -> list[FakeEvent]:
        return [event for stream in self.cuda.made for event in stream.events]

    def write(self, key: TransferKey = KEY) -> "Future[object]":
        """The next block of the source, to the next of the target."""
        number = self.written
        self.written += 1
        if key not in self.grants:
            self.grants[key] = self.pair.receiver.open_grant(key, landing(self.pair.lands_in, *range(10)))
        return self.pair.writer.write(order(key, self.grants[key], cell_range(number, 1), [12 + number]))

    def write_all(self, count: int) -> "list[Future[object]]":
        """The next blocks, the last of which is queued before the first starts: a writer without work waits for what
        flies."""
        self._kernel.may_start.clear()
        try:
            return [self.write() for _ in range(count)]
        finally:
            self._kernel.may_start.set()

    def await_started(self, count: int) -> None:
        while len(self.events) < count:
            threading.Event().wait(0.001)

    def settle(self) -> None:
        """Let every copy that is ever started end."""
        for event in self.events:
            event.happen()


@pytest.fixture
def flights() -> Iterator[Flights]:
    source, target = make_region(seed=1), make_region(seed=0)
    leaves, lands_in = on_device(source), on_device(target)
    pool, cuda = leaves.device, FakeCuda()
    assert isinstance(pool, TorchPool)
    kernel = FakeKernel(pool)
    pool._kernel, pool._streams = kernel, SideStreams(cuda, pool.memory.device)
    sharing = HostSharing(target.fd)
    [receiver] = open_receivers(lands_in, choice="cuda_ipc", sharing=sharing)
    quiet: list[TransferKey] = []
    quieted = threading.Event()
    receiver.listen_quiet(lambda key: (quiet.append(key), quieted.set()))
    [(sender, offer)] = candidates([receiver.offer()], open_senders(leaves, choice="cuda_ipc", sharing=sharing))
    writer = sender.connect(offer, PAIRING)
    flying = Flights(Pair(target, source, lands_in, receiver, sender, writer, quiet, quieted), cuda, kernel)
    try:
        yield flying
    finally:
        flying.settle()
        writer.close()
        receiver.close()
        os.close(source.fd)
        os.close(target.fd)


def test_cuda_ipc_starts_chunks_while_others_fly_and_reports_each_at_its_end(flights: Flights) -> None:
    futures = flights.write_all(MAX_FLYING + 3)
    for i, future in enumerate(futures):
        started = min(i + MAX_FLYING + 1, len(futures))
        flights.await_started(started)
        with pytest.raises(TimeoutError):
            future.result(SOON_S)
        assert len(flights.events) == started
        flights.events[i].happen()
        result = future.result(WAIT_S)
        assert flights.pair.receiver.verify(KEY, cell_range(i, 1), result.checksum)
        assert not any(other.done() for other in futures[i + 1 :])
    moved = list(range(len(futures)))
    assert block_bytes(flights.pair.target, moved) == block_bytes(flights.pair.source, [12 + i for i in moved])
    assert len(flights.cuda.made) == 1, "all on one stream"


def test_cuda_ipc_frees_stream_when_nothing_flies(flights: Flights) -> None:
    streams = flights.pair.sender._region.device._streams
    first = flights.write()
    flights.await_started(1)
    assert streams._free == []
    flights.settle()
    first.result(WAIT_S)
    assert streams._free == flights.cuda.made


def test_cuda_ipc_revocation_is_proven_once_nothing_flies(flights: Flights) -> None:
    futures = flights.write_all(2)
    flights.await_started(2)
    assert flights.pair.receiver.revoke(KEY) is False
    assert not flights.pair.quieted.wait(SOON_S)
    flights.events[0].happen()
    assert not flights.pair.quieted.wait(SOON_S), "the second still flies"
    flights.events[1].happen()
    assert flights.pair.quieted.wait(WAIT_S)
    for future in futures:
        with pytest.raises(TransferError, match="cancelled"):
            future.result(WAIT_S)
    assert not flights.pair.writer.closed


def test_cuda_ipc_cancel_stops_what_is_queued_and_awaits_what_flies(flights: Flights) -> None:
    futures = flights.write_all(MAX_FLYING + 2)
    flights.await_started(MAX_FLYING + 1)
    assert flights.pair.writer.cancel(KEY) is False
    with pytest.raises(TransferError, match="cancelled"):
        futures[-1].result(WAIT_S)
    assert not any(future.done() for future in futures[:-1]), "their sources are being read"
    for event, future in zip(flights.events, futures[:-1], strict=True):
        event.happen()
        with pytest.raises(TransferError, match="cancelled"):
            future.result(WAIT_S)
    assert flights.pair.writer.cancel(KEY) is True
    again = flights.write(OTHER)
    flights.await_started(MAX_FLYING + 2)
    flights.settle()
    again.result(WAIT_S)


def test_cuda_ipc_close_waits_for_all_that_fly(flights: Flights) -> None:
    futures = flights.write_all(2)
    flights.await_started(2)
    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(flights.pair.writer.close)
        while not flights.pair.writer.closed:
            threading.Event().wait(0.001)
        flights.events[0].happen()
        with pytest.raises(TransferError):
            futures[0].result(WAIT_S)
        with pytest.raises(TimeoutError):
            closing.result(SOON_S)
        flights.events[1].happen()
        closing.result(WAIT_S)


def test_cuda_ipc_receiver_end_waits_for_all_that_fly(flights: Flights) -> None:
    """The socket's end promises that no write follows."""
    futures = flights.write_all(2)
    flights.await_started(2)
    (theirs,) = flights.pair.receiver._writers
    send_goodbye(theirs.sock)
    reader = flights.pair.writer._reader
    for event in flights.events:
        reader.join(SOON_S)
        assert reader.is_alive(), "it has hung up"
        event.happen()
    reader.join(WAIT_S)
    assert not reader.is_alive()
    for future in futures:
        with pytest.raises(TransferError):
            future.result(WAIT_S)


def test_cuda_ipc_reports_what_flies_before_it_waits_for_another_grant(
    flights: Flights, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    claim = CudaIpcWriter._claim

    def slowly(writer, job, token):
        if job.order.key == OTHER:
            assert answered.wait(WAIT_S)
        claim(writer, job, token)

    monkeypatch.setattr(CudaIpcWriter, "_claim", slowly)
    first, second = flights.write(), flights.write(OTHER)
    flights.await_started(1)
    flights.settle()
    first.result(WAIT_S)
    answered.set()
    flights.await_started(2)
    flights.settle()
    second.result(WAIT_S)


def test_cuda_ipc_error_of_one_flight_ends_connection_and_lands_others(
    flights: Flights, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event):
        event._happened.wait()
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(FakeEvent, "synchronize", fails)
    futures = flights.write_all(2)
    flights.await_started(2)
    for event in flights.events:
        event.query = lambda: False
    flights.settle()
    for future in futures:
        with pytest.raises(TransferError, match="RuntimeError"):
            future.result(WAIT_S)
    assert flights.pair.writer.closed
    assert "an internal error" in caplog.text
