"""Tandem's transports as contestants: the only module of this benchmark that touches them.

A hand-off as the hubs make it, without gRPC between: the sender cuts it into chunks, keeps a window of writes under
way, and tells each chunk's checksum as it lands; the receiver checks what landed on a thread of its own. The last
chunk's check ends the time.

`checksums: false` puts functions that compute nothing in the checksums' places, in these processes alone: what the
checksums cost can be measured, and no setting of the product can turn them off.
"""

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from kv_transfer.checksum import checksum_of
from kv_transfer.chunks import ChunkPlanner, blocks_per_chunk
from kv_transfer.config import TransferSettings
from kv_transfer.messages import CellRange, TransferKey, TransportOffer
from kv_transfer.transport import KVReceiver, KVRegion, PeerWriter, WriteOrder, WriteResult
from kv_transfer.transports import copying, tcp_sender, tcp_wire
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.grants import TOKEN_BYTES
from tandem.ids import BlockId, TransferId
from tandem.kv_layout import KVLayout

_HOST = "127.0.0.1"
_SETTINGS = TransferSettings()
_REPORT = struct.Struct("!II")
_INTACT, _DAMAGED = b"i", b"d"


class Sender:
    """A prefill worker's side."""

    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._transport: str = options["transport"]
        self._checksums: bool = options["checksums"]
        if not self._checksums:
            _compute_no_checksums()
        self._pool = pools["source"]
        self._writers: dict[bytes, PeerWriter] = {}
        self._orders: dict[str, tuple[PeerWriter, list[WriteOrder]]] = {}
        self.about = {"transport": self._transport, "checksums": self._checksums}

    def connect(self, address: Any) -> None:
        """See end_host.End."""
        self._reports = socket.create_connection((_HOST, address))
        self._reports.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        """See end_host.End."""
        offer = TransportOffer(name=self._transport, advert=bytes.fromhex(ticket["advert"]), host_id=ticket["host_id"])
        writer = self._writers.get(offer.advert)
        if writer is None:
            region = _region(case, self._pool.view, self._pool.fd)
            [sender] = open_senders(region, choice=self._transport)
            writer = self._writers[offer.advert] = sender.connect(offer)
        self._orders[case["name"]] = writer, _orders(case, bytes.fromhex(ticket["grant"]))

    def run(self, name: str) -> float:
        """See end_host.End."""
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
        """Wait for a write, and tell the receiver what to find."""
        result = write.result()
        if self._checksums:
            self._reports.sendall(_REPORT.pack(seq, result.checksum))


class Receiver:
    """A decode worker's side: one receiving end for each geometry, one grant for each case."""

    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        self._transport: str = options["transport"]
        self._checksums: bool = options["checksums"]
        if not self._checksums:
            _compute_no_checksums()
        self._pool = pools["target"]
        self._ends: dict[int, tuple[KVRegion, KVReceiver]] = {}
        self._chunks: dict[str, tuple[KVRegion, list[tuple[CellRange, list[BlockId]]]]] = {}
        self._server = socket.create_server((_HOST, 0))
        self.about = {"transport": self._transport, "checksums": self._checksums}

    def open(self) -> int:
        """See end_host.End."""
        port: int = self._server.getsockname()[1]
        return port

    def connect(self, address: Any) -> None:
        """See end_host.End."""
        self._reports, _ = self._server.accept()

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> dict[str, str]:
        """See end_host.End; the ticket holds the offer and the grant."""
        if case["num_layers"] not in self._ends:
            region = _region(case, self._pool.view, self._pool.fd)
            [end] = open_receivers(region, choice=self._transport)
            self._ends[case["num_layers"]] = region, end
        region, end = self._ends[case["num_layers"]]
        slots = [BlockId(block) for block in case["targets"]]
        grant = end.open_grant(_key(case), slots)
        chunks = [(cells, slots[cells.first_block : cells.first_block + cells.num_blocks]) for cells in _chunks(case)]
        self._chunks[case["name"]] = region, chunks
        offer = end.offer()
        return {"advert": offer.advert.hex(), "host_id": offer.host_id, "grant": grant.hex()}

    def run(self, name: str) -> None:
        """See end_host.End."""
        if not self._checksums:
            return
        region, chunks = self._chunks[name]
        intact = True
        for _ in chunks:
            seq, checksum = _REPORT.unpack(self._reports.recv(_REPORT.size, socket.MSG_WAITALL))
            intact &= checksum_of(region.views(*chunks[seq])) == checksum
        self._reports.sendall(_INTACT if intact else _DAMAGED)


