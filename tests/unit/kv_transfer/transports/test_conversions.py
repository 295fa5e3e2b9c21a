"""KV that changes its dtype on its way over `tcp`: what lands is to the bit what
kv_transfer/layout/dtype_conversion.py makes of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.layout.chunk_plan import ChunkPlanner, HandoffSize
from kv_transfer.layout.dtype_conversion import Converter
from kv_transfer.layout.pairing import Pairing
from kv_transfer.layout.placed_cells import PlacedCells
from kv_transfer.memory import departure, numpy_copy
from kv_transfer.memory.departure import Departure, split_for_conversion
from kv_transfer.memory.landing import Landing
from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.interface import WriteOrder
from kv_transfer.transports.tcp.receiver import TcpReceiver
from kv_transfer.transports.tcp.sender import TcpSender, TcpWriter
from kv_transfer.transports.tcp.settings import TcpSettings
from tandem.errors import TransferError
from tandem.values.ids import BlockId, TransferId
from tandem.values.kv_layout import KVLayout

KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
WAIT_S = 20.0
NUM_BLOCKS = 6
POOL_BLOCKS = 9
SOURCES = tuple(BlockId(b) for b in (7, 2, 3, 4, 0, 8))
TARGETS = tuple(BlockId(b) for b in (1, 0, 8, 5, 6, 3))
WAYS = [
    ("bfloat16", "int8", "int8"),
    ("float32", "int8", "int8"),
    ("bfloat16", "int8", "bfloat16"),
    ("bfloat16", "fp8_e4m3", "bfloat16"),
    ("bfloat16", "bfloat16", "int8"),
    ("bfloat16", "bfloat16", "fp8_e4m3"),
    ("bfloat16", "int4", "int4"),
    ("bfloat16", "bfloat16", "int4"),
]


def layout(dtype: str, tp: int = 1) -> KVLayout:
    return KVLayout(
        model_fingerprint="m", dtype=dtype, num_layers=4, num_kv_heads=4, head_dim=16, block_size=8, tp_size=tp
    )


def region(kv: KVLayout, seed: int) -> KVRegion:
    data = memoryview(bytearray(POOL_BLOCKS * kv.worker_block_bytes))
    made = KVRegion.from_buffer(data, kv)
    if seed:
        values = np.random.default_rng(seed).normal(size=data.nbytes // 4).astype(np.float32)
        if kv.dtype == "bfloat16":
            values = np.repeat((values.view(np.uint32) >> 16).astype(np.uint16), 2)
        made.array()[:] = values.view(np.uint8)
    return made


@dataclass
class Ends:
    pairing: Pairing
    source: KVRegion
    target: KVRegion
    receiver: TcpReceiver
    writer: TcpWriter

    @property
    def read(self) -> PlacedCells:
        return self.pairing.at_source(0, 0, SOURCES, POOL_BLOCKS)

    def landing(self) -> Landing:
        return Landing(self.target, self.pairing.at_destination(0, TARGETS, POOL_BLOCKS), self.pairing)

    def order(self, token: bytes, cells: CellRange) -> WriteOrder:
        return WriteOrder(key=KEY, grant=token, cells=cells, source=self.read)

    def expected(self, cells: CellRange) -> np.ndarray:
        """The target's bytes once these cells are there."""
        payload = self.read.payload(cells)
        at_source, on_wire, at_rest = (
            np.empty(payload.num_bytes(dtype), np.uint8)
            for dtype in (self.pairing.source.dtype, self.pairing.wire_dtype, self.pairing.destination.dtype)
        )
        numpy_copy.gather(self.read.reads(cells), self.source.array(), at_source)
        Converter(self.pairing.source.dtype, self.pairing.wire_dtype).convert(payload, at_source, on_wire)
        Converter(self.pairing.wire_dtype, self.pairing.destination.dtype).convert(payload, on_wire, at_rest)
        pool = np.zeros_like(self.target.array())
        placed = self.pairing.at_destination(0, TARGETS, POOL_BLOCKS)
        numpy_copy.scatter(placed.writes(cells), at_rest, pool)
        numpy_copy.copy(placed.fan_out(cells), pool, pool)
        return pool


@pytest.fixture(params=WAYS, ids=lambda way: " to ".join(way))
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    # Several parts in a chunk, cut within a layer.
    monkeypatch.setattr(departure, "MAX_CONVERTED_BYTES", 1000)
    here, wire, there = request.param
    pairing = Pairing.from_layouts(layout(here, tp=2), layout(there), wire_dtype=wire)
    source, target = region(pairing.source, 1), region(pairing.destination, 0)
    receiver = TcpReceiver()
    writer = TcpSender(source, settings=TcpSettings(streams=2)).connect(receiver.offer(), pairing)
    yield Ends(pairing, source, target, receiver, writer)
    writer.close()
    receiver.close()


def cells(first_layer: int = 0, num_layers: int = 4, first_unit: int = 0, num_units: int = NUM_BLOCKS) -> CellRange:
    return CellRange(
        first_layer=first_layer,
        num_layers=num_layers,
        first_unit=first_unit,
        num_units=num_units,
        first_head=0,
        num_heads=4,
    )


