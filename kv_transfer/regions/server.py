"""Serves the region of a rank: opens its ends over the rank's own memory, and does with them what rank 0 orders.

It decides nothing and remembers no hand-off beyond the grants and writes of its transports. It runs on a thread with an
event loop of its own, beside the thread that computes the rank's steps, and ends with rank 0's end of the socket.
On its own node rank 0 takes the end of this one for the end of the process: so a bug here must end the process, before
the socket.
"""

import asyncio
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.protocol.wire import WireError, decode_offers, encode_offers
from kv_transfer.regions import wire
from kv_transfer.regions.interface import LaneGrant, LaneRequest, OpenedGrant
from kv_transfer.regions.local import LocalReceivingRegion, LocalSendingRegion
from kv_transfer.regions.wire import RegionEnds
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.interface import PeerWriter, WriteOrder, WriteResult
from kv_transfer.transports.tcp.settings import TcpSettings
from kv_transfer.transports.tcp.tls import TlsIdentity
from tandem.errors import ConfigError, InvariantError, TransferError
from tandem.protocol.wire import layout_from_pb
from tandem.rpc.mutual_tls import TlsFiles
from tandem.v1 import handoff_pb2
from tandem.v1 import kv_region_pb2 as pb
from tandem.values.ids import BlockId

log = logging.getLogger(__name__)
_MAX_PAIRINGS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    receiving: LocalReceivingRegion
    sending: LocalSendingRegion


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNode:
    """What a rank on another node than rank 0 has of its own."""

    host: str
    """Address to receive KV at."""
    tls: TlsFiles | None
    """Its certificate, used where rank 0 says that KV is encrypted."""

    def applied_to(self, ends: RegionEnds) -> RegionEnds:
        """Return what rank 0 ordered, as it is on this node."""
        return replace(ends, host=self.host, tls=ends.tls and (self.tls or ends.tls))


