"""Tandem's transports as contestants: the only module of this benchmark that uses them.

A hand-off as the hubs make it, without gRPC: the sender cuts it into chunks, keeps a window of writes in flight, and
reports each chunk's checksum as it lands; the receiver verifies what landed on a thread of its own. The verification of
the last chunk stops the clock.

`checksums: false` replaces the checksums by functions that compute nothing, in these processes only: so their cost can
be measured, although no setting of the product can disable them.
"""

import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.chunk_plan import ChunkPlanner, HandoffSize
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory import checksum
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.mover import Mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.socket_stream import CellStream, CellStreams
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.transports.catalogue import chunk_bytes_over, open_receivers, open_senders
from kv_transfer.transports.interface import KVReceiver, PeerWriter, WriteOrder, WriteResult
from kv_transfer.transports.tcp.settings import PLAIN, TcpSettings, open_identity
from tandem.values.ids import BlockId, TransferId
from tandem.values.kv_layout import KVLayout

_HOST = "127.0.0.1"
_SETTINGS = TransferSettings()
_CHUNK_BYTES = chunk_bytes_over(("shm", "tcp"))
_REPORT = struct.Struct("!II")
_INTACT, _DAMAGED = b"i", b"d"


class Sender:
    """Side of a prefill worker."""

    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._transport: str = options["transport"]
        self._checksums: bool = options["checksums"]
        self._tcp = _tcp(options)
        if not self._checksums:
            _compute_no_checksums()
        self._pool = pools["source"]
        self._writers: dict[bytes, PeerWriter] = {}
        self._orders: dict[str, tuple[PeerWriter, list[WriteOrder]]] = {}
        self.about = {"transport": self._transport, "checksums": self._checksums}

    def connect(self, address: Any) -> None:
        self._reports = socket.create_connection((_HOST, address))
        self._reports.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        offer = TransportOffer(name=self._transport, advert=bytes.fromhex(ticket["advert"]), host_id=ticket["host_id"])
        writer = self._writers.get(offer.advert)
        if writer is None:
            region = region_of(case, self._pool.view, self._pool.fd)
            [sender] = open_senders(region, choice=self._transport, tcp=self._tcp)
            writer = self._writers[offer.advert] = sender.connect(offer, pairing_of(case))
        self._orders[case["name"]] = writer, orders_of(case, pairing_of(case), bytes.fromhex(ticket["grant"]))

    def run(self, name: str) -> float:
        writer, orders = self._orders[name]
        under_way: deque[tuple[int, Future[WriteResult]]] = deque()
        started_s = time.perf_counter()
        for seq, order in enumerate(orders):
            if len(under_way) == _SETTINGS.write_window:
                self._report(*under_way.popleft())
            under_way.append((seq, writer.write(order)))
        while under_way:
            self._report(*under_way.popleft())
        if self._checksums and self._reports.recv(1) != _INTACT:
            raise RuntimeError("a chunk arrived damaged")
        return time.perf_counter() - started_s

    def _report(self, seq: int, write: "Future[WriteResult]") -> None:
        """Wait for a write, and report its checksum to the receiver."""
        result = write.result()
        if self._checksums:
            self._reports.sendall(_REPORT.pack(seq, result.checksum))


class Receiver:
    """Side of a decode worker: one receiver for each geometry, one grant for each case."""

    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._transport: str = options["transport"]
        self._checksums: bool = options["checksums"]
        self._tcp = _tcp(options)
        if not self._checksums:
            _compute_no_checksums()
        self._pool = pools["target"]
        self._ends: dict[int, tuple[KVRegion, KVReceiver]] = {}
        self._granted: dict[str, tuple[KVReceiver, TransferKey, list[CellRange], Landing]] = {}
        self._server = socket.create_server((_HOST, 0))
        self.about = {"transport": self._transport, "checksums": self._checksums}

    def open(self) -> int:
        port: int = self._server.getsockname()[1]
        return port

    def connect(self, address: Any) -> None:
        self._reports, _ = self._server.accept()

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> dict[str, str]:
        """Prepare a case as end_host.End describes; the ticket holds the offer and the grant."""
        if case["num_layers"] not in self._ends:
            region = region_of(case, self._pool.view, self._pool.fd)
            [end] = open_receivers(region, choice=self._transport, tcp=self._tcp)
            self._ends[case["num_layers"]] = region, end
        region, end = self._ends[case["num_layers"]]
        key, pairing = _key(case), pairing_of(case)
        landing = landing_of(case, pairing, region)
        grant = end.open_grant(key, landing)
        self._granted[case["name"]] = end, key, chunks_of(case, pairing), landing
        offer = end.offer()
        return {"advert": offer.advert.hex(), "host_id": offer.host_id, "grant": grant.hex()}

    def run(self, name: str) -> None:
        if not self._checksums:
            return
        end, key, chunks, landing = self._granted[name]
        intact = True
        for _ in chunks:
            seq, value = _REPORT.unpack(self._reports.recv(_REPORT.size, socket.MSG_WAITALL))
            intact &= end.verify(key, chunks[seq], value)
        for cells in chunks:
            landing.judged(cells, intact=False)  # they are written again next time
        self._reports.sendall(_INTACT if intact else _DAMAGED)


