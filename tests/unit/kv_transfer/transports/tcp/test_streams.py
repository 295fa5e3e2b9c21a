"""Several streams to one receiver: writes are spread, and all streams end together."""

import os
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from kv_transfer.memory import landing as landing_module
from kv_transfer.memory.mover import load_mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.socket_stream import CellStream, StreamStep
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.tcp import receiver as tcp_receiver
from kv_transfer.transports.tcp import sender as tcp_sender
from kv_transfer.transports.tcp.bursts import ViewsPart
from kv_transfer.transports.tcp.receiver import TcpReceiver
from kv_transfer.transports.tcp.sender import TcpSender, TcpWriter
from kv_transfer.transports.tcp.settings import MAX_STREAMS, TcpSettings
from tandem.errors import TransferError
from tandem.values.ids import TransferId
from tests.support.kv_transfer.transport_peer import PAIRING, block_views, cell_range, landing, make_region, order

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0
STREAMS = 3
NUM_BLOCKS = 4096
"""More than sockets hold, so that a frame can be caught in the middle."""
AFTER = b"\xee"
"""What nothing holds before a test writes it."""


class Ends:
    def __init__(self) -> None:
        self.source, self.target = (make_region(seed=0, num_blocks=NUM_BLOCKS) for _ in range(2))
        self.source.buffer[:] = random.Random(1).randbytes(self.source.buffer.nbytes).replace(AFTER, b"\x11")
        self.receiver = TcpReceiver()
        sender = TcpSender(self.source, settings=TcpSettings(streams=STREAMS))
        self.writer: TcpWriter = sender.connect(self.receiver.offer(), PAIRING)
        blocks = list(range(NUM_BLOCKS))
        self.token = self.receiver.open_grant(KEY, landing(self.target, *blocks))
        self.whole = order(KEY, self.token, cell_range(0, NUM_BLOCKS), blocks, pool_blocks=NUM_BLOCKS)

    @property
    def lock(self):
        """While it is held, nothing lands."""
        return self.receiver._grants.find(self.token).lock

    def start_whole_frames(self) -> list:
        """One on each stream, caught in the middle as long as the lock is held."""
        futures = [self.writer.write(self.whole) for _ in range(STREAMS)]
        for stream in self.writer._streams:
            while not (stream._unanswered and stream._unanswered[0].left < stream._unanswered[0].num_bytes):
                pass
        return futures

    def one(self, block: int):
        return order(KEY, self.token, cell_range(block, 1), [block], pool_blocks=NUM_BLOCKS)


