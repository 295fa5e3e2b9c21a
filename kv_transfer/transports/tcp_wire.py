"""Frames of the `tcp` transport.

    sender -> receiver   HELLO            the secret of the receiver's advert, which came over the authenticated link
                         WRITE + payload  cells in the order of the wire (see kv_transfer/mapping.py)
    receiver -> sender   DONE | REFUSED   for each frame, in order

A frame has a fixed header with a CRC-32 of its own: a flipped bit there would put good bytes in a wrong place, which no
checksum of the payload could tell. Frames of a connection are numbered, so that none counts twice. A frame names a
grant by its random token and cells by index in that grant.
"""

import socket
import struct
import time
from dataclasses import dataclass
from enum import IntEnum
from select import POLLIN, POLLOUT, poll
from zlib import crc32

from kv_transfer.messages import CellRange
from tandem.errors import TransferError

VERSION = 2
_MAGIC = b"TKVT"
_HEADER = struct.Struct("!4sBB2xQ16sIIIIIIQ")
_CRC = struct.Struct("!I")
_ANSWER = struct.Struct("!4sBB2xQ")
HEADER_BYTES = _HEADER.size + _CRC.size
ANSWER_BYTES = _ANSWER.size
MAX_VIEWS = 256
"""Views given to one system call; the kernel takes at most 1024 (IOV_MAX)."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WRITE = 2
    DONE = 3
    REFUSED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The front of a frame towards a receiver."""

    kind: Kind
    write_id: int
    token: bytes
    cells: CellRange
    payload_bytes: int


NO_CELLS = CellRange(first_layer=0, num_layers=0, first_unit=0, num_units=0, first_head=0, num_heads=0)


def pack_header(header: Header) -> bytes:
    """A header as bytes."""
    c = header.cells
    box = (c.first_layer, c.num_layers, c.first_unit, c.num_units, c.first_head, c.num_heads)
    data = _HEADER.pack(_MAGIC, VERSION, header.kind, header.write_id, header.token, *box, header.payload_bytes)
    return data + _CRC.pack(crc32(data))


def unpack_header(data: bytes) -> Header:
    """A header from HEADER_BYTES bytes. Raises TransferError."""
    fields, checksum = data[: _HEADER.size], data[_HEADER.size :]
    if _CRC.pack(crc32(fields)) != checksum:
        raise TransferError("a header of the tcp transport is damaged")
    magic, version, kind, write_id, token, *box, payload_bytes = _HEADER.unpack(fields)
    if magic != _MAGIC or version != VERSION or kind not in (Kind.HELLO, Kind.WRITE):
        raise TransferError("not a frame of the tcp transport")
    cells = CellRange(
        first_layer=box[0],
        num_layers=box[1],
        first_unit=box[2],
        num_units=box[3],
        first_head=box[4],
        num_heads=box[5],
    )
    return Header(kind=Kind(kind), write_id=write_id, token=token, cells=cells, payload_bytes=payload_bytes)


def pack_answer(kind: Kind, write_id: int) -> bytes:
    """An answer as bytes."""
    return _ANSWER.pack(_MAGIC, VERSION, kind, write_id)


def unpack_answer(data: bytes) -> tuple[Kind, int]:
    """An answer from ANSWER_BYTES bytes. Raises TransferError."""
    magic, version, kind, write_id = _ANSWER.unpack(data)
    if magic != _MAGIC or version != VERSION or kind not in (Kind.DONE, Kind.REFUSED):
        raise TransferError("not an answer of the tcp transport")
    return Kind(kind), write_id


class Cursor:
    """A position in a list of views, as system calls consume it. No bytes are copied."""

    __slots__ = ("_index", "_views", "remaining")

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._index = 0
        self.remaining = sum(view.nbytes for view in views)

    def views(self) -> list[memoryview]:
        """The next views, at most MAX_VIEWS of them."""
        return self._views[self._index : self._index + MAX_VIEWS]

    def advance(self, num_bytes: int) -> None:
        """Step over what a system call has moved."""
        self.remaining -= num_bytes
        while num_bytes:
            view = self._views[self._index]
            if num_bytes < view.nbytes:
                self._views[self._index] = view[num_bytes:]
                return
            num_bytes -= view.nbytes
            self._index += 1


def wait_readable(sock: socket.socket, timeout_s: float | None) -> None:
    """Wait for bytes (or the end). Raises TransferError when none come in time."""
    _wait(sock, POLLIN, timeout_s)


def wait_writable(sock: socket.socket, timeout_s: float | None) -> None:
    """Wait for room. Raises TransferError when none comes in time."""
    _wait(sock, POLLOUT, timeout_s)


def _wait(sock: socket.socket, mask: int, timeout_s: float | None) -> None:
    poller = poll()
    poller.register(sock, mask)
    if not poller.poll(None if timeout_s is None else timeout_s * 1000):
        raise TransferError("the peer stalled in the middle of a frame")


def receive_exactly(sock: socket.socket, size: int, *, within_s: float) -> bytes | None:
    """`size` bytes (a header), all of them within `within_s` from now, or None when the peer ended before the first.

    Raises OSError, or TransferError for a peer that is too slow or ends in the middle.
    """
    deadline_s = time.monotonic() + within_s
    data = bytearray(size)
    view = memoryview(data)
    received = 0
    while received < size:
        wait_readable(sock, max(0.0, deadline_s - time.monotonic()))
        count = sock.recv_into(view[received:])
        if count == 0:
            if received:
                raise TransferError("the peer ended in the middle of a frame")
            return None
        received += count
    return bytes(data)
