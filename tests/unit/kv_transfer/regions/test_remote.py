"""Rank 0's view of a rank's region, against a rank that answers as the test says, and against the real server."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey, TransportOffer
from kv_transfer.protocol.wire import MAX_TRANSPORTS
from kv_transfer.regions import remote, wire
from kv_transfer.regions.interface import LaneGrant, LaneRequest, OpenedGrant
from kv_transfer.regions.remote import RemoteRegion, RemoteWriter, open_region
from kv_transfer.regions.server import OwnNode, RegionServer
from kv_transfer.regions.wire import RegionEnds
from kv_transfer.transports.interface import WriteOrder, WriteResult
from tandem.errors import ConfigError, TransferError
from tandem.rpc.mutual_tls import TlsFiles
from tandem.v1 import kv_region_pb2 as pb
from tandem.values.ids import BlockId, TransferId
from tests.support.kv_transfer.plain_worker import layout

KV = replace(layout(tp=2, heads=4, layers=3), num_regions=2)
KEY = TransferKey(transfer_id=TransferId("t"), attempt=1, lane=1)
PAIRING = Pairing.from_layouts(KV, KV, wire_dtype="bfloat16", lane=1)
CELLS = CellRange(first_layer=0, num_layers=3, first_unit=0, num_units=2, first_head=2, num_heads=2)
BLOCKS = (BlockId(3), BlockId(1))
TCP = RegionEnds(transport="tcp", host="127.0.0.1")
WAIT_S = 20.0


def order() -> WriteOrder:
    return WriteOrder(key=KEY, grant=b"g", cells=CELLS, source=PAIRING.at_source(0, 0, BLOCKS, 4))


class Scripted:
    """The rank's end of the socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def next(self) -> pb.RegionOrder:
        async with asyncio.timeout(WAIT_S):
            found = await wire.read(self.reader, pb.RegionOrder)
        assert found is not None
        return found

    def report(self, **report) -> None:
        self.writer.write(wire.pack(pb.RegionReport(**report)))


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[RemoteRegion, Scripted]]:
    near, far = socket.socketpair()
    rank = Scripted(*await asyncio.open_connection(sock=far))
    region = RemoteRegion(*await asyncio.open_connection(sock=near), "rank 1", asyncio.ensure_future)
    try:
        yield region, rank
    finally:
        rank.writer.close()
        await region.aclose()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0.005)


async def test_write_ends_with_its_report() -> None:
    async with scripted() as (region, rank):
        writer = RemoteWriter(region, 7)
        future = writer.write(order())
        said = await rank.next()
        assert (said.write.connection, tuple(said.write.blocks)) == (7, BLOCKS)
        assert wire.cells_from_pb(said.write.cells) == CELLS
        assert wire.key_from_pb(said.write.key) == KEY
        rank.report(number=said.number, written=pb.CellsWritten(checksum=9, num_bytes=8, seconds=0.5))
        assert await asyncio.wrap_future(future) == WriteResult(checksum=9, num_bytes=8, seconds=0.5)
        assert not writer.closed


async def test_cancel_is_proof_only_while_no_write_is_pending() -> None:
    async with scripted() as (region, rank):
        writer = RemoteWriter(region, 7)
        assert writer.cancel(KEY), "nothing was written"
        future = writer.write(order())
        assert not writer.cancel(KEY)
        assert writer.cancel(replace(KEY, attempt=2)), "of another attempt"
        kinds = [(await rank.next()).WhichOneof("kind") for _ in range(4)]
        assert kinds == ["cancel", "write", "cancel", "cancel"]
        rank.report(number=1, failed="write cancelled")
        with pytest.raises(TransferError, match="write cancelled"):
            await asyncio.wrap_future(future)
        assert writer.cancel(KEY)
        assert not writer.closed


async def test_broken_connection_closes_its_writer() -> None:
    async with scripted() as (region, rank):
        writer, other = RemoteWriter(region, 7), RemoteWriter(region, 8)
        future = writer.write(order())
        rank.report(number=(await rank.next()).number, failed="peer is gone", connection_broken=True)
        with pytest.raises(TransferError, match="peer is gone"):
            await asyncio.wrap_future(future)
        assert (writer.closed, other.closed) == (True, False)


