"""Pins survive the wire."""

import pytest

from tandem.protocol.pin_wire import (
    order_from_pb,
    order_to_pb,
    result_from_pb,
    result_to_pb,
    totals_from_pb,
    totals_to_pb,
)
from tandem.v1 import pins_pb2 as pb
from tandem.values.ids import BlockHash
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinResult, PinTotals

KEY = PinKey("tenant", "name")


def test_pin_order_round_trips() -> None:
    order = PinOrder(key=KEY, last_block=BlockHash(b"\0\1\2"), ttl_s=0.25)
    assert order_from_pb(order_to_pb(order)) == order


@pytest.mark.parametrize("outcome", PinOutcome)
def test_pin_result_round_trips(outcome: PinOutcome) -> None:
    result = PinResult(key=KEY, outcome=outcome, num_tokens=48)
    assert result_from_pb(result_to_pb(result)) == result


def test_pin_result_unknown_outcome_is_gave_way() -> None:
    assert result_from_pb(pb.PinResult(tenant="t", name="n")).outcome is PinOutcome.GAVE_WAY


def test_pin_totals_round_trip() -> None:
    totals = PinTotals(*range(1, 9))
    assert totals_from_pb(totals_to_pb(totals)) == totals
    assert totals_from_pb(pb.PinReport()) == PinTotals()
