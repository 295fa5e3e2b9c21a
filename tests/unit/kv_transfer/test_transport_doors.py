"""What strangers and broken peers can do at the sockets of `tcp` and `shm`: nothing."""

import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kv_transfer.messages import TransferKey
from kv_transfer.transport import KVRegion
from kv_transfer.transports import tcp_wire
from kv_transfer.transports.catalogue import candidates, open_receivers, open_senders
from kv_transfer.transports.tcp_receiver import TcpReceiver
from tandem.errors import TransferError
from tandem.ids import BlockId, TransferId
from tests.unit.kv_transfer.transport_peer import LAYOUT, NUM_BLOCKS, box, make_region, order

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0


def slots(*blocks: int) -> list[BlockId]:
    return [BlockId(b) for b in blocks]


def block_bytes(region: KVRegion, blocks: list[int]) -> bytes:
    return b"".join(region.views(box(0, len(blocks)), slots(*blocks)))


@pytest.fixture
def tcp() -> Iterator[tuple[KVRegion, TcpReceiver]]:
    target = make_region(seed=0)
    receiver = TcpReceiver(target, stall_s=0.2)
    yield target, receiver
    receiver.close()
    os.close(target.fd)


def dial(receiver: TcpReceiver, *, greet: bool) -> socket.socket:
    sock = socket.create_connection(receiver._address, WAIT_S)
    if greet:
        sock.sendall(
            tcp_wire.pack_header(
                tcp_wire.Header(
                    kind=tcp_wire.Kind.HELLO,
                    write_id=0,
                    token=receiver._secret,
                    cells=tcp_wire.NO_CELLS,
                    payload_bytes=0,
                )
            )
        )
        assert len(sock.recv(tcp_wire.ANSWER_BYTES, socket.MSG_WAITALL)) == tcp_wire.ANSWER_BYTES
    return sock


def frame(token: bytes, payload_bytes: int, num_blocks: int = 1, num_layers: int = 1) -> bytes:
    return tcp_wire.pack_header(
        tcp_wire.Header(
            kind=tcp_wire.Kind.WRITE,
            write_id=7,
            token=token,
            cells=box(0, num_blocks, num_layers=num_layers),
            payload_bytes=payload_bytes,
        )
    )


@pytest.mark.parametrize(
    ("greet", "data"),
    [
        (False, b""),
        (False, b"GET / HTTP/1.1\r\n\r\n" * 10),
        (False, b"\x80\x04\x95" + bytes(200)),
        (False, frame(bytes(16), LAYOUT.layer_block_bytes)),
        (True, b"TK"),
        (True, random.Random(2).randbytes(4096)),
        (True, frame(bytes(16), 2**63)),
        (True, frame(bytes(16), 2**40, num_blocks=2**31, num_layers=2**31)),
        (True, frame(bytes(16), LAYOUT.layer_block_bytes - 1)),
        (True, frame(bytes(16), LAYOUT.layer_block_bytes) + b"half"),
    ],
)
def test_hostile_bytes_end_only_their_connection(tcp, greet: bool, data: bytes) -> None:
    target, receiver = tcp
    source = make_region(seed=3)
    [(sender, offer)] = candidates([receiver.offer()], open_senders(source, choice="tcp"))
    writer = sender.connect(offer)
    with dial(receiver, greet=greet) as sock:
        sock.sendall(data)
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b"", "the receiver hangs up"
    grant = receiver.open_grant(KEY, slots(1))
    writer.write(order(KEY, grant, box(0, 1), [5])).result(WAIT_S)
    assert block_bytes(target, [1]) == block_bytes(source, [5])
    assert not any(block_bytes(target, [0, *range(2, NUM_BLOCKS)]))
    writer.close()
    os.close(source.fd)


def test_a_frame_for_a_revoked_grant_is_read_past(tcp) -> None:
    target, receiver = tcp
    grant = receiver.open_grant(KEY, slots(1))
    size = LAYOUT.layer_block_bytes
    with dial(receiver, greet=True) as sock:
        sock.sendall(frame(grant, size) + b"x" * (size // 2))
        while not any(target.buffer):
            pass
        assert receiver.revoke(KEY)
        target.buffer[:] = bytes(target.buffer.nbytes)
        sock.sendall(b"x" * (size - size // 2))
        answer = sock.recv(tcp_wire.ANSWER_BYTES, socket.MSG_WAITALL)
        assert tcp_wire.unpack_answer(answer) == (tcp_wire.Kind.REFUSED, 7)
        assert not any(target.buffer)


def test_a_receiver_that_stops_reading_fails_the_connection() -> None:
    source = make_region(seed=1, num_blocks=4096)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        from kv_transfer.transports.tcp_sender import TcpWriter

        sock = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        writer = TcpWriter(source, sock, stall_s=0.2)
        with pytest.raises(TransferError, match="stalled"):
            writer.write(order(KEY, bytes(16), box(0, 4096), list(range(4096)))).result(WAIT_S)
        assert writer.closed
        writer.close()
        peer.close()
    os.close(source.fd)


def test_the_shm_receiver_drops_strangers() -> None:
    target = make_region(seed=0)
    [receiver] = open_receivers(target, choice="shm")
    for data in (b"", b"x" * 100, struct.pack("!4sB16s", b"TKS1", 99, bytes(16))):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(receiver.offer().advert[16:].decode())
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert sock.recv(64) == b""
    receiver.close()
    os.close(target.fd)