def describing(case: Mapping[str, Any], transport: str, source: memoryview, target: memoryview) -> Callable[[], int]:
    """All that both sides do in Python for one hand-off of `case` but moving it; the result is the number of ranges.

    Chunks and their orders, each chunk's ranges in both pools, and the header or the pairing that its transport needs.
    """
    here, there = _region(case, source, None), _region(case, target, None)
    slots = [BlockId(block) for block in case["targets"]]
    grant = bytes(TOKEN_BYTES)

    def over_tcp() -> int:
        total = 0
        for order in _orders(case, grant):
            cells = order.cells
            cursor = tcp_wire.Cursor(here.views(cells, order.sources))
            header = tcp_wire.pack_header(
                tcp_wire.Header(
                    kind=tcp_wire.Kind.WRITE,
                    write_id=1,
                    token=order.grant,
                    cells=cells,
                    payload_bytes=cursor.remaining,
                )
            )
            received = tcp_wire.unpack_header(header).cells
            views = there.views(received, slots[received.first_block : received.first_block + received.num_blocks])
            total += len(tcp_wire.Cursor(views).views())
        return total

    def over_shm() -> int:
        total = 0
        for order in _orders(case, grant):
            cells = order.cells
            chosen = slots[cells.first_block : cells.first_block + cells.num_blocks]
            reads = copying._pieces(list(here.spans(cells, order.sources)))
            total += len(copying._pair(reads, list(there.spans(cells, chosen))))
        return total

    return {"tcp": over_tcp, "shm": over_shm}[transport]


def _orders(case: Mapping[str, Any], grant: bytes) -> list[WriteOrder]:
    sources = [BlockId(block) for block in case["sources"]]
    key = _key(case)
    return [
        WriteOrder(
            key=key,
            grant=grant,
            cells=cells,
            sources=tuple(sources[cells.first_block : cells.first_block + cells.num_blocks]),
        )
        for cells in _chunks(case)
    ]


def _chunks(case: Mapping[str, Any]) -> list[CellRange]:
    layout = _layout(case)
    planner = ChunkPlanner(layout=layout, chunk_blocks=blocks_per_chunk(layout, _SETTINGS.chunk_bytes))
    return planner.plan(len(case["sources"]))


def _layout(case: Mapping[str, Any]) -> KVLayout:
    """One KV head of float32 keys and values that takes as many bytes as the model's heads do."""
    return KVLayout(
        model_fingerprint="bench",
        dtype="float32",
        num_layers=case["num_layers"],
        num_kv_heads=1,
        head_dim=case["layer_block_bytes"] // 8,
        block_size=1,
    )


def _region(case: Mapping[str, Any], pool: memoryview, fd: int | None) -> KVRegion:
    size = case["num_layers"] * case["pool_blocks"] * case["layer_block_bytes"]
    return KVRegion.of(pool[:size], _layout(case), fd=fd)


def _key(case: Mapping[str, Any]) -> TransferKey:
    return TransferKey(transfer_id=TransferId(case["name"]), attempt=1)


def _compute_no_checksums() -> None:
    """In this process, for good."""
    for module in (copying, tcp_sender):
        setattr(module, "crc32", _no_checksum)  # noqa: B010 - not an attribute that the type checker may rebind


def _no_checksum(_data: Any, value: int = 0) -> int:
    return value
