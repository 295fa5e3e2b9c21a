"""Unauthenticated and broken peers at the sockets of `tcp` and `shm` have no effect."""

import errno
import logging
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.catalogue import candidates, open_receivers, open_senders
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.interface import KVReceiver
from kv_transfer.transports.one_sided import receiver as one_sided_receiver
from kv_transfer.transports.same_host_sockets import dial_on_this_host
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.tcp.channel import PlainChannel
from kv_transfer.transports.tcp.receiver import MAX_CONNECTIONS, TcpReceiver
from kv_transfer.transports.tcp.sender import TcpWriter
from kv_transfer.transports.tcp.settings import TcpSettings
from tandem.errors import TransferError
from tandem.rpc import refusal_log
from tandem.values.ids import TransferId
from tests.support.kv_transfer.transport_peer import (
    LAYOUT,
    NUM_BLOCKS,
    PAIRING,
    block_views,
    cell_range,
    landing,
    make_region,
    order,
)

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0


def block_bytes(region: KVRegion, blocks: list[int]) -> bytes:
    return b"".join(block_views(region, blocks))


@pytest.fixture
def tcp() -> Iterator[tuple[KVRegion, TcpReceiver]]:
    target = make_region(seed=0)
    receiver = TcpReceiver(settings=TcpSettings(stall_s=0.2))
    yield target, receiver
    receiver.close()
    os.close(target.fd)


def dial(receiver: TcpReceiver, *, send_hello: bool) -> socket.socket:
    sock = socket.create_connection(receiver._address, WAIT_S)
    if send_hello:
        sock.sendall(
            tcp_frames.pack_header(
                tcp_frames.FrameHeader(
                    kind=tcp_frames.FrameKind.HELLO,
                    write_id=0,
                    token=receiver._secret,
                    cells=tcp_frames.NO_CELLS,
                    payload_bytes=0,
                )
            )
        )
        assert len(sock.recv(tcp_frames.ANSWER_BYTES, socket.MSG_WAITALL)) == tcp_frames.ANSWER_BYTES
    return sock


def test_hostile_peer_slow_hello_is_dropped(tcp) -> None:
    _target, receiver = tcp
    hello = tcp_frames.FrameHeader(
        kind=tcp_frames.FrameKind.HELLO, write_id=0, token=receiver._secret, cells=tcp_frames.NO_CELLS, payload_bytes=0
    )
    with dial(receiver, send_hello=False) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in tcp_frames.pack_header(hello):
            with suppress(ConnectionError):
                sock.send(bytes([byte]))
            if select.select([sock], [], [], 0.05)[0]:
                break
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b"", "each drop came in time, the whole did not"


def test_hostile_peers_in_numbers_do_not_block_known_sender() -> None:
    target, source = make_region(seed=0), make_region(seed=3)
    receiver = TcpReceiver(settings=TcpSettings(stall_s=WAIT_S))
    connections = [dial(receiver, send_hello=False) for _ in range(MAX_CONNECTIONS)]
    [(sender, offer)] = candidates([receiver.offer()], open_senders(source, choice="tcp"))
    writer = sender.connect(offer, PAIRING)
    grant = receiver.open_grant(KEY, landing(target, 1))
    writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)
    connections[0].settimeout(WAIT_S / 2)
    assert connections[0].recv(1) == b"", "the oldest made room"
    for accepted in connections:
        accepted.close()
    writer.close()
    receiver.close()
    os.close(target.fd)
    os.close(source.fd)


def frame(token: bytes, payload_bytes: int, num_units: int = 1, num_layers: int = 1) -> bytes:
    return tcp_frames.pack_header(
        tcp_frames.FrameHeader(
            kind=tcp_frames.FrameKind.WRITE,
            write_id=1,
            token=token,
            cells=cell_range(0, num_units, num_layers=num_layers),
            payload_bytes=payload_bytes,
        )
    )


@pytest.mark.parametrize(
    ("send_hello", "data"),
    [
        (False, b""),
        (False, b"GET / HTTP/1.1\r\n\r\n" * 10),
        (False, b"\x80\x04\x95" + bytes(200)),
        (False, frame(bytes(16), LAYOUT.layer_block_bytes)),
        (True, b"TK"),
        (True, random.Random(2).randbytes(4096)),
        (True, frame(bytes(16), 2**63)),
        (True, frame(bytes(16), 2**40, num_units=2**31, num_layers=2**31)),
        (True, frame(bytes(16), LAYOUT.layer_block_bytes - 1)),
        (True, frame(bytes(16), LAYOUT.layer_block_bytes) + b"half"),
    ],
)
def test_hostile_bytes_end_only_their_connection(tcp, send_hello: bool, data: bytes) -> None:
    target, receiver = tcp
    source = make_region(seed=3)
    [(sender, offer)] = candidates([receiver.offer()], open_senders(source, choice="tcp"))
    writer = sender.connect(offer, PAIRING)
    with dial(receiver, send_hello=send_hello) as sock:
        sock.sendall(data)
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b"", "the receiver hangs up"
    grant = receiver.open_grant(KEY, landing(target, 1))
    writer.write(order(KEY, grant, cell_range(0, 1), [5])).result(WAIT_S)
    assert block_bytes(target, [1]) == block_bytes(source, [5])
    assert not any(block_bytes(target, [0, *range(2, NUM_BLOCKS)]))
    writer.close()
    os.close(source.fd)


