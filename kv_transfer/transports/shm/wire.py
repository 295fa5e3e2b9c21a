"""Passes the memory of the `shm` transport: a file descriptor along with a control message (see one_sided.wire)."""

import socket
import struct

from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.wire import MESSAGE_BYTES, ClaimKind
from tandem.errors import TransferError

_NUM_BLOCKS = struct.Struct("!Q")
_SEALED_BYTES = len(one_sided_wire.sealed(bytes(_NUM_BLOCKS.size)))
REGION_BYTES = MESSAGE_BYTES + _SEALED_BYTES
"""Size of the message that passes the memory: its kind and its number of blocks."""


def send_region(sock: socket.socket, num_blocks: int, fd: int) -> None:
    """Pass the memory's descriptor and number of blocks; the layout of a block was in HELLO."""
    socket.send_fds(
        sock, [one_sided_wire.pack(ClaimKind.REGION) + one_sided_wire.sealed(_NUM_BLOCKS.pack(num_blocks))], [fd]
    )


def receive_region(sock: socket.socket) -> tuple[int, int]:
    """Receive the number of blocks and a descriptor that the caller must close. Raises OSError or TransferError."""
    data, fds, _flags, _address = socket.recv_fds(sock, REGION_BYTES, 1)
    if len(fds) != 1:
        raise TransferError("the receiver refused to share its memory")
    try:
        if len(data) < REGION_BYTES:
            data += one_sided_wire.receive_exactly(sock, REGION_BYTES - len(data)) or b""
        if len(data) != REGION_BYTES or one_sided_wire.unpack(data[:MESSAGE_BYTES])[0] is not ClaimKind.REGION:
            raise TransferError("not a message of the shm transport")
        # A wrong number of blocks would change the distance between layers: writes would hit other blocks.
        (num_blocks,) = _NUM_BLOCKS.unpack(one_sided_wire.unsealed(data[MESSAGE_BYTES:]))
    except (OSError, TransferError):
        socket.close(fds[0])
        raise
    return num_blocks, fds[0]