async def test_end_of_the_process_ends_everything() -> None:
    async with scripted() as (region, rank):
        quiet: list[TransferKey] = []
        region.listen_quiet(quiet.append)
        writer = RemoteWriter(region, 7)
        write: Future[WriteResult] = writer.write(order())
        opened: list[OpenedGrant] = []
        grant = LaneGrant(key=KEY, transport="tcp", pairing=PAIRING, held_tokens=0, blocks=BLOCKS)
        region.open_grant(grant, opened.append)
        verifying = asyncio.ensure_future(region.verify("tcp", KEY, CELLS, 1))
        assert not region.revoke("tcp", KEY)
        await settle()
        rank.writer.close()
        with pytest.raises(TransferError, match="rank 1 has ended"):
            await asyncio.wrap_future(write)
        assert not await verifying
        await settle()
        assert quiet == [KEY], "its memory is gone: nothing lands there"
        assert opened == []
        assert writer.closed
        assert region.revoke("tcp", KEY), "at once from now on"
        with pytest.raises(TransferError, match="rank 1 has ended"):
            await region.connect(LaneRequest(lane=1, destination=KV, offers=(), wire_dtype=""))
        with pytest.raises(TransferError, match="rank 1 has ended"):
            await asyncio.wrap_future(writer.write(order()))


def test_orders_between_the_end_of_a_connection_and_its_notice_are_answered_by_the_notice() -> None:
    """A reader hears a turn of the loop later than the transport, and uvloop's transports raise from then on."""

    async def run() -> None:
        near, far = socket.socketpair()
        region = RemoteRegion(*await asyncio.open_connection(sock=near), "rank 1", asyncio.ensure_future)
        quiet: list[TransferKey] = []
        region.listen_quiet(quiet.append)
        protocol = region._writer.transport.get_protocol()
        lost, offers = protocol.connection_lost, []

        def order_more() -> None:
            assert not region.ended
            assert not region.revoke("tcp", KEY)
            offers.append(asyncio.ensure_future(region.offers()))

        def lost_amid_orders(error: Exception | None) -> None:
            asyncio.get_running_loop().call_soon(order_more)  # before the reader's turn
            lost(error)

        protocol.connection_lost = lost_amid_orders
        region.send(pb.RegionOrder(offer=pb.OfferEnds()))
        await settle()
        far.close()  # with an order that it never read, as a process that is killed
        await settle()
        assert await offers[0] == ()
        assert quiet == [KEY]
        await region.aclose()

    uvloop.run(run())


async def test_proof_that_nobody_waits_for_is_not_reported() -> None:
    async with scripted() as (region, rank):
        quiet: list[TransferKey] = []
        region.listen_quiet(quiet.append)
        region.revoke("tcp", KEY)
        for _ in range(2):
            rank.report(quiet=wire.key_to_pb(KEY))
        await settle()
        assert quiet == [KEY]


async def test_connection_that_nobody_wants_any_more_is_closed() -> None:
    async with scripted() as (region, rank):
        connecting = asyncio.ensure_future(
            region.connect(LaneRequest(lane=1, destination=KV, offers=(), wire_dtype=""))
        )
        number = (await rank.next()).number
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        rank.report(number=number, connected=pb.LaneConnected(transport="tcp", wire_dtype="bfloat16"))
        assert (await rank.next()).close.connection == number


# The server


@asynccontextmanager
async def served(end_process: Callable[[], object] = pytest.fail) -> AsyncIterator[RemoteRegion]:
    near, far = socket.socketpair()
    region = KVRegion.from_buffer(memoryview(bytearray(4 * KV.region_block_bytes)), KV)
    thread = RegionServer(region, far, end_process).start()
    served_region = await open_region(near, TCP, "rank 1", asyncio.ensure_future)
    try:
        yield served_region
    finally:
        await served_region.aclose()
        await asyncio.to_thread(thread.join, WAIT_S)
        assert not thread.is_alive()


