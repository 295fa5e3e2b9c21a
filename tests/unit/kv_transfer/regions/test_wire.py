"""Orders and reports between rank 0 and a rank, on their socket."""

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.regions import wire
from kv_transfer.regions.wire import RegionEnds
from tandem.errors import TransferError
from tandem.rpc.mutual_tls import TlsFiles
from tandem.v1 import kv_region_pb2 as pb
from tandem.values.ids import TransferId

FILES = TlsFiles(cert=Path("/a/cert.pem"), key=Path("/a/key.pem"), ca=Path("/a/ca.pem"), setting="transfer.tls")


@pytest.mark.parametrize(
    "ends",
    [
        RegionEnds(transport="auto", host="127.0.0.1"),
        RegionEnds(transport="tcp", host="::1", isolated_network=True, tcp_streams=7, tls=FILES),
    ],
)
def test_region_ends_round_trip(ends: RegionEnds) -> None:
    message = pb.RegionOrder.FromString(pb.RegionOrder(number=1, open=wire.ends_to_pb(ends)).SerializeToString())
    assert wire.ends_from_pb(message.open) == ends


@given(
    numbers=st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6),
    name=st.text(max_size=20),
    attempt=st.integers(0, 2**32 - 1),
    lane=st.integers(0, 1023),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_region_keys_and_cells_round_trip(numbers: list[int], name: str, attempt: int, lane: int) -> None:
    layer, layers, unit, units, head, heads = numbers
    cells = CellRange(
        first_layer=layer, num_layers=layers, first_unit=unit, num_units=units, first_head=head, num_heads=heads
    )
    key = TransferKey(transfer_id=TransferId(name), attempt=attempt, lane=lane)
    assert wire.cells_from_pb(wire.cells_to_pb(cells)) == cells
    assert wire.key_from_pb(wire.key_to_pb(key)) == key


async def test_region_messages_are_read_in_order_until_the_end() -> None:
    reader = asyncio.StreamReader()
    orders = [pb.RegionOrder(number=number, offer=pb.OfferEnds()) for number in (1, 2)]
    data = b"".join(map(wire.pack, orders))
    reader.feed_data(data)
    reader.feed_data(data[:7])
    reader.feed_eof()
    assert [await wire.read(reader, pb.RegionOrder) for _ in range(3)] == [*orders, None]


def test_region_message_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(TransferError, match="a message of"):
        wire.pack(pb.RegionReport(failed="x" * 20))
