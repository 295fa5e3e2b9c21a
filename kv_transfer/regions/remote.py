"""A region whose memory only another rank's process has: rank 0 orders, and that process does (see server.py).

On rank 0's own node the end of the socket is the end of the process, and with it of the memory: its writes fail, and
nothing lands there any more. Rank 0 does not outlive it by long, for one dead rank ends the worker. Nothing else proves
anything: what fails in rank 0 while it takes a report ends the worker, too. A rank on another node may be cut off and
still write, and be written to, so that the end of its connection proves nothing: its writes stay under way, and what
was revoked is not quiet, until rank 0 has ended, which it does at once (`on_cut`).
"""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.protocol.wire import decode_offers, encode_offers
from kv_transfer.regions import wire
from kv_transfer.regions.interface import ConnectedLane, LaneGrant, LaneRequest, OpenedGrant
from kv_transfer.regions.wire import RegionEnds
from kv_transfer.transports.interface import PeerWriter, WriteOrder, WriteResult
from tandem.errors import ConfigError, TransferError
from tandem.protocol.wire import layout_to_pb
from tandem.v1 import kv_region_pb2 as pb

OnReport = Callable[[pb.RegionReport | None], None]
"""Called with the answer to an order; None when the process has ended, or the connection to it."""
Spawn = Callable[[Coroutine[Any, Any, None]], object]
"""Starts a task whose failure ends the worker."""
_OPEN_S = 60.0
"""Time for a rank to open its ends."""


class RemoteRegion:
    """Implements ReceivingRegion and SendingRegion by a rank's process; made by `open_region`, used on one event
    loop."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        name: str,
        spawn: Spawn,
        *,
        on_cut: Callable[[], object] | None = None,
    ) -> None:
        """`name`: of the rank, for messages. `on_cut`: for a rank on another node, called when the connection to it has
        ended; must end the worker. None: the end of the connection is the end of the process.
        """
        self.name = name
        self._on_cut = on_cut
        self._reader = reader
        self._writer = writer
        self._transports: tuple[str, ...] = ()
        self._number = 0
        self._waiting: dict[int, OnReport] = {}
        self._on_quiet: Callable[[TransferKey], None] = lambda _key: None
        self._revoked: Counter[TransferKey] = Counter()
        """Revocations that are not proven yet."""
        self.ended = False
        self._is_closing = False
        self._has_read = asyncio.Event()
        spawn(self._read())

    async def open_ends(self, ends: RegionEnds) -> None:
        """Open the region's ends. Raises ConfigError for a forced transport that cannot work there."""
        try:
            async with asyncio.timeout(_OPEN_S):
                report = await self.request(pb.RegionOrder(open=wire.ends_to_pb(ends)))
        except TimeoutError:
            raise ConfigError(f"{self.name}: has not opened its KV transports within {_OPEN_S:g} s") from None
        if report is None or report.HasField("failed"):
            raise ConfigError(self.gone if report is None else f"{self.name}: {report.failed}")
        self._transports = tuple(report.opened.transports)

    @property
    def end_is_proof(self) -> bool:
        """Whether nothing is written any more, by the rank or to it, once the connection has ended."""
        return self._on_cut is None

    @property
    def gone(self) -> str:
        """What has happened once the connection has ended, for messages."""
        return f"{self.name} has ended" if self.end_is_proof else f"the connection to {self.name} has ended"

    async def aclose(self) -> None:
        """End the connection; the other process closes its ends then. Orders that it has not read are lost."""
        self._is_closing = True
        self._writer.transport.abort()  # what is queued for a frozen process would never be sent
        await self._has_read.wait()
        with suppress(OSError):
            await self._writer.wait_closed()

    def order(self, order: pb.RegionOrder, on_report: OnReport) -> None:
        """Send an order; `on_report` is called once, at once if the connection has ended."""
        self._number += 1
        order.number = self._number
        if self.ended:
            on_report(None)
            return
        message = wire.pack(order)
        self._waiting[order.number] = on_report
        wire.send(self._writer, message)

    def send(self, order: pb.RegionOrder) -> None:
        """Send an order that is not answered."""
        if not self.ended:
            wire.send(self._writer, wire.pack(order))

    async def request(self, order: pb.RegionOrder) -> pb.RegionReport | None:
        """Send an order and wait for its answer; None when the connection has ended."""
        future: asyncio.Future[pb.RegionReport | None] = asyncio.get_running_loop().create_future()

        def answered(report: pb.RegionReport | None) -> None:
            if not future.done():
                future.set_result(report)

        self.order(order, answered)
        return await future

    async def _read(self) -> None:
        try:
            while (report := await wire.read(self._reader, pb.RegionReport)) is not None:
                if report.HasField("quiet"):
                    self._proven(wire.key_from_pb(report.quiet))
                elif (on_report := self._waiting.pop(report.number, None)) is not None:
                    on_report(report)
            self._end()
            if self._on_cut is not None and not self._is_closing:
                self._on_cut()  # nobody else may have noticed: the rank's other connections can still stand
        finally:
            self._has_read.set()

    def _end(self) -> None:
        """Nobody will answer any more."""
        self.ended = True
        waiting, self._waiting = self._waiting, {}
        for on_report in waiting.values():
            on_report(None)
        if self._is_closing or not self.end_is_proof:
            return  # this end hung up, or the network did, which says nothing of the other
        for key in list(self._revoked):
            self._proven(key)

    def _proven(self, key: TransferKey) -> None:
        if self._revoked.pop(key, 0):
            self._on_quiet(key)

    # ReceivingRegion

    async def offers(self) -> tuple[TransportOffer, ...]:
        report = await self.request(pb.RegionOrder(offer=pb.OfferEnds()))
        return () if report is None else decode_offers(report.offers.transports)

    def open_grant(self, grant: LaneGrant, opened: Callable[[OpenedGrant], None]) -> None:
        order = pb.RegionOrder(
            grant=pb.GrantLane(
                key=wire.key_to_pb(grant.key),
                transport=grant.transport,
                source=layout_to_pb(grant.pairing.source),
                wire_dtype=grant.pairing.wire_dtype,
                held_tokens=grant.held_tokens,
                blocks=grant.blocks,
            )
        )

        def answered(report: pb.RegionReport | None) -> None:
            if report is not None:
                granted = report.granted
                opened(OpenedGrant(token=granted.token, drain_proves_quiet=granted.drain_proves_quiet))

        self.order(order, answered)

    async def verify(self, transport: str, key: TransferKey, cells: CellRange, checksum: int) -> bool:
        report = await self.request(
            pb.RegionOrder(
                verify=pb.VerifyCells(
                    key=wire.key_to_pb(key), transport=transport, cells=wire.cells_to_pb(cells), checksum=checksum
                )
            )
        )
        return report is not None and report.verified.intact

    def revoke(self, transport: str, key: TransferKey) -> bool:
        if self.ended:
            return self.end_is_proof
        self._revoked[key] += 1
        self.send(pb.RegionOrder(revoke=pb.RevokeLane(key=wire.key_to_pb(key), transport=transport)))
        return False

    def listen_quiet(self, on_quiet: Callable[[TransferKey], None]) -> None:
        self._on_quiet = on_quiet

    def close(self) -> None:
        """Nothing: the other process closes its ends when the connection ends, and the memory is its own."""

    # SendingRegion

    @property
    def transports(self) -> tuple[str, ...]:
        return self._transports

    async def connect(self, request: LaneRequest) -> ConnectedLane:
        order = pb.RegionOrder(
            connect=pb.ConnectLane(
                lane=request.lane,
                destination=layout_to_pb(request.destination),
                offers=encode_offers(request.offers),
                wire_dtype=request.wire_dtype,
            )
        )
        answer = asyncio.ensure_future(self.request(order))
        try:
            report = await asyncio.shield(answer)
        except asyncio.CancelledError:
            answer.add_done_callback(self._close_unwanted)
            raise
        if report is None:
            raise TransferError(self.gone)
        if report.HasField("failed"):
            raise TransferError(report.failed)
        connected = report.connected
        writer: PeerWriter = RemoteWriter(self, report.number)
        return ConnectedLane(transport=connected.transport, wire_dtype=connected.wire_dtype, writer=writer)

    def _close_unwanted(self, answer: "asyncio.Future[pb.RegionReport | None]") -> None:
        report = None if answer.cancelled() else answer.result()
        if report is not None and report.HasField("connected"):
            self.send(pb.RegionOrder(close=pb.CloseLane(connection=report.number)))