def test_connection_log_unauthenticated_peers_are_rate_limited(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusal_log, "EVERY_S", 1e9)
    receiver = TcpReceiver(settings=TcpSettings(stall_s=WAIT_S))
    caplog.set_level(logging.INFO)
    for number in range(5 * refusal_log.BURST):
        with dial(receiver, send_hello=False) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10 if number % 2 else b"")
            with suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(1) == b""
    receiver.close()
    logged = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(logged) == refusal_log.BURST
    assert logged[0].startswith("tcp: a connection was dropped before it was served: ")


def test_connection_log_known_sender_dropped_is_always_logged(tcp, caplog: pytest.LogCaptureFixture) -> None:
    _target, receiver = tcp
    caplog.set_level(logging.INFO)
    for _ in range(2 * refusal_log.BURST):
        with dial(receiver, send_hello=True) as sock:
            sock.sendall(b"x" * tcp_frames.HEADER_BYTES)
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    receiver.close()
    logged = [record for record in caplog.records if "tcp sender dropped" in record.getMessage()]
    assert len(logged) == 2 * refusal_log.BURST


def test_connection_log_suppressed_lines_are_counted_in_next_line() -> None:
    budget = refusal_log.LineBudget(burst=2, every_s=10.0)
    assert [budget.spend(now_s) for now_s in (0.0, 0.0, 1.0, 2.0, 9.9, 10.0, 10.0)] == [0, 0, None, None, None, 3, None]
    assert [budget.spend(1000.0) for _ in range(4)] == [1, 0, None, None], "silence saves up no more than the burst"


def test_receiver_frame_for_revoked_grant_is_skipped(tcp) -> None:
    target, receiver = tcp
    grant = receiver.open_grant(KEY, landing(target, 1))
    size = LAYOUT.layer_block_bytes
    with dial(receiver, send_hello=True) as sock:
        sock.sendall(frame(grant, size) + b"x" * (size // 2))
        while not any(target.buffer):
            pass
        assert receiver.revoke(KEY)
        target.buffer[:] = bytes(target.buffer.nbytes)
        sock.sendall(b"x" * (size - size // 2))
        answer = sock.recv(tcp_frames.ANSWER_BYTES, socket.MSG_WAITALL)
        assert tcp_frames.unpack_answer(answer) == (tcp_frames.FrameKind.REFUSED, 1)
        assert not any(target.buffer)


def test_sender_receiver_that_stops_reading_fails_connection() -> None:
    source = make_region(seed=0, num_blocks=4096)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        sock = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        writer = TcpWriter(source, [PlainChannel(sock)], PAIRING, stall_s=0.2)
        with pytest.raises(TransferError, match="stalled"):
            writer.write(order(KEY, bytes(16), cell_range(0, 4096), list(range(4096)), pool_blocks=4096)).result(WAIT_S)
        assert writer.closed
        writer.close()
        peer.close()
    os.close(source.fd)


def test_claims_unauthenticated_peer_is_dropped() -> None:
    target = make_region(seed=0)
    [receiver] = open_receivers(target, choice="shm")
    for data in (b"", b"x" * 100, struct.pack("!4sB16s", b"TKC1", 99, bytes(16))):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(receiver.offer().advert[16:].decode())
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with suppress(ConnectionResetError):
                assert sock.recv(64) == b""
    receiver.close()
    os.close(target.fd)


def test_claims_peer_of_other_user_is_dropped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_region(seed=0)
    [receiver] = open_receivers(target, choice="shm")
    address = receiver.offer().advert[16:].decode()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    monkeypatch.setattr(one_sided_receiver, "HELLO_S", 10 * WAIT_S)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT_S / 2)
        sock.connect(address)
        assert sock.recv(64) == b"", "hung up on before it says anything"
    receiver.close()
    os.close(target.fd)


def raw_connection(receiver: KVReceiver) -> socket.socket:
    """A connection without any message yet."""
    if isinstance(receiver, TcpReceiver):
        return dial(receiver, send_hello=False)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(receiver.offer().advert[16:].decode())
    return sock


@pytest.mark.parametrize("choice", ["tcp", "shm"])
def test_receiver_out_of_descriptors_listens_again(
    choice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_region(seed=0)
    refused = threading.Event()
    accept = socket.socket.accept

    def crowded(self: socket.socket) -> tuple[socket.socket, object]:
        connection = accept(self)
        if refused.is_set():
            return connection
        refused.set()
        connection[0].close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket.socket, "accept", crowded)
    [receiver] = open_receivers(target, choice=choice)
    for _ in range(2):  # the first one is lost, the second one is heard
        with raw_connection(receiver) as sock, suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(bytes(200))
            assert sock.recv(64) == b"", "hung up on for what it said"
    assert refused.is_set()
    assert "Too many open files" in caplog.text
    receiver.close()
    os.close(target.fd)


@pytest.mark.parametrize("choice", ["tcp", "shm"])
def test_receiver_out_of_threads_listens_again(
    choice: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = make_region(seed=0)
    refused = threading.Event()
    start = threading.Thread.start

    def crowded(self: threading.Thread) -> None:
        if not self.name.endswith("-peer") or refused.is_set():
            return start(self)
        refused.set()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", crowded)
    [receiver] = open_receivers(target, choice=choice)
    for _ in range(2):  # the first one is hung up on, the second one is heard
        with raw_connection(receiver) as sock, suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(bytes(200))
            assert sock.recv(64) == b"", "hung up on"
    assert "can't start new thread" in caplog.text
    receiver.close()
    os.close(target.fd)


@pytest.mark.parametrize("name", ["shm", "cuda_ipc"])
def test_claims_greeting_a_missing_socket_names_the_transport(name: str) -> None:
    with pytest.raises(TransferError, match=f"^{name}: "):
        dial_on_this_host(bytes(TOKEN_BYTES) + b"\0tandem-kv-nobody", name)
