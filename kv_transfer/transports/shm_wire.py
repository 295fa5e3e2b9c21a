"""How the `shm` transport passes the memory itself: a descriptor beside a message (see claim_wire)."""

import socket
import struct

from kv_transfer.transports import claim_wire
from kv_transfer.transports.claim_wire import MESSAGE_BYTES, Kind
from tandem.errors import TransferError

_NUM_BLOCKS = struct.Struct("!Q")


def send_region(sock: socket.socket, num_blocks: int, fd: int) -> None:
    """Pass the memory itself; what a block is was said in HELLO."""
    socket.send_fds(sock, [claim_wire.pack(Kind.REGION) + _NUM_BLOCKS.pack(num_blocks)], [fd])


def receive_region(sock: socket.socket) -> tuple[int, int]:
    """Blocks of the pool and a descriptor that the caller must close. Raises OSError or TransferError."""
    size = MESSAGE_BYTES + _NUM_BLOCKS.size
    data, fds, _flags, _address = socket.recv_fds(sock, size, 1)
    if len(fds) != 1:
        raise TransferError("the receiver refused to share its memory")
    if len(data) < size:
        data += claim_wire.receive_exactly(sock, size - len(data)) or b""
    try:
        if len(data) != size or claim_wire.unpack(data[:MESSAGE_BYTES])[0] is not Kind.REGION:
            raise TransferError("not a message of the shm transport")
    except TransferError:
        socket.close(fds[0])
        raise
    (num_blocks,) = _NUM_BLOCKS.unpack_from(data, MESSAGE_BYTES)
    return num_blocks, fds[0]
