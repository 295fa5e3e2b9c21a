"""Pins to protobuf and back, for both ends of a session."""

from tandem.v1 import pins_pb2 as pb
from tandem.values.ids import BlockHash
from tandem.values.prefix_pin import PinKey, PinOrder, PinOutcome, PinTold, PinTotals

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
    """Bounds are checked where it is carried out."""
    return PinOrder(
        key=PinKey(message.tenant, message.name), last_block=BlockHash(message.last_block), ttl_s=message.ttl_s
    )


def told_to_pb(told: PinTold) -> pb.PinTold:
    return pb.PinTold(
        tenant=told.key.tenant, name=told.key.name, outcome=_OUTCOMES[told.outcome], num_tokens=told.num_tokens
    )


def told_from_pb(message: pb.PinTold) -> PinTold:
    """An outcome that a newer worker knows of is taken for a loss: the pin is made again when it is next used."""
    outcome = _OUTCOMES_FROM_PB.get(message.outcome, PinOutcome.GAVE_WAY)
    return PinTold(key=PinKey(message.tenant, message.name), outcome=outcome, num_tokens=message.num_tokens)


def totals_to_pb(totals: PinTotals) -> pb.PinReport:
    """For a load report."""
    return pb.PinReport(**totals._asdict())


def totals_from_pb(message: pb.PinReport) -> PinTotals:
    """Of a load report; zeros from a worker that tells nothing."""
    return PinTotals(**{name: getattr(message, name) for name in PinTotals._fields})
