"""What rank 0 and a rank say about the rank's region, to protobuf and back, and how it is framed on their socket.

Both ends are processes of one worker, on one node or authenticated, so what is malformed here is a bug and not a peer's
doing.
"""

import asyncio
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.protocol.messages import TransferKey
from tandem.errors import TransferError
from tandem.rpc.mutual_tls import TlsFiles
from tandem.v1 import kv_region_pb2 as pb
from tandem.values.ids import TransferId

_SIZE = struct.Struct("<I")
MAX_MESSAGE_BYTES = 64 << 20
MessageT = TypeVar("MessageT", pb.RegionOrder, pb.RegionReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionEnds:
    """How a rank opens the ends of its region."""

    transport: str
    """A name of kv_transfer's catalogue, or `auto`."""
    host: str
    """Address to receive KV at."""
    isolated_network: bool = False
    tcp_streams: int = 2
    tls: TlsFiles | None = None


def ends_to_pb(ends: RegionEnds) -> pb.OpenEnds:
    tls = ends.tls
    return pb.OpenEnds(
        transport=ends.transport,
        host=ends.host,
        isolated_network=ends.isolated_network,
        tcp_streams=ends.tcp_streams,
        tls=None
        if tls is None
        else pb.CertificateFiles(cert=str(tls.cert), key=str(tls.key), ca=str(tls.ca), setting=tls.setting),
    )


def ends_from_pb(message: pb.OpenEnds) -> RegionEnds:
    tls = message.tls
    return RegionEnds(
        transport=message.transport,
        host=message.host,
        isolated_network=message.isolated_network,
        tcp_streams=message.tcp_streams,
        tls=TlsFiles(cert=Path(tls.cert), key=Path(tls.key), ca=Path(tls.ca), setting=tls.setting)
        if message.HasField("tls")
        else None,
    )


def key_to_pb(key: TransferKey) -> pb.LaneKey:
    return pb.LaneKey(transfer_id=key.transfer_id, attempt=key.attempt, lane=key.lane)


def key_from_pb(message: pb.LaneKey) -> TransferKey:
    return TransferKey(transfer_id=TransferId(message.transfer_id), attempt=message.attempt, lane=message.lane)


def cells_to_pb(cells: CellRange) -> pb.CellBox:
    return pb.CellBox(
        first_layer=cells.first_layer,
        num_layers=cells.num_layers,
        first_unit=cells.first_unit,
        num_units=cells.num_units,
        first_head=cells.first_head,
        num_heads=cells.num_heads,
    )


def cells_from_pb(message: pb.CellBox) -> CellRange:
    return CellRange(
        first_layer=message.first_layer,
        num_layers=message.num_layers,
        first_unit=message.first_unit,
        num_units=message.num_units,
        first_head=message.first_head,
        num_heads=message.num_heads,
    )


def pack(message: pb.RegionOrder | pb.RegionReport) -> bytes:
    """One message with its length. Raises TransferError for one that is too long."""
    data = message.SerializeToString()
    if len(data) > MAX_MESSAGE_BYTES:
        raise TransferError(f"a message of {len(data)} bytes to a rank, at most {MAX_MESSAGE_BYTES} are sent")
    return _SIZE.pack(len(data)) + data


def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write what `pack` has made, or nothing where the connection is lost.

    The reader hears of that a turn of the loop later, and until then uvloop's transports raise where asyncio's do not.
    """
    if not writer.is_closing():
        writer.write(data)


async def read(reader: asyncio.StreamReader, kind: type[MessageT]) -> MessageT | None:
    """Read one message; None when the connection has ended. Raises TransferError for one that is too long."""
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        if size > MAX_MESSAGE_BYTES:
            raise TransferError(f"a rank announces a message of {size} bytes, at most {MAX_MESSAGE_BYTES} are read")
        return kind.FromString(await reader.readexactly(size))
    except (asyncio.IncompleteReadError, OSError):
        return None
