"""What a broken or hostile peer could say instead: every way to alter a message that some guard refuses.

What only its sender can know is left alone, for no receiver can check it: that it has drained, or that a write is done.
"""

from dataclasses import replace

from kv_transfer.messages import Body, Chunk, CommitAck, Envelope, Nack, Offer, Reserve, Seal
from tests.explore.prefill_side import OTHER_TAIL


def bends(envelope: Envelope, num_chunks: int) -> list[Envelope]:
    """The alterations of one message."""
    return [replace(envelope, body=body) for body in _bodies(envelope.body, num_chunks)]


def _bodies(body: Body, num_chunks: int) -> list[Body]:
    match body:
        case Offer():
            return [replace(body, num_blocks=body.num_blocks - 1)]
        case Reserve():
            return [replace(body, num_blocks=body.num_blocks - 1), CommitAck()]
        case Chunk():
            cells = body.cells
            outside = replace(cells, first_block=cells.first_block + num_chunks)
            moved = replace(cells, first_block=(cells.first_block + 1) % num_chunks)
            return [
                replace(body, cells=outside),
                replace(body, cells=moved),
                replace(body, cells=replace(cells, num_blocks=0)),
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
