"""Control messages between a receiver and the writers that access its memory, on a socket of their own.

    writer -> receiver   HELLO(secret)   CLAIM(token)   QUIET(token)
    receiver -> writer   description of its memory   CLAIMED(token)   REFUSED(token)   REVOKE(token)

A writer claims a token before its first byte, so the receiver always knows which process may be writing under it.

Each message ends in a CRC-32: one flipped bit could turn CLAIM into QUIET, or REFUSED into CLAIMED, and the writer
would then write into blocks that belong to others, which no checksum of its payload detects.
"""

import secrets
import socket
import struct
from collections.abc import Sequence
from enum import IntEnum
from zlib import crc32

from kv_transfer.transports.grants import TOKEN_BYTES
from tandem.errors import TransferError

_MESSAGE = struct.Struct("!4sB16s")
_CRC = struct.Struct("!I")
_BLOB = struct.Struct("!II")
"""Size and CRC-32 of a blob."""
_GRANT = struct.Struct("!16sI")
_MAGIC = b"TKC2"
MESSAGE_BYTES = _MESSAGE.size + _CRC.size
MAX_BLOB_BYTES = 1 << 20


class ClaimKind(IntEnum):
    """Kind of a control message."""

    HELLO = 1
    REGION = 2
    CLAIM = 3
    CLAIMED = 4
    REFUSED = 5
    REVOKE = 6
    QUIET = 7


def pack(kind: ClaimKind, token: bytes = bytes(TOKEN_BYTES)) -> bytes:
    """Encode a message as MESSAGE_BYTES bytes."""
    return sealed(_MESSAGE.pack(_MAGIC, kind, token))


def unpack(data: bytes) -> tuple[ClaimKind, bytes]:
    """Kind and token from MESSAGE_BYTES bytes. Raises TransferError."""
    magic, kind, token = _MESSAGE.unpack(unsealed(data))
    if magic != _MAGIC or kind not in ClaimKind._value2member_map_:
        raise TransferError("not a message of a KV transport")
    return ClaimKind(kind), token


def sealed(fields: bytes) -> bytes:
    """Append the CRC-32 of these bytes."""
    return fields + _CRC.pack(crc32(fields))


def unsealed(data: bytes) -> bytes:
    """Check and remove the CRC-32. Raises TransferError when it does not match."""
    fields, checksum = data[: -_CRC.size], data[-_CRC.size :]
    if _CRC.pack(crc32(fields)) != checksum:
        raise TransferError("a message of a KV transport is damaged")
    return fields


def send(sock: socket.socket, kind: ClaimKind, token: bytes) -> bool:
    """Send one message without waiting; False when the peer is gone or does not read."""
    try:
        return sock.send(pack(kind, token), socket.MSG_DONTWAIT) == MESSAGE_BYTES
    except OSError:
        return False


def receive(sock: socket.socket) -> tuple[ClaimKind, bytes] | None:
    """The next message, or None at the end. Raises OSError, or TransferError for a malformed message."""
    data = receive_exactly(sock, MESSAGE_BYTES)
    return None if data is None else unpack(data)


def send_blob(sock: socket.socket, blob: bytes) -> None:
    """Send a transport's description of the memory. Raises OSError."""
    sock.sendall(pack(ClaimKind.REGION) + _BLOB.pack(len(blob), crc32(blob)) + blob)


def receive_blob(sock: socket.socket) -> bytes:
    """Receive a description sent by `send_blob`. Raises OSError or TransferError."""
    message = receive(sock)
    if message is None or message[0] is not ClaimKind.REGION:
        raise TransferError("the receiver refused to share its memory")
    size, checksum = _BLOB.unpack(_receive_all(sock, _BLOB.size))
    if size > MAX_BLOB_BYTES:
        raise TransferError("the receiver's description of its memory is too long")
    blob = _receive_all(sock, size)
    if crc32(blob) != checksum:
        raise TransferError("the receiver's description of its memory is damaged")
    return blob


def pack_grant(token: bytes, slots: Sequence[int]) -> bytes:
    """Encode a grant: its token and the slot of each block, which the writer needs because it copies by itself."""
    return _GRANT.pack(token, len(slots)) + struct.pack(f"!{len(slots)}I", *slots)


def unpack_grant(grant: bytes) -> tuple[bytes, tuple[int, ...]]:
    """Split a grant into its token and slots. Raises TransferError."""
    if len(grant) < _GRANT.size:
        raise TransferError("malformed grant")
    token, count = _GRANT.unpack_from(grant)
    if len(grant) != _GRANT.size + 4 * count:
        raise TransferError("malformed grant")
    return token, struct.unpack_from(f"!{count}I", grant, _GRANT.size)


def random_name() -> str:
    """An unguessable abstract socket address."""
    return f"\0tandem-kv-{secrets.token_hex(16)}"


def receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    """Receive `size` bytes; None when the peer ended before the last of them. Raises OSError."""
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


def _receive_all(sock: socket.socket, size: int) -> bytes:
    data = receive_exactly(sock, size)
    if data is None:
        raise TransferError("the receiver has disconnected")
    return data