class RegionServer:
    """Serves one region until the other end of `sock`, which it owns, is closed."""

    def __init__(
        self,
        region: KVRegion,
        sock: socket.socket,
        end_process: Callable[[], object],
        *,
        node: OwnNode | None = None,
    ) -> None:
        """`end_process`: called when something has failed that nothing should make fail; `node`: this one, if it is not
        rank 0's.
        """
        self._node = node
        self._region = region
        self._sock = sock
        self._end_process = end_process
        self._ends: _Ends | None = None
        self._connections: dict[int, tuple[PeerWriter, Pairing]] = {}
        self._pairings: OrderedDict[tuple[Any, ...], Pairing] = OrderedDict()
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> threading.Thread:
        """Serve on a thread of its own, which ends with the socket."""
        thread = threading.Thread(target=self.run, name="kv-region", daemon=True)
        thread.start()
        return thread

    def run(self) -> None:
        """Serve to the end."""
        try:
            asyncio.run(self._serve())
        except Exception:
            log.exception("stopped serving this rank's KV region")  # the thread's outermost frame
            self._end_process()
        finally:
            self._sock.close()

    async def _serve(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._sock)
        try:
            while (order := await wire.read(reader, pb.RegionOrder)) is not None:
                self._on_order(order)
        except Exception as error:  # noqa: BLE001 - a bug, of which the process ends
            self._fail(error)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.to_thread(self._close)
            self._writer.close()

    def _close(self) -> None:
        for connection, _pairing in self._connections.values():
            connection.close()
        if self._ends is not None:
            self._ends.receiving.close()

    # Orders, in the order in which they come; what takes long goes on beside the next

    def _on_order(self, order: pb.RegionOrder) -> None:
        number = order.number
        match order.WhichOneof("kind"):
            case "open":
                ends = wire.ends_from_pb(order.open)
                self._spawn(self._open(number, ends if self._node is None else self._node.applied_to(ends)))
            case "offer":
                self._spawn(self._offer(number))
            case "grant":
                self._grant(number, order.grant)
            case "verify":
                self._spawn(self._verify(number, order.verify))
            case "revoke":
                self._revoke(order.revoke)
            case "connect":
                self._spawn(self._connect(number, order.connect))
            case _:
                self._on_connection_order(order)

    def _on_connection_order(self, order: pb.RegionOrder) -> None:
        """Orders about a connection, which may have been closed meanwhile."""
        match order.WhichOneof("kind"):
            case "write":
                self._write(order.number, order.write)
            case "cancel":
                if (found := self._connections.get(order.cancel.connection)) is not None:
                    found[0].cancel(wire.key_from_pb(order.cancel.key))
            case "close":
                if (found := self._connections.pop(order.close.connection, None)) is not None:
                    self._spawn(asyncio.to_thread(found[0].close))
            case kind:
                raise InvariantError(f"rank 0 ordered {kind}")

    @property
    def _opened(self) -> _Ends:
        if self._ends is None:
            raise InvariantError("rank 0 uses ends that are not open")
        return self._ends

    async def _open(self, number: int, ends: RegionEnds) -> None:
        try:
            self._ends = await asyncio.to_thread(open_ends, self._region, ends)
        except (ConfigError, OSError) as error:
            self._report(pb.RegionReport(number=number, failed=str(error)))
            return
        self._ends.receiving.listen_quiet(partial(self._threadsafe, asyncio.get_running_loop(), self._quiet))
        opened = pb.EndsOpened(transports=self._ends.sending.transports)
        self._report(pb.RegionReport(number=number, opened=opened))

    async def _offer(self, number: int) -> None:
        offers = encode_offers(await self._opened.receiving.offers())
        self._report(pb.RegionReport(number=number, offers=handoff_pb2.RegionTransports(transports=offers)))

    async def _connect(self, number: int, order: pb.ConnectLane) -> None:
        try:
            request = LaneRequest(
                lane=order.lane,
                destination=layout_from_pb(order.destination),
                offers=decode_offers(order.offers),
                wire_dtype=order.wire_dtype,
            )
            made = await self._opened.sending.connect(request)
        except (TransferError, WireError) as error:  # all of it is the peer's
            reason = error.message if isinstance(error, TransferError) else str(error)
            self._report(pb.RegionReport(number=number, failed=reason))
            return
        pairing = Pairing.from_layouts(
            self._region.layout, request.destination, wire_dtype=made.wire_dtype, lane=request.lane
        )
        self._connections[number] = (made.writer, pairing)
        connected = pb.LaneConnected(transport=made.transport, wire_dtype=made.wire_dtype)
        self._report(pb.RegionReport(number=number, connected=connected))

    def _write(self, number: int, order: pb.WriteCells) -> None:
        found = self._connections.get(order.connection)
        if found is None:
            self._report(pb.RegionReport(number=number, failed="connection closed", connection_broken=True))
            return
        writer, pairing = found
        blocks = tuple(map(BlockId, order.blocks))
        source = pairing.at_source(order.held_tokens, order.first_block, blocks, self._region.num_blocks)
        future = writer.write(
            WriteOrder(
                key=wire.key_from_pb(order.key),
                grant=order.grant,
                cells=wire.cells_from_pb(order.cells),
                source=source,
            )
        )
        written = partial(self._written, number, writer)
        future.add_done_callback(partial(self._threadsafe, asyncio.get_running_loop(), written))

    def _written(self, number: int, writer: PeerWriter, future: "Future[WriteResult]") -> None:
        error = future.exception()
        if error is None:
            done = future.result()
            written = pb.CellsWritten(checksum=done.checksum, num_bytes=done.num_bytes, seconds=done.seconds)
            self._report(pb.RegionReport(number=number, written=written))
        elif isinstance(error, TransferError):
            report = pb.RegionReport(number=number, failed=error.message, connection_broken=writer.closed)
            self._report(report)
        else:
            self._fail(error)

    def _grant(self, number: int, order: pb.GrantLane) -> None:
        key = wire.key_from_pb(order.key)
        grant = LaneGrant(
            key=key,
            transport=order.transport,
            pairing=self._pairing(order, key.lane),
            held_tokens=order.held_tokens,
            blocks=tuple(map(BlockId, order.blocks)),
        )
        self._opened.receiving.open_grant(grant, partial(self._granted, number))

    def _granted(self, number: int, opened: OpenedGrant) -> None:
        granted = pb.LaneGranted(token=opened.token, drain_proves_quiet=opened.drain_proves_quiet)
        self._report(pb.RegionReport(number=number, granted=granted))

    def _pairing(self, order: pb.GrantLane, lane: int) -> Pairing:
        """Terms of a lane from a peer; kept, because hand-offs from one peer follow each other."""
        source = layout_from_pb(order.source)
        terms = (source, order.wire_dtype, lane)
        pairing = self._pairings.get(terms)
        if pairing is None:
            pairing = Pairing.from_layouts(source, self._region.layout, wire_dtype=order.wire_dtype, lane=lane)
            self._pairings[terms] = pairing
            if len(self._pairings) > _MAX_PAIRINGS:
                self._pairings.popitem(last=False)
        return pairing

    async def _verify(self, number: int, order: pb.VerifyCells) -> None:
        key, cells = wire.key_from_pb(order.key), wire.cells_from_pb(order.cells)
        intact = await self._opened.receiving.verify(order.transport, key, cells, order.checksum)
        self._report(pb.RegionReport(number=number, verified=pb.CellsVerified(intact=intact)))

    def _revoke(self, order: pb.RevokeLane) -> None:
        key = wire.key_from_pb(order.key)
        if self._opened.receiving.revoke(order.transport, key):
            self._quiet(key)

    def _quiet(self, key: TransferKey) -> None:
        self._report(pb.RegionReport(quiet=wire.key_to_pb(key)))

    def _report(self, report: pb.RegionReport) -> None:
        if self._writer is not None:
            wire.send(self._writer, wire.pack(report))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the process: rank 0 must not wait for an answer that will never come."""
        log.error("an order of rank 0 failed because of an internal error", exc_info=error)
        self._end_process()
        if self._writer is not None:
            self._writer.close()

    @staticmethod
    def _threadsafe(loop: asyncio.AbstractEventLoop, call: Callable[[Any], None], value: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(call, value)


def open_ends(region: KVRegion, ends: RegionEnds) -> _Ends:
    """Open both kinds of ends of a region in this process. Raises ConfigError, OSError."""
    tcp = TcpSettings(streams=ends.tcp_streams, tls=None if ends.tls is None else TlsIdentity(ends.tls))
    senders = open_senders(region, choice=ends.transport, isolated_network=ends.isolated_network, tcp=tcp)
    receivers = open_receivers(
        region, choice=ends.transport, host=ends.host, isolated_network=ends.isolated_network, tcp=tcp
    )
    return _Ends(receiving=LocalReceivingRegion(region, receivers), sending=LocalSendingRegion(region, senders))
