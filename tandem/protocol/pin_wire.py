"""Converts pins to and from protobuf, for both ends of a session."""

from tandem.v1 import pins_pb2 as pb
from tandem.values.ids import BlockHash
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinResult, PinTotals

_OUTCOMES = {
    PinOutcome.HELD: pb.PIN_OUTCOME_HELD,
    PinOutcome.NOT_HERE: pb.PIN_OUTCOME_NOT_HERE,
    PinOutcome.NO_ROOM: pb.PIN_OUTCOME_NO_ROOM,
    PinOutcome.GAVE_WAY: pb.PIN_OUTCOME_GAVE_WAY,
}
_OUTCOMES_FROM_PB: dict[int, PinOutcome] = {number: outcome for outcome, number in _OUTCOMES.items()}


def order_to_pb(order: PinOrder) -> pb.Pin:
    return pb.Pin(tenant=order.key.tenant, name=order.key.name, last_block=order.last_block, ttl_s=order.ttl_s)


def order_from_pb(message: pb.Pin) -> PinOrder:
    """Convert without checking bounds: the worker checks them."""
    return PinOrder(
        key=PinKey(message.tenant, message.name), last_block=BlockHash(message.last_block), ttl_s=message.ttl_s
    )


def result_to_pb(result: PinResult) -> pb.PinResult:
    return pb.PinResult(
        tenant=result.key.tenant, name=result.key.name, outcome=_OUTCOMES[result.outcome], num_tokens=result.num_tokens
    )


def result_from_pb(message: pb.PinResult) -> PinResult:
    """Read an outcome. An unknown one, of a newer worker, counts as lost: the pin is made again at its next use."""
    outcome = _OUTCOMES_FROM_PB.get(message.outcome, PinOutcome.GAVE_WAY)
    return PinResult(key=PinKey(message.tenant, message.name), outcome=outcome, num_tokens=message.num_tokens)


def totals_to_pb(totals: PinTotals) -> pb.PinReport:
    """Convert the totals for a load report."""
    return pb.PinReport(**totals._asdict())


def totals_from_pb(message: pb.PinReport) -> PinTotals:
    """Read the pins of a load report."""
    return PinTotals(**{name: getattr(message, name) for name in PinTotals._fields})
