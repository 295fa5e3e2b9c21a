"""Frames of `tcp`: damaged, repeated, missing or reordered ones are refused, and nothing lands wrongly."""

import os
import random
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.memory import checksum
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.tcp.bursts import MAX_VIEWS, bursts, drop_moved
from kv_transfer.transports.tcp.frames import ANSWER_BYTES, FrameHeader, FrameKind
from kv_transfer.transports.tcp.receiver import TcpReceiver
from kv_transfer.transports.tcp.sender import TcpSender
from kv_transfer.transports.tcp.settings import TcpSettings
from tandem.errors import TransferError
from tandem.values.ids import TransferId
from tests.support.kv_transfer.transport_peer import (
    LAYOUT,
    PAIRING,
    block_views,
    cell_range,
    landing,
    make_region,
    order,
)

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0
PAYLOAD = bytes(range(1, 129)) * (LAYOUT.layer_block_bytes // 128)


@pytest.fixture
def target() -> Iterator[KVRegion]:
    region = make_region(seed=0)
    yield region
    os.close(region.fd)


@pytest.fixture
def receiver() -> Iterator[TcpReceiver]:
    receiver = TcpReceiver(settings=TcpSettings(stall_s=0.5))
    yield receiver
    receiver.close()


def write(token: bytes, number: int, cells: CellRange) -> bytes:
    header = FrameHeader(kind=FrameKind.WRITE, write_id=number, token=token, cells=cells, payload_bytes=len(PAYLOAD))
    return tcp_frames.pack_header(header)


def one_layer(layer: int) -> CellRange:
    return cell_range(0, 1, first_layer=layer, num_layers=1)


def dial(receiver: TcpReceiver) -> socket.socket:
    sock = socket.create_connection(receiver._address, WAIT_S)
    hello = FrameHeader(
        kind=FrameKind.HELLO, write_id=0, token=receiver._secret, cells=tcp_frames.NO_CELLS, payload_bytes=0
    )
    sock.sendall(tcp_frames.pack_header(hello))
    assert answer(sock) == (FrameKind.DONE, 0)
    return sock


def answer(sock: socket.socket) -> tuple[FrameKind, int]:
    return tcp_frames.unpack_answer(sock.recv(ANSWER_BYTES, socket.MSG_WAITALL))


def assert_hung_up(sock: socket.socket) -> None:
    with suppress(ConnectionResetError):
        assert sock.recv(1) == b""


def flips(data: bytes) -> Iterator[bytes]:
    for at in range(len(data)):
        for bit in range(8):
            yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def test_frame_flipped_header_bit_is_detected() -> None:
    for damaged in flips(write(bytes(16), 1, one_layer(1))):
        with pytest.raises(TransferError):
            tcp_frames.unpack_header(damaged)


def test_frame_flipped_answer_bit_is_detected() -> None:
    for damaged in flips(tcp_frames.pack_answer(FrameKind.DONE, 3)):
        with pytest.raises(TransferError):
            tcp_frames.unpack_answer(damaged)


def test_frames_and_answers_are_not_interchangeable() -> None:
    with pytest.raises(TransferError, match="not an answer"):
        tcp_frames.unpack_answer(tcp_frames.pack_answer(FrameKind.WRITE, 1))
    header = FrameHeader(kind=FrameKind.DONE, write_id=1, token=bytes(16), cells=one_layer(0), payload_bytes=0)
    with pytest.raises(TransferError, match="not a frame"):
        tcp_frames.unpack_header(tcp_frames.pack_header(header))


def test_frame_flipped_header_byte_ends_connection(receiver: TcpReceiver, target: KVRegion) -> None:
    token = receiver.open_grant(KEY, landing(target, 3))
    header = write(token, 1, one_layer(1))
    rng = random.Random(4)
    for at in range(len(header)):
        damaged = bytearray(header)
        damaged[at] ^= 1 << rng.randrange(8)
        with dial(receiver) as sock:
            with suppress(ConnectionError):
                sock.sendall(bytes(damaged) + PAYLOAD)
            assert_hung_up(sock)
        assert not any(target.buffer)


@pytest.mark.parametrize(
    ("numbers", "num_taken"),
    [((1, 1), 1), ((2,), 0), ((1, 3), 1), ((1, 2, 1), 2), ((0,), 0), ((2, 1), 0), ((1, 2, 3), 3)],
    ids=["replayed", "skipped the first", "skipped", "replayed late", "from 0", "reordered", "in order"],
)
def test_frames_count_once_and_in_order(
    receiver: TcpReceiver, target: KVRegion, numbers: tuple[int, ...], num_taken: int
) -> None:
    token = receiver.open_grant(KEY, landing(target, 3))
    with dial(receiver) as sock:
        with suppress(ConnectionError):
            for layer, number in enumerate(numbers):
                sock.sendall(write(token, number, one_layer(layer)) + PAYLOAD)
        for number in range(1, num_taken + 1):
            assert answer(sock) == (FrameKind.DONE, number)
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        assert_hung_up(sock)
    landed = [bytes(view) for layer in range(3) for view in landing(target, 3).room(one_layer(layer))]
    assert landed == [PAYLOAD] * num_taken + [bytes(len(PAYLOAD))] * (3 - num_taken)


def test_frame_payload_size_unlike_its_cells_is_refused(receiver: TcpReceiver, target: KVRegion) -> None:
    token = receiver.open_grant(KEY, landing(target, 3))
    with dial(receiver) as sock:
        sock.sendall(write(token, 1, cell_range(0, 1)))
        assert_hung_up(sock)
    assert not any(target.buffer)


@pytest.mark.parametrize(
    "answers", [[(FrameKind.DONE, 2)], [(FrameKind.DONE, 1), (FrameKind.DONE, 1)], [(FrameKind.NEEDS_TLS, 0)]]
)
def test_frame_answers_are_accepted_once_and_in_order(answers: list[tuple[FrameKind, int]]) -> None:
    source = make_region(seed=3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        offer = TcpReceiver()
        advert = offer.offer()
        offer.close()
        port = str(server.getsockname()[1]).encode()
        advert = replace(advert, advert=advert.advert.replace(str(offer._address[1]).encode(), port))
        accepted: list[socket.socket] = []

        def send_hello() -> None:
            sock, _ = server.accept()
            header = tcp_frames.unpack_header(sock.recv(tcp_frames.HEADER_BYTES, socket.MSG_WAITALL))
            sock.sendall(tcp_frames.pack_answer(FrameKind.DONE, header.write_id))
            accepted.append(sock)

        thread = threading.Thread(target=send_hello)
        thread.start()
        writer = TcpSender(source, settings=TcpSettings(streams=1)).connect(advert, PAIRING)
        thread.join()
        future = writer.write(order(KEY, bytes(16), cell_range(0, 1), [2]))
        accepted[0].recv(tcp_frames.HEADER_BYTES + LAYOUT.block_bytes, socket.MSG_WAITALL)
        for kind, number in answers:
            accepted[0].sendall(tcp_frames.pack_answer(kind, number))
        assert_hung_up(accepted[0])
        assert (future.exception(WAIT_S) is None) is (answers[0] == (FrameKind.DONE, 1))
        assert writer.closed
        accepted[0].close()
        writer.close()
    os.close(source.fd)


# Pieces and checksums


def test_bursts_are_bounded_and_keep_bytes() -> None:
    rng = random.Random(1)
    for _ in range(200):
        data = memoryview(rng.randbytes(rng.randrange(1, 5000)))
        cuts = sorted(rng.sample(range(1, len(data)), min(len(data) - 1, rng.randrange(40))))
        views = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        limit = rng.choice([1, 7, 100, 1000, 10_000])
        groups = list(bursts(views, limit))
        assert b"".join(view for group in groups for view in group) == data
        assert all(0 < sum(map(len, group)) <= limit for group in groups)


def test_bursts_have_at_most_iov_max_views() -> None:
    data = memoryview(bytes(3 * MAX_VIEWS + 5))
    groups = list(bursts([data[i : i + 1] for i in range(len(data))], 1 << 20))
    assert [len(group) for group in groups] == [MAX_VIEWS] * 3 + [5]


def test_frames_payload_in_pieces_is_checksummed_once() -> None:
    rng = random.Random(2)
    for _ in range(200):
        data = memoryview(rng.randbytes(rng.randrange(1, 3000)))
        views = [data[i : i + 97] for i in range(0, len(data), 97)]
        value = 0
        for burst in bursts(views, rng.choice([50, 97, 500, 4000])):
            while burst:
                value = drop_moved(burst, rng.randint(1, sum(map(len, burst))), value)
        assert value == zlib.crc32(data)


def test_frame_fast_checksum_equals_zlib() -> None:
    rng = random.Random(3)
    assert checksum.crc32.__module__ != "zlib", "isal is installed with Tandem"
    for size in (0, 1, 15, 16, 255, 4096, 100_003):
        data = rng.randbytes(size)
        start = rng.getrandbits(32)
        assert checksum.crc32(data) == zlib.crc32(data)
        assert checksum.crc32(data, start) == zlib.crc32(data, start)


def test_frames_without_fast_crc_use_zlib() -> None:
    code = "import sys; sys.modules['isal'] = None\nfrom kv_transfer.memory import checksum\n"
    code += "print(checksum.crc32.__module__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "zlib\n"


def test_frame_landed_payload_is_not_reread_to_verify(
    receiver: TcpReceiver, target: KVRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_region(seed=3)
    writer = TcpSender(source).connect(receiver.offer(), PAIRING)
    token = receiver.open_grant(KEY, landing(target, 4, 9))
    result = writer.write(order(KEY, token, cell_range(0, 2), [2, 3])).result(WAIT_S)

    def read_again(_views: object) -> int:
        raise AssertionError("read again")

    monkeypatch.setattr("kv_transfer.memory.landing.checksum_of", read_again)
    assert receiver.verify(KEY, cell_range(0, 2), result.checksum)
    other = TransferKey(transfer_id=TransferId("other"), attempt=1)
    token = receiver.open_grant(other, landing(target, 4, 9))
    result = writer.write(order(other, token, cell_range(0, 2), [2, 3])).result(WAIT_S)
    assert not receiver.verify(other, cell_range(0, 2), result.checksum ^ 1)
    writer.close()
    os.close(source.fd)
    assert isinstance(landing(target, 4), Landing)
    assert checksum.checksum_of(block_views(target, [4, 9])) == result.checksum


def test_frame_verified_cells_cannot_be_written_again(receiver: TcpReceiver, target: KVRegion) -> None:
    """A second write over verified cells would go unchecked."""
    source = make_region(seed=3)
    writer = TcpSender(source).connect(receiver.offer(), PAIRING)
    token = receiver.open_grant(KEY, landing(target, 4, 9))

    def write(*blocks: int) -> int:
        return writer.write(order(KEY, token, cell_range(0, 2), list(blocks))).result(WAIT_S).checksum

    def assert_refused() -> None:
        with pytest.raises(TransferError, match="refused"):
            write(6, 7)

    first = write(2, 3)
    assert_refused()
    assert not receiver.verify(KEY, cell_range(0, 2), first ^ 1)
    assert write(2, 3) == first
    assert_refused()
    assert receiver.verify(KEY, cell_range(0, 2), first)
    assert_refused()
    writer.close()
    assert b"".join(block_views(target, [4, 9])) == b"".join(block_views(source, [2, 3]))
    os.close(source.fd)