@pytest.fixture(params=["compiled", "python"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    if request.param == "python":
        for module in (landing_module, tcp_receiver, tcp_sender):
            monkeypatch.setattr(module, "load_mover", lambda: None)
    elif load_mover() is None:
        pytest.skip("without a C++ compiler sockets are served by Python")
    ends = Ends()
    yield ends
    ends.writer.close()
    ends.receiver.close()
    os.close(ends.source.fd)
    os.close(ends.target.fd)


def all_bytes(region: KVRegion, blocks: list[int]) -> bytes:
    return b"".join(block_views(region, blocks))


def test_streams_write_uses_the_least_busy_stream(ends: Ends) -> None:
    [peer] = ends.receiver._peers.values()
    assert len(peer.channels) == STREAMS
    with ends.lock:
        futures = [ends.writer.write(ends.one(block)) for block in range(2 * STREAMS)]
        assert ends.writer._under_way == [2] * STREAMS
    for future in futures:
        future.result(WAIT_S)
    assert ends.writer._under_way == [0] * STREAMS
    blocks = list(range(2 * STREAMS))
    assert all_bytes(ends.target, blocks) == all_bytes(ends.source, blocks)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_streams_one_broken_ends_all(ends: Ends, side: str) -> None:
    [peer] = ends.receiver._peers.values()
    with ends.lock:
        futures = ends.start_whole_frames()
        if side == "sender":
            ends.writer._streams[1]._channel.hang_up()
        else:
            next(iter(peer.channels)).hang_up()
        for future in futures:
            with pytest.raises(TransferError):
                future.result(WAIT_S)
        assert ends.writer.closed
        ends.source.buffer[:] = bytes(ends.source.buffer.nbytes)  # read by nobody any more
    while peer.channels:
        pass
    assert peer.ended
    ends.target.buffer[:] = bytes(ends.target.buffer.nbytes)
    with pytest.raises(TransferError):
        ends.writer.write(ends.one(0)).result(WAIT_S)
    ends.receiver.close()
    assert not any(ends.target.buffer), "nothing lands afterwards"


def test_streams_after_one_ended_nothing_lands(ends: Ends) -> None:
    [peer] = ends.receiver._peers.values()
    with ends.lock:
        futures = ends.start_whole_frames()
        peer.ended = True
    for future in futures:
        with pytest.raises(TransferError):
            future.result(WAIT_S)
    while peer.channels:
        pass
    assert not any(ends.target.buffer), "the kernel held bytes for every stream"


def slow_down(monkeypatch: pytest.MonkeyPatch, landing_now: threading.Event, go_on: threading.Event) -> None:
    """Any landing parcel waits in the middle of a call, of compiled code or of views."""

    def slow(advance: Callable[[object], StreamStep]) -> Callable[[object], StreamStep]:
        def waiting(parcel: object) -> StreamStep:
            if threading.current_thread().name == "kv-tcp-peer":
                landing_now.set()
                assert go_on.wait(WAIT_S)
            return advance(parcel)

        return waiting

    for kind in (CellStream, ViewsPart):
        monkeypatch.setattr(kind, "advance", slow(kind.advance))


def test_streams_revocation_waits_for_landing_call(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    landing_now, go_on, revoked = threading.Event(), threading.Event(), threading.Event()
    slow_down(monkeypatch, landing_now, go_on)
    future = ends.writer.write(ends.whole)
    assert landing_now.wait(WAIT_S)
    revoking = threading.Thread(target=lambda: (ends.receiver.revoke(KEY), revoked.set()))
    revoking.start()
    assert not revoked.wait(0.1), "a call is under way"
    go_on.set()
    assert revoked.wait(WAIT_S)
    ends.target.buffer[:] = bytes(ends.target.buffer.nbytes)
    revoking.join()
    with pytest.raises(TransferError):
        future.result(WAIT_S)
    assert not any(ends.target.buffer)


def test_streams_cancel_is_final_on_every_stream(ends: Ends) -> None:
    with ends.lock:
        futures = ends.start_whole_frames()
        assert ends.writer.cancel(KEY)
        assert all(stream._unanswered[0].left for stream in ends.writer._streams)
        ends.source.buffer[:] = AFTER * ends.source.buffer.nbytes
        for future in futures:
            with pytest.raises(TransferError):
                future.result(WAIT_S)
    region = make_region(seed=0)
    for attempt in range(STREAMS):  # behind the filled-up frames of each stream
        other = TransferKey(transfer_id=TransferId("other"), attempt=attempt)
        token = ends.receiver.open_grant(other, landing(region, 7))
        ends.writer.write(order(other, token, cell_range(0, 1), [9], pool_blocks=NUM_BLOCKS)).result(WAIT_S)
    assert all_bytes(region, [7]) == all_bytes(ends.source, [9])
    assert AFTER not in bytes(ends.target.buffer), "sources were read after the proof"
    os.close(region.fd)


def test_tcp_streams_beyond_limit_are_refused(ends: Ends) -> None:
    with pytest.raises(ValueError, match="streams"):
        TcpSettings(streams=MAX_STREAMS + 1)
    with pytest.raises(ValueError, match="streams"):
        TcpSettings(streams=0)


def test_streams_of_another_connection_stay_open(ends: Ends) -> None:
    sender = TcpSender(ends.source, settings=TcpSettings(streams=2))
    other = sender.connect(ends.receiver.offer(), PAIRING)
    ends.writer.close()
    other.write(ends.one(3)).result(WAIT_S)
    assert all_bytes(ends.target, [3]) == all_bytes(ends.source, [3])
    other.close()


def test_streams_connection_failed_half_way_leaves_nothing(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    create = socket.create_connection
    made: list[socket.socket] = []

    def scarce(*args: object, **kwargs: object) -> socket.socket:
        if len(made) == 2:
            raise OSError("no more")
        made.append(create(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(socket, "create_connection", scarce)
    with pytest.raises(TransferError, match="no more"):
        TcpSender(ends.source, settings=TcpSettings(streams=4)).connect(ends.receiver.offer(), PAIRING)
    assert [sock.fileno() for sock in made] == [-1, -1]
