"""What a broken or hostile peer could say instead: every way to alter a message that some guard refuses.

What only its sender can know is left alone, for no receiver can check it: that it has drained, or that a write is done.
"""

from dataclasses import replace

from kv_transfer.protocol.messages import Body, Chunk, CommitAck, HandoffEnvelope, Nack, Offer, Reserve, Seal
from tests.proofs.explore.model.prefill_side import OTHER_TAIL
from tests.proofs.explore.model.scope import Scope


def bends(envelope: HandoffEnvelope, scope: Scope) -> list[HandoffEnvelope]:
    """The alterations of one message."""
    return [replace(envelope, body=body) for body in _bodies(envelope.body, scope)]


def _bodies(body: Body, scope: Scope) -> list[Body]:
    num_chunks, num_units = scope.num_chunks, scope.num_units
    match body:
        case Offer():
            other_sizes = [replace(body, num_units=body.num_units + more) for more in (-1, num_units)]
            return [*other_sizes, replace(body, tail_hash=OTHER_TAIL)]
        case Reserve():
            return [replace(body, num_units=body.num_units - 1), CommitAck()]
        case Chunk():
            cells = body.cells
            outside = replace(cells, first_unit=cells.first_unit + num_units)
            above = replace(cells, first_layer=cells.first_layer + scope.num_layers)
            moved = replace(cells, first_unit=(cells.first_unit + 1) % num_units)
            lifted = replace(cells, first_layer=(cells.first_layer + 1) % scope.num_layers)
            return [
                *(replace(body, cells=other) for other in (outside, above, moved, lifted) if other != cells),
                replace(body, cells=replace(cells, num_units=0)),
                replace(body, seq=body.seq + num_chunks),
                replace(body, seq=(body.seq + 1) % num_chunks),
            ]
        case Seal():
            return [
                replace(body, num_chunks=body.num_chunks - 1),
                replace(body, num_chunks=body.num_chunks + 1),
                replace(body, tail_hash=OTHER_TAIL),
            ]
        case Nack():
            return [replace(body, rewrite=body.rewrite + 1), replace(body, seq=body.seq + num_chunks)]
        case _:
            return []