def test_conversion_chunks_land_as_converted(ends: Ends) -> None:
    token = ends.receiver.open_grant(KEY, ends.landing())
    shape = HandoffSize(num_layers=4, num_heads=4, unit_layer_bytes=ends.pairing.unit_layer_bytes)
    chunks = ChunkPlanner(shape, chunk_bytes=3 * ends.pairing.unit_layer_bytes).plan(NUM_BLOCKS)
    writes = [(chunk, ends.writer.write(ends.order(token, chunk))) for chunk in chunks]
    assert len(writes) > 4
    for chunk, future in writes:
        assert ends.receiver.verify(KEY, chunk, future.result(WAIT_S).checksum)
    assert np.array_equal(ends.target.array(), ends.expected(cells()))


def test_conversion_damaged_payload_is_discarded_and_resent(ends: Ends) -> None:
    token = ends.receiver.open_grant(KEY, ends.landing())
    checksum = ends.writer.write(ends.order(token, cells())).result(WAIT_S).checksum
    converts_here = ends.pairing.wire_dtype != ends.pairing.destination.dtype
    assert not ends.receiver.verify(KEY, cells(), checksum ^ 1)
    assert not (converts_here and ends.target.array().any())
    assert ends.writer.write(ends.order(token, cells())).result(WAIT_S).checksum == checksum
    assert ends.receiver.verify(KEY, cells(), checksum)
    assert np.array_equal(ends.target.array(), ends.expected(cells()))


def test_conversion_after_revocation_nothing_staged_is_placed(ends: Ends) -> None:
    token = ends.receiver.open_grant(KEY, ends.landing())
    checksum = ends.writer.write(ends.order(token, cells())).result(WAIT_S).checksum
    assert ends.receiver.revoke(KEY)
    ends.target.array()[:] = 0
    assert not ends.receiver.verify(KEY, cells(), checksum)
    with pytest.raises(TransferError):
        ends.writer.write(ends.order(token, cells())).result(WAIT_S)
    assert not ends.target.array().any()


def test_conversion_staging_stays_within_reservation(ends: Ends) -> None:
    landing = ends.landing()
    token = ends.receiver.open_grant(KEY, landing)
    ends.writer.write(ends.order(token, cells())).result(WAIT_S)
    other = cells(num_layers=1)
    if ends.pairing.wire_dtype == ends.pairing.destination.dtype:
        assert not landing._staged
        ends.writer.write(ends.order(token, other)).result(WAIT_S)
        return
    with pytest.raises(TransferError, match="refused"):
        ends.writer.write(ends.order(token, other)).result(WAIT_S)
    assert not ends.receiver.verify(KEY, cells(), -1)
    ends.writer.write(ends.order(token, cells())).result(WAIT_S)
    assert sum(staged.nbytes for staged in landing._staged.values()) == landing.num_bytes(cells())


def test_conversion_cancelled_leaves_connection_in_step(ends: Ends) -> None:
    token = ends.receiver.open_grant(KEY, ends.landing())
    for _ in range(10):
        future = ends.writer.write(ends.order(token, cells()))
        ends.writer.cancel(KEY)
        future.exception(WAIT_S)
    assert ends.receiver.revoke(KEY)
    other = replace(KEY, attempt=2)
    order = ends.order(ends.receiver.open_grant(other, ends.landing()), cells())
    checksum = ends.writer.write(replace(order, key=other)).result(WAIT_S).checksum
    assert ends.receiver.verify(other, cells(), checksum)
    assert np.array_equal(ends.target.array(), ends.expected(cells()))


def test_conversion_sources_outside_pool_are_refused_before_sending(ends: Ends) -> None:
    token = ends.receiver.open_grant(KEY, ends.landing())
    nowhere = ends.pairing.at_source(0, 0, tuple(BlockId(b + POOL_BLOCKS) for b in SOURCES), POOL_BLOCKS)
    with pytest.raises(TransferError, match="outside"):
        ends.writer.write(WriteOrder(key=KEY, grant=token, cells=cells(), source=nowhere)).result(WAIT_S)
    assert not ends.writer.closed


@pytest.mark.parametrize("limit", [1, 200, 1000, 5000, 1 << 20])
@pytest.mark.parametrize("tps", [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_conversion_slabs_form_the_payload(monkeypatch: pytest.MonkeyPatch, tps: tuple[int, int], limit: int) -> None:
    monkeypatch.setattr(departure, "MAX_CONVERTED_BYTES", limit)
    pairing = Pairing.from_layouts(layout("bfloat16", tps[0]), layout("int8", tps[1]), wire_dtype="int8")
    leaving = Departure(region(pairing.source, 3), pairing)
    source = pairing.at_source(0, 0, SOURCES, POOL_BLOCKS)
    for whole in (cells(), cells(first_layer=1, num_layers=2, first_unit=2, num_units=3), cells(3, 1, 5, 1)):
        payload = source.payload(whole)
        cut = list(split_for_conversion(whole, payload, payload.num_bytes("int8")))
        parts = [leaving.convert(source, part).tobytes() for part in cut]
        assert b"".join(parts) == leaving.convert(source, whole).tobytes()
        least = pairing.unit_layer_bytes * max(count for _, count in payload.head_ranges) // 4
        assert max(map(len, parts)) <= max(limit, least)