async def test_server_opens_and_offers_its_ends() -> None:
    async with served() as region:
        assert region.transports == ("tcp",)
        [offer] = await region.offers()
        assert offer.name == "tcp"


async def test_server_proves_revocations_of_what_it_never_granted() -> None:
    async with served() as region:
        quiet = asyncio.get_running_loop().create_future()
        region.listen_quiet(quiet.set_result)
        assert not region.revoke("tcp", KEY)
        async with asyncio.timeout(WAIT_S):
            assert await quiet == KEY


async def test_server_refuses_writes_of_closed_connections() -> None:
    async with served() as region:
        writer = RemoteWriter(region, 77)
        with pytest.raises(TransferError, match="connection closed"):
            await asyncio.wrap_future(writer.write(order()))
        assert writer.closed


async def test_server_names_why_it_cannot_connect() -> None:
    async with served() as region:
        with pytest.raises(TransferError, match="no KV transport in common"):
            await region.connect(LaneRequest(lane=1, destination=KV, offers=(), wire_dtype=""))


async def test_server_refuses_what_a_peer_offers_beyond_bounds_and_serves_on() -> None:
    async with served() as region:
        offers = tuple(TransportOffer(name="tcp", advert=b"", host_id="") for _ in range(MAX_TRANSPORTS + 1))
        with pytest.raises(TransferError, match="transports"):
            await region.connect(LaneRequest(lane=1, destination=KV, offers=offers, wire_dtype=""))
        assert len(await region.offers()) == 1


async def test_region_that_does_not_open_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_OPEN_S", 0.05)
    near, far = socket.socketpair()
    with pytest.raises(ConfigError, match="rank 1: has not opened"):
        await open_region(near, TCP, "rank 1", asyncio.ensure_future)
    far.close()


async def test_server_grants_once_and_ends_its_process_on_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    """A second grant of one key is rank 0's mistake: no answer to it would be right. The process ends before the
    socket, whose end is the proof that nothing lands any more.
    """
    near_has_ended: list[bool] = []
    async with served(lambda: near_has_ended.append(region.ended)) as region:
        opened: list[OpenedGrant] = []
        grant = LaneGrant(key=KEY, transport="tcp", pairing=PAIRING, held_tokens=0, blocks=BLOCKS)
        region.open_grant(grant, opened.append)
        await region.offers()
        assert len(opened) == 1
        region.open_grant(grant, opened.append)
        async with asyncio.timeout(WAIT_S):
            while not region.ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(opened) == 1
    assert near_has_ended == [False]
    assert "because of an internal error" in caplog.text


async def test_report_that_fails_in_rank_0_proves_nothing_and_ends_the_worker() -> None:
    """Not even that a revoked grant is quiet: the rank lives, and its peers may still write."""
    near, far = socket.socketpair()
    rank = Scripted(*await asyncio.open_connection(sock=far))
    quiet: list[TransferKey] = []

    def fail(_report: pb.RegionReport | None) -> None:
        raise ArithmeticError

    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    region = RemoteRegion(
        *await asyncio.open_connection(sock=near), "rank 1", lambda work: tasks.append(loop.create_task(work))
    )
    region.listen_quiet(quiet.append)
    region.order(pb.RegionOrder(offer=pb.OfferEnds()), fail)
    assert not region.revoke("tcp", KEY)
    rank.report(number=(await rank.next()).number, offers={})
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(ArithmeticError):
            await tasks[0]  # of the worker's group
        await region.aclose()
    assert not quiet
    rank.writer.close()


async def test_region_of_a_frozen_rank_closes_with_orders_that_it_never_read() -> None:
    async with scripted() as (region, rank):
        rank.writer.transport.pause_reading()
        blocks = tuple(map(BlockId, range(100_000)))
        for _ in range(20):
            region.send(pb.RegionOrder(write=pb.WriteCells(connection=1, blocks=blocks)))
        quiet: list[TransferKey] = []
        region.listen_quiet(quiet.append)
        region.revoke("tcp", KEY)
        async with asyncio.timeout(WAIT_S):
            await region.aclose()
        assert not quiet, "this end hung up, which says nothing of the other"


