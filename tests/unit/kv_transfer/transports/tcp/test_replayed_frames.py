"""A frame of one stream replayed on another, where its number may be the next expected."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from zlib import crc32

import pytest

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.tcp.frames import FrameHeader, FrameKind
from kv_transfer.transports.tcp.receiver import TcpReceiver
from tandem.values.ids import TransferId
from tests.support.kv_transfer.transport_peer import LAYOUT, block_views, cell_range, landing, make_region

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
SIZE = LAYOUT.layer_block_bytes
WAIT_S = 20.0


@pytest.fixture
def tcp() -> Iterator[tuple[KVRegion, TcpReceiver]]:
    target = make_region(seed=0)
    receiver = TcpReceiver()
    yield target, receiver
    receiver.close()
    os.close(target.fd)


def stream(receiver: TcpReceiver, name: int, index: int) -> socket.socket:
    hello = tcp_frames.hello(receiver._secret, name, index)
    sock = socket.create_connection(receiver._address, WAIT_S)
    sock.sendall(tcp_frames.pack_header(hello))
    assert tcp_frames.unpack_answer(sock.recv(tcp_frames.ANSWER_BYTES, socket.MSG_WAITALL)) == (FrameKind.DONE, name)
    return sock


@pytest.mark.parametrize(("name", "index"), [(7, 1), (8, 0)], ids=["the same sender's", "a later connection's"])
def test_frame_replayed_on_another_stream_is_refused(tcp, name: int, index: int) -> None:
    target, receiver = tcp
    token, payload = receiver.open_grant(KEY, landing(target, 3)), os.urandom(SIZE)
    header = FrameHeader(
        kind=FrameKind.WRITE, write_id=1, token=token, cells=cell_range(0, 1, num_layers=1), payload_bytes=SIZE
    )
    frame = tcp_frames.pack_header(header, tcp_frames.seed_of(7, 0))
    with stream(receiver, 7, 0) as first, stream(receiver, name, index) as second:
        first.sendall(frame + payload)
        answer = first.recv(tcp_frames.ANSWER_BYTES, socket.MSG_WAITALL)
        assert tcp_frames.unpack_answer(answer) == (FrameKind.DONE, 1)
        assert receiver.verify(KEY, header.cells, crc32(payload))
        landed = b"".join(block_views(target, [3]))
        with suppress(ConnectionResetError, BrokenPipeError):
            second.sendall(frame + os.urandom(SIZE))
            assert second.recv(1) == b"", "hung up on"
        assert b"".join(block_views(target, [3])) == landed, "verified cells are as they were"