class RemoteWriter:
    """PeerWriter of a connection that another process has. On the event loop's thread, except `close`."""

    def __init__(self, region: RemoteRegion, connection: int) -> None:
        self._region = region
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._pending: Counter[TransferKey] = Counter()
        self._broken = False

    @property
    def closed(self) -> bool:
        return self._broken or self._region.ended

    def write(self, order: WriteOrder) -> "Future[WriteResult]":
        future: Future[WriteResult] = Future()
        self._pending[order.key] += 1
        at = order.source.at
        self._region.order(
            pb.RegionOrder(
                write=pb.WriteCells(
                    connection=self._connection,
                    key=wire.key_to_pb(order.key),
                    grant=order.grant,
                    cells=wire.cells_to_pb(order.cells),
                    held_tokens=at.held_tokens,
                    first_block=at.first_block,
                    blocks=at.blocks,
                )
            ),
            lambda report: self._written(order.key, future, report),
        )
        return future

    def cancel(self, key: TransferKey) -> bool:
        cancel = pb.CancelLane(connection=self._connection, key=wire.key_to_pb(key))
        self._region.send(pb.RegionOrder(cancel=cancel))
        return key not in self._pending

    def close(self) -> None:
        """Close the connection there, which ends every write; waits for neither. On any thread."""
        close = pb.RegionOrder(close=pb.CloseLane(connection=self._connection))
        with suppress(RuntimeError):  # the loop has ended, and with it the region's connection
            self._loop.call_soon_threadsafe(self._region.send, close)

    def _written(self, key: TransferKey, future: "Future[WriteResult]", report: pb.RegionReport | None) -> None:
        if report is None and not self._region.end_is_proof:
            return  # it may still be writing
        self._pending[key] -= 1
        if not self._pending[key]:
            del self._pending[key]
        with suppress(InvalidStateError):
            if report is None:
                future.set_exception(TransferError(self._region.gone))
            elif report.HasField("written"):
                done = report.written
                result = WriteResult(checksum=done.checksum, num_bytes=done.num_bytes, seconds=done.seconds)
                future.set_result(result)
            else:
                self._broken = self._broken or report.connection_broken
                future.set_exception(TransferError(report.failed))


async def open_region(
    sock: socket.socket, ends: RegionEnds, name: str, spawn: Spawn, *, on_cut: Callable[[], object] | None = None
) -> RemoteRegion:
    """Take over the socket to a rank's RegionServer and open its ends. Raises ConfigError.

    `on_cut`: see RemoteRegion.
    """
    reader, writer = await asyncio.open_connection(sock=sock)
    region = RemoteRegion(reader, writer, name, spawn, on_cut=on_cut)
    try:
        await region.open_ends(ends)
    except BaseException:
        await region.aclose()
        raise
    return region