async def test_open_names_the_rank_that_has_ended() -> None:
    near, far = socket.socketpair()
    far.close()
    with pytest.raises(ConfigError, match="rank 1 has ended"):
        await open_region(near, TCP, "rank 1", asyncio.ensure_future)


async def test_end_of_a_connection_to_another_node_proves_nothing_and_ends_the_worker() -> None:
    """The rank may only be cut off, still write and be written to: nobody must be told otherwise."""
    near, far = socket.socketpair()
    rank = Scripted(*await asyncio.open_connection(sock=far))
    cut, quiet = asyncio.Event(), []
    region = RemoteRegion(*await asyncio.open_connection(sock=near), "rank 1", asyncio.ensure_future, on_cut=cut.set)
    region.listen_quiet(quiet.append)
    writer = RemoteWriter(region, 1)
    under_way = writer.write(order())
    await rank.next()
    assert not region.revoke("tcp", KEY)
    verifying = asyncio.ensure_future(region.verify("tcp", KEY, CELLS, 1))
    await settle()
    assert not cut.is_set()
    rank.writer.close()
    async with asyncio.timeout(WAIT_S):
        await cut.wait()
        assert not await verifying, "who asks is answered"
        with pytest.raises(TransferError, match="the connection to rank 1 has ended"):
            await region.connect(LaneRequest(lane=1, destination=KV, offers=(), wire_dtype=""))
    late = writer.write(order())
    assert not under_way.done()
    assert not late.done()
    assert not writer.cancel(KEY)
    assert not region.revoke("tcp", KEY)
    assert not quiet
    await region.aclose()


async def test_own_end_of_a_connection_to_another_node_ends_no_worker() -> None:
    near, far = socket.socketpair()
    with far:
        cut: list[bool] = []
        region = RemoteRegion(
            *await asyncio.open_connection(sock=near),
            "rank 1",
            asyncio.ensure_future,
            on_cut=lambda: cut.append(True),
        )
        await region.aclose()
        assert not cut


async def test_message_of_a_rank_has_a_bound() -> None:
    async with scripted() as (region, rank):
        rank.writer.write((wire.MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
        with pytest.raises(TransferError, match="at most 67108864 are read"):
            await wire.read(region._reader, pb.RegionReport)


async def test_writer_closes_from_any_thread_and_ends_its_writes() -> None:
    async with scripted() as (region, rank):
        writer = RemoteWriter(region, 7)
        under_way = writer.write(order())
        written = await rank.next()
        await asyncio.to_thread(writer.close)
        closing = await rank.next()
        assert closing.close.connection == 7
        rank.report(number=written.number, failed="connection closed", connection_broken=True)
        with pytest.raises(TransferError, match="connection closed"):
            await asyncio.wait_for(asyncio.wrap_future(under_way), WAIT_S)
        assert writer.closed
        assert writer.cancel(KEY), "nothing is under way any more"


def test_writer_closes_after_its_loop_has_ended() -> None:
    async def made() -> RemoteWriter:
        async with scripted() as (region, _rank):
            return RemoteWriter(region, 1)

    asyncio.run(made()).close()


def test_rank_of_another_node_receives_at_its_own_address_with_its_own_certificate() -> None:
    def files(name: str) -> TlsFiles:
        return TlsFiles(cert=Path(name), key=Path(name), ca=Path(name), setting="transfer.tls")

    here = OwnNode(host="10.0.0.2", tls=files("own"))
    encrypted = replace(TCP, tls=files("rank-0"))
    assert here.applied_to(encrypted) == replace(encrypted, host="10.0.0.2", tls=files("own"))
    assert here.applied_to(TCP) == replace(TCP, host="10.0.0.2"), "rank 0 encrypts nothing"
    assert replace(here, tls=None).applied_to(encrypted) == replace(encrypted, host="10.0.0.2")
