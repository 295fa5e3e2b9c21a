"""Frames of the `tcp` transport. Pure.

    sender -> receiver   HELLO            the secret of the receiver's advert, which came over the authenticated link
                         WRITE + payload  cells in the order of the wire (see kv_transfer/layout/mapping.py)
    receiver -> sender   DONE | REFUSED   for each frame, in order
                         NEEDS_TLS        in the clear, instead of anything else

Each frame and answer ends in a CRC-32, because a flipped bit in it would put good bytes in a wrong place, which the
checksum of the payload does not detect. The frames of a stream are numbered from 1, so that none counts twice. In HELLO
the number is replaced by the name of the connection that the stream belongs to, and the size by the stream's index
there. A frame's CRC is seeded with both, so that it is invalid on any other stream. A frame names a grant by its random
token, and cells by index in that grant.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

from kv_transfer.layout.cell_range import CellRange
from tandem.errors import TransferError

VERSION = 4
_MAGIC = b"TKVT"
_HEADER = struct.Struct("!4sBB2xQ16sIIIIIIQ")
_CRC = struct.Struct("!I")
_ANSWER = struct.Struct("!4sBB2xQ")
HEADER_BYTES = _HEADER.size + _CRC.size
ANSWER_BYTES = _ANSWER.size + _CRC.size
TLS_HANDSHAKE = 0x16
"""First byte that a TLS client sends (RFC 8446, section 5.1); no frame begins with it."""
TLS_ALERT = bytes((0x15, 3, 3, 0, 2, 2, 70))
"""The answer to a TLS client where TLS is not configured: a fatal alert, protocol_version (RFC 8446, section 6)."""


class FrameKind(IntEnum):
    """Kind of a frame or of an answer."""

    HELLO = 1
    WRITE = 2
    DONE = 3
    REFUSED = 4
    NEEDS_TLS = 5


FRAMES = (FrameKind.HELLO, FrameKind.WRITE)
ANSWERS = (FrameKind.DONE, FrameKind.REFUSED, FrameKind.NEEDS_TLS)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHeader:
    """Header of a frame from a sender."""

    kind: FrameKind
    write_id: int
    token: bytes
    cells: CellRange
    payload_bytes: int


NO_CELLS = CellRange(first_layer=0, num_layers=0, first_unit=0, num_units=0, first_head=0, num_heads=0)


def hello(secret: bytes, name: int, index: int) -> FrameHeader:
    """The first frame of a stream: `name` of its connection, `index` of the stream in it."""
    return FrameHeader(kind=FrameKind.HELLO, write_id=name, token=secret, cells=NO_CELLS, payload_bytes=index)


def seed_of(name: int, index: int) -> int:
    """Seed of the CRCs of a stream's frames; differs between the streams of a connection."""
    return (name ^ name >> 32 ^ index) & 0xFFFFFFFF


def pack_header(header: FrameHeader, seed: int = 0) -> bytes:
    """Encode a header as HEADER_BYTES bytes."""
    c = header.cells
    counts = (c.first_layer, c.num_layers, c.first_unit, c.num_units, c.first_head, c.num_heads)
    return _sealed(
        _HEADER.pack(_MAGIC, VERSION, header.kind, header.write_id, header.token, *counts, header.payload_bytes), seed
    )


def unpack_header(data: bytes, seed: int = 0) -> FrameHeader:
    """Decode HEADER_BYTES bytes. Raises TransferError."""
    magic, version, kind, write_id, token, *counts, payload_bytes = _HEADER.unpack(_unsealed(data, seed))
    if magic != _MAGIC or version != VERSION or kind not in FRAMES:
        raise TransferError("not a frame of the tcp transport")
    cells = CellRange(
        first_layer=counts[0],
        num_layers=counts[1],
        first_unit=counts[2],
        num_units=counts[3],
        first_head=counts[4],
        num_heads=counts[5],
    )
    return FrameHeader(kind=FrameKind(kind), write_id=write_id, token=token, cells=cells, payload_bytes=payload_bytes)


def pack_answer(kind: FrameKind, write_id: int) -> bytes:
    """Encode an answer as ANSWER_BYTES bytes."""
    return _sealed(_ANSWER.pack(_MAGIC, VERSION, kind, write_id))


def unpack_answer(data: bytes) -> tuple[FrameKind, int]:
    """Decode ANSWER_BYTES bytes. Raises TransferError."""
    magic, version, kind, write_id = _ANSWER.unpack(_unsealed(data))
    if magic != _MAGIC or version != VERSION or kind not in ANSWERS:
        raise TransferError("not an answer of the tcp transport")
    return FrameKind(kind), write_id


def _sealed(fields: bytes, seed: int = 0) -> bytes:
    return fields + _CRC.pack(crc32(fields, seed))


def _unsealed(data: bytes, seed: int = 0) -> bytes:
    fields, checksum = data[: -_CRC.size], data[-_CRC.size :]
    if _CRC.pack(crc32(fields, seed)) != checksum:
        raise TransferError("a header of the tcp transport is damaged")
    return fields