def orders_of(case: Mapping[str, Any], pairing: Pairing, grant: bytes) -> list[WriteOrder]:
    """Return all writes of one hand-off, each with the blocks of its chunk, as the hub makes them."""
    sources = tuple(BlockId(block) for block in case["sources"])
    key = _key(case)
    orders = []
    for cells in chunks_of(case, pairing):
        first, blocks = cells.first_unit, sources[cells.first_unit : cells.first_unit + cells.num_units]
        source = pairing.at_source(0, first, blocks, case["pool_blocks"])
        orders.append(WriteOrder(key=key, grant=grant, cells=cells, source=source))
    return orders


def chunks_of(case: Mapping[str, Any], pairing: Pairing) -> list[CellRange]:
    """Return the chunks of a computed prompt: a unit is a block."""
    layout = pairing.source
    shape = HandoffSize(
        num_layers=layout.num_layers, num_heads=layout.num_kv_heads, unit_layer_bytes=pairing.unit_layer_bytes
    )
    return ChunkPlanner(shape, chunk_bytes=_CHUNK_BYTES).plan(len(case["sources"]))


def landing_of(case: Mapping[str, Any], pairing: Pairing, region: KVRegion) -> Landing:
    """Return the reservation of a hand-off."""
    blocks = tuple(BlockId(block) for block in case["targets"])
    return Landing(region, pairing.at_destination(0, blocks, case["pool_blocks"]), pairing)


def pairing_of(case: Mapping[str, Any]) -> Pairing:
    """Pair two equal workers, with one KV head of float32 that takes as many bytes as the model's heads."""
    layout = KVLayout(
        model_fingerprint="bench",
        dtype="float32",
        num_layers=case["num_layers"],
        num_kv_heads=1,
        head_dim=case["layer_block_bytes"] // 8,
        block_size=1,
    )
    return Pairing.from_layouts(layout, layout, wire_dtype=layout.dtype)


def region_of(case: Mapping[str, Any], pool: memoryview, fd: int | None) -> KVRegion:
    """Return the part of a pool that the case uses."""
    size = case["num_layers"] * case["pool_blocks"] * case["layer_block_bytes"]
    return KVRegion.from_buffer(pool[:size], pairing_of(case).source, fd=fd)


def _tcp(options: Mapping[str, Any]) -> TcpSettings:
    files = options.get("tls")
    return PLAIN if files is None else TcpSettings(tls=open_identity(**files))


def _key(case: Mapping[str, Any]) -> TransferKey:
    return TransferKey(transfer_id=TransferId(case["name"]), attempt=1)


def _compute_no_checksums() -> None:
    """Disable checksums in this process, for good."""
    with_checksums = Mover.move

    def bare(*arguments: Any, **options: Any) -> tuple[int, int]:
        return with_checksums(*arguments, **{**options, "with_checksum": False})

    opened = CellStreams.open

    def bare_stream(*arguments: Any, **options: Any) -> CellStream:
        return opened(*arguments, **{**options, "with_checksum": False})

    # Without a verdict, cells could be written only once.
    setattr(Landing, "_begin", lambda _landing, _cells: None)  # noqa: B010
    setattr(Mover, "move", bare)  # noqa: B010 - not an attribute that the type checker may rebind
    setattr(CellStreams, "open", bare_stream)  # noqa: B010
    setattr(checksum, "crc32", _no_checksum)  # noqa: B010


def _no_checksum(_data: Any, value: int = 0) -> int:
    return value
