"""Messages beside the payload of `torch_dist`, on a connection of their own.

    sender -> receiver   HELLO            the secret of the receiver's advert, which came over the authenticated link
                         WRITE            cells of a grant, whose payload follows on the communicator
                         RENEW            create communicator `number`: there is none, or it is broken
                         RENEW_DIRECT     the same, for payload that goes from device to device
    receiver -> sender   RendezvousOffer  (one_sided.wire.send_blob)
                         DONE | REFUSED   for each WRITE

A header ends in a CRC-32: a flipped bit in it would put good bytes in a wrong place.
"""

import json
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from zlib import crc32

from kv_transfer.layout.cell_range import CellRange
from tandem.errors import TransferError

BURST_BYTES = 1 << 20
"""Maximum bytes of one message of the communicator, in host memory; between devices a payload is one message."""
MAX_PAYLOAD_BYTES = 1 << 30
"""Maximum payload of one write."""
MAX_DIRECT_BYTES = 1 << 26
"""Maximum payload of one write from device to device: the receiver allocates as much on its device for each peer."""
_MAGIC = b"TKD2"
_HEADER = struct.Struct("!4sBQ16sIIIIIIQ")
_CRC = struct.Struct("!I")
HEADER_BYTES = _HEADER.size + _CRC.size
_NO_TOKEN = bytes(16)
_ANSWER = struct.Struct("!4sBQ")
ANSWER_BYTES = _ANSWER.size
NO_CELLS = CellRange(first_layer=0, num_layers=0, first_unit=0, num_units=0, first_head=0, num_heads=0)


class MessageKind(IntEnum):
    """Kind of a message."""

    WRITE = 1
    RENEW = 2
    DONE = 3
    REFUSED = 4
    RENEW_DIRECT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHeader:
    """Header from a sender; `number` counts its writes or, in a renewal, its communicators."""

    kind: MessageKind
    number: int
    token: bytes = _NO_TOKEN
    cells: CellRange = NO_CELLS
    payload_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousOffer:
    """How the two sides of a communicator find each other, and the device that payload may go directly into."""

    store_port: int
    prefix: str
    device: str = ""
    """Device of the receiver's pool, as DevicePool.identity; "" when payload has to go through host memory."""


def pack_header(header: MessageHeader) -> bytes:
    """Encode a header as HEADER_BYTES bytes."""
    c = header.cells
    counts = (c.first_layer, c.num_layers, c.first_unit, c.num_units, c.first_head, c.num_heads)
    data = _HEADER.pack(_MAGIC, header.kind, header.number, header.token, *counts, header.payload_bytes)
    return data + _CRC.pack(crc32(data))


def unpack_header(data: bytes) -> MessageHeader:
    """Decode HEADER_BYTES bytes. Raises TransferError."""
    fields, checksum = data[: _HEADER.size], data[_HEADER.size :]
    if _CRC.pack(crc32(fields)) != checksum:
        raise TransferError("a header of the torch_dist transport is damaged")
    magic, kind, number, token, *counts, payload_bytes = _HEADER.unpack(fields)
    if magic != _MAGIC or kind not in (MessageKind.WRITE, MessageKind.RENEW, MessageKind.RENEW_DIRECT):
        raise TransferError("not a message of the torch_dist transport")
    names = ("first_layer", "num_layers", "first_unit", "num_units", "first_head", "num_heads")
    cells = CellRange(**dict(zip(names, counts, strict=True)))
    return MessageHeader(kind=MessageKind(kind), number=number, token=token, cells=cells, payload_bytes=payload_bytes)


def pack_answer(kind: MessageKind, number: int) -> bytes:
    """Encode an answer as ANSWER_BYTES bytes."""
    return _ANSWER.pack(_MAGIC, kind, number)


def unpack_answer(data: bytes) -> tuple[MessageKind, int]:
    """Decode ANSWER_BYTES bytes. Raises TransferError."""
    magic, kind, number = _ANSWER.unpack(data)
    if magic != _MAGIC or kind not in (MessageKind.DONE, MessageKind.REFUSED):
        raise TransferError("not an answer of the torch_dist transport")
    return MessageKind(kind), number


def pack_rendezvous(meeting: RendezvousOffer) -> bytes:
    return json.dumps(asdict(meeting)).encode()


def unpack_rendezvous(data: bytes) -> RendezvousOffer:
    """Decode an offer. Raises TransferError when it is malformed."""
    try:
        fields = json.loads(data)
        return RendezvousOffer(
            store_port=int(fields["store_port"]), prefix=str(fields["prefix"]), device=str(fields["device"])
        )
    except (ValueError, KeyError, TypeError):
        raise TransferError("not a rendezvous offer of the torch_dist transport") from None
