"""Replayed, altered or late bytes on the transports' sockets are rejected."""

import os
import socket

import pytest

from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.catalogue import open_receivers
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.wire import ClaimKind
from kv_transfer.transports.one_sided.writer import ClaimingWriter
from kv_transfer.transports.shm import wire as shm_wire
from kv_transfer.transports.torch_dist import wire as torch_dist_wire
from kv_transfer.transports.torch_dist.receiver import TorchDistReceiver
from kv_transfer.transports.write_queue import WriteJob
from tandem.errors import TransferError
from tandem.values.ids import TransferId
from tests.support.kv_transfer.transport_needs import open_files
from tests.support.kv_transfer.transport_peer import cell_range, make_region, order

WAIT_S = 20.0
TOKEN = bytes(range(16))


@pytest.mark.parametrize("kind", ClaimKind)
def test_claim_flipped_bit_is_refused(kind: ClaimKind) -> None:
    data = one_sided_wire.pack(kind, TOKEN)
    assert one_sided_wire.unpack(data) == (kind, TOKEN)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransferError):
            one_sided_wire.unpack(bytes(damaged))


def test_pool_message_flipped_bit_is_refused() -> None:
    target = make_region(seed=0)
    for bit in range(0, 8 * shm_wire.REGION_BYTES, 3):
        before = open_files()
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with ours, theirs:
            shm_wire.send_region(theirs, target.num_blocks, target.fd)
            data, [fd], _flags, _address = socket.recv_fds(ours, shm_wire.REGION_BYTES, 1)
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            socket.send_fds(theirs, [bytes(damaged)], [fd])
            os.close(fd)
            with pytest.raises(TransferError):
                shm_wire.receive_region(ours)
        assert open_files() <= before, "the descriptor that came along is closed"
    os.close(target.fd)


def test_receiver_closed_while_passing_memory_leaks_no_descriptor() -> None:
    target = make_region(seed=0)
    before = open_files()
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with ours, theirs:
        ours.settimeout(0.05)
        socket.send_fds(theirs, [one_sided_wire.pack(ClaimKind.REGION)], [target.fd])
        with pytest.raises(TimeoutError):
            shm_wire.receive_region(ours)
    assert open_files() <= before
    os.close(target.fd)


def test_blob_flipped_bit_is_refused() -> None:
    blob = b"how large, and where"
    for at in range(one_sided_wire.MESSAGE_BYTES + 8 + len(blob)):
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with ours, theirs:
            one_sided_wire.send_blob(theirs, blob)
            data = bytearray(ours.recv(1 << 16))
            data[at] ^= 1
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(TransferError):
                one_sided_wire.receive_blob(ours)


class _Claimant(ClaimingWriter):
    def _perform(self, job: WriteJob) -> None:
        self._claim(job, TOKEN)
        job.succeed(0, 0)


@pytest.mark.parametrize("answer", [ClaimKind.CLAIMED, ClaimKind.REFUSED])
def test_claim_late_answer_is_not_taken_for_that_to_a_later_claim(answer: ClaimKind) -> None:
    """Else the writer would write when the receiver has heard of no claim, and believes it is quiet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.settimeout(WAIT_S)
    writer = _Claimant(ours, "test")
    key = TransferKey(transfer_id=TransferId("t"), attempt=1)
    write = order(key, b"", cell_range(0, 1), [0])
    given_up = writer.write(write)
    assert one_sided_wire.receive(theirs) == (ClaimKind.CLAIM, TOKEN)
    writer.cancel(key)
    assert one_sided_wire.receive(theirs) == (ClaimKind.QUIET, TOKEN)
    with pytest.raises(TransferError, match="cancelled"):
        given_up.result(WAIT_S)
    later = writer.write(write)
    assert one_sided_wire.receive(theirs) == (ClaimKind.CLAIM, TOKEN)
    one_sided_wire.send(theirs, ClaimKind.CLAIMED, TOKEN)  # of the first
    with pytest.raises(TimeoutError):
        later.result(0.1)
    one_sided_wire.send(theirs, answer, TOKEN)
    if answer is ClaimKind.CLAIMED:
        later.result(WAIT_S)
    else:
        with pytest.raises(TransferError, match="unknown grant"):
            later.result(WAIT_S)
    assert not writer._unanswered
    writer.close()
    theirs.close()


@pytest.mark.parametrize("echo", [torch_dist_wire.MessageKind.WRITE, torch_dist_wire.MessageKind.RENEW])
def test_torch_dist_header_out_of_turn_ends_connection(echo: torch_dist_wire.MessageKind) -> None:
    """gloo aborts the process if a message is larger than its posted receive."""
    target = make_region(seed=0)
    [receiver] = open_receivers(target, choice="torch_dist")
    assert isinstance(receiver, TorchDistReceiver)
    with socket.create_connection(receiver._server.getsockname(), WAIT_S) as sock:
        sock.sendall(one_sided_wire.pack(ClaimKind.HELLO, receiver._secret))
        one_sided_wire.receive_blob(sock)
        header = torch_dist_wire.MessageHeader(kind=torch_dist_wire.MessageKind.WRITE, number=1, token=TOKEN)
        sock.sendall(torch_dist_wire.pack_header(header))
        answer = sock.recv(torch_dist_wire.ANSWER_BYTES, socket.MSG_WAITALL)
        assert torch_dist_wire.unpack_answer(answer) == (torch_dist_wire.MessageKind.REFUSED, 1)
        sock.sendall(torch_dist_wire.pack_header(torch_dist_wire.MessageHeader(kind=echo, number=1, token=TOKEN)))
        assert sock.recv(1) == b"", "hung up on"
    receiver.close()
    os.close(target.fd)
