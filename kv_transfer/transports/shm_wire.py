"""The small messages of the `shm` transport, on a Unix socket beside the shared memory.

    writer -> receiver   HELLO(secret)   CLAIM(token)   QUIET(token)
    receiver -> writer   REGION(number of blocks) + memfd   CLAIMED(token)   REFUSED(token)   REVOKE(token)

A writer claims a token before its first byte, so the receiver knows at any moment which process may write with it; the
end of that process's socket proves that it does not.
"""

import secrets
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum

from kv_transfer.transports.grants import TOKEN_BYTES
from tandem.errors import TransferError

_MESSAGE = struct.Struct("!4sB16s")
_NUM_BLOCKS = struct.Struct("!Q")
_GRANT = struct.Struct("!16sI")
_MAGIC = b"TKS1"


class Kind(IntEnum):
    """What a message says."""

    HELLO = 1
    REGION = 2
    CLAIM = 3
    CLAIMED = 4
    REFUSED = 5
    REVOKE = 6
    QUIET = 7


def send(sock: socket.socket, kind: Kind, token: bytes) -> bool:
    """Send one message without waiting; False when the peer is gone or does not read."""
    try:
        return sock.send(_MESSAGE.pack(_MAGIC, kind, token), socket.MSG_DONTWAIT) == _MESSAGE.size
    except OSError:
        return False


def receive(sock: socket.socket) -> tuple[Kind, bytes] | None:
    """The next message, or None at the end. Raises OSError, or TransferError for what is no message."""
    data = _receive_exactly(sock, _MESSAGE.size)
    if data is None:
        return None
    magic, kind, token = _MESSAGE.unpack(data)
    if magic != _MAGIC or kind not in Kind._value2member_map_:
        raise TransferError("not a message of the shm transport")
    return Kind(kind), token


def send_region(sock: socket.socket, num_blocks: int, fd: int) -> None:
    """Pass the memory itself; what a block is was said in HELLO."""
    data = _MESSAGE.pack(_MAGIC, Kind.REGION, bytes(TOKEN_BYTES))
    data += _NUM_BLOCKS.pack(num_blocks)
    socket.send_fds(sock, [data], [fd])


def receive_region(sock: socket.socket) -> tuple[int, int]:
    """Blocks of the pool and a descriptor that the caller must close. Raises OSError or TransferError."""
    size = _MESSAGE.size + _NUM_BLOCKS.size
    data, fds, _flags, _address = socket.recv_fds(sock, size, 1)
    if len(fds) != 1:
        raise TransferError("the receiver refused to share its memory")
    if len(data) < size:
        data += _receive_exactly(sock, size - len(data)) or b""
    magic, kind, _token = _MESSAGE.unpack_from(data.ljust(size, b"\0"))
    if magic != _MAGIC or kind != Kind.REGION or len(data) != size:
        socket.close(fds[0])
        raise TransferError("not a message of the shm transport")
    (num_blocks,) = _NUM_BLOCKS.unpack_from(data, _MESSAGE.size)
    return num_blocks, fds[0]


def pack_grant(token: bytes, slots: Sequence[int]) -> bytes:
    """Token and slots: the writer copies for itself, so it must know where each index lies."""
    return _GRANT.pack(token, len(slots)) + struct.pack(f"!{len(slots)}I", *slots)


def unpack_grant(grant: bytes) -> tuple[bytes, tuple[int, ...]]:
    """Token and slots. Raises TransferError."""
    if len(grant) < _GRANT.size:
        raise TransferError("malformed grant")
    token, count = _GRANT.unpack_from(grant)
    if len(grant) != _GRANT.size + 4 * count:
        raise TransferError("malformed grant")
    return token, struct.unpack_from(f"!{count}I", grant, _GRANT.size)


def random_name() -> str:
    """An unguessable abstract socket address."""
    return f"\0tandem-kv-{secrets.token_hex(16)}"


def _receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            return None
        data += piece
    return data
