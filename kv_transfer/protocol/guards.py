"""The guards of the hand-off protocol: predicates over plain values that forbid a message, a commit or a release.

The state machines call them as `guards.name(...)`, so that a proof can remove one and show that the protocol breaks.
"""

from collections.abc import Sequence

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.protocol.coverage import Coverage
from kv_transfer.protocol.leases import Lease
from kv_transfer.protocol.messages import Chunk, FirstToken, HandoffEnvelope, Nack, Offer, Reserve, Seal, TransferKey
from kv_transfer.protocol.states import LIVE, HandoffState
from tandem.values.ids import BlockHash, Incarnation


def stale_attempt(envelope: HandoffEnvelope, key: TransferKey) -> bool:
    """The message belongs to another attempt or another hand-off."""
    return envelope.key != key


def stale_incarnation(envelope: HandoffEnvelope, peer: Incarnation) -> bool:
    """The message comes from a process other than the one this hand-off was agreed with."""
    return envelope.incarnation != peer


def misdirected(envelope: HandoffEnvelope, own: Incarnation) -> bool:
    """The message was meant for another process, perhaps an earlier one at this address."""
    return envelope.addressee != own


def superseded(attempt: int, newest: int | None) -> bool:
    """An attempt at least as new is known: this one is a replay, or too late."""
    return newest is not None and attempt <= newest


def unexpected_size(announced: Offer | Reserve, expected: int) -> bool:
    """The two sides disagree about how many units to transfer."""
    return announced.num_units != expected


def impossible_fetch(offer: Offer, most_units: int, units_per_block: int) -> bool:
    """More units are offered than were requested, or part of a block."""
    return not 0 < offer.num_units <= most_units or offer.num_units % units_per_block != 0


def wrong_grants(num_grants: int, num_lanes: int) -> bool:
    """The receiver granted another number of lanes than the hand-off has."""
    return num_grants != num_lanes


def wrong_binding(num_bound: int, expected: int) -> bool:
    """The owner bound another number of blocks than will be transferred."""
    return num_bound != expected


def unknown_lane(lane: int, num_lanes: int) -> bool:
    """The hand-off has no lane of this number."""
    return not 0 <= lane < num_lanes


def out_of_range(cells: CellRange, coverage: Coverage) -> bool:
    """The cells are empty or lie outside their lane of the reservation."""
    return not coverage.contains(cells)


def beyond_seal(seq: int, seal: Seal | None, max_chunks: int) -> bool:
    """The sequence number exceeds the count in the seal or, before a seal, the number of cells."""
    return seq >= (max_chunks if seal is None else seal.num_chunks)


def repeated_chunk(chunk: Chunk, newest: Chunk, nacked: bool) -> bool:
    """The chunk is not the rewrite that a NACK requested: a duplicate, or older than the last verification."""
    return not nacked or chunk.rewrite != newest.rewrite + 1


def altered_chunk(chunk: Chunk, newest: Chunk) -> bool:
    """A rewrite covers other cells than the first write, or goes through another lane."""
    return (chunk.cells, chunk.lane) != (newest.cells, newest.lane)


def overlapping(cells: CellRange, coverage: Coverage) -> bool:
    """Another chunk covers some of these cells."""
    return coverage.claimed(cells)


def stale_verdict(rewrite: int, newest: Chunk) -> bool:
    """The verification was of an earlier write."""
    return rewrite != newest.rewrite


def rewrites_exhausted(rewrite: int, max_rewrites: int) -> bool:
    """The chunk has been rewritten the maximum number of times."""
    return rewrite >= max_rewrites


def contradicting_seal(seal: Seal, known: Seal) -> bool:
    """A second seal contradicts the first."""
    return seal != known


def repeated_first_token(known: FirstToken | None, resume: bool) -> bool:
    """A first token is known already and authoritative: later ones are dropped."""
    return resume or known is not None


def wrong_identity(sent: BlockHash | None, expected: BlockHash | None) -> bool:
    """The sender computed other tokens than were requested."""
    return expected is not None and sent != expected


def complete(seal: Seal | None, num_verified: int, coverages: Sequence[Coverage]) -> bool:
    """Sealed, every stated chunk verified, and no cell missing in any lane."""
    return seal is not None and num_verified == seal.num_chunks and all(lane.complete for lane in coverages)


def continuable(first_token: FirstToken | None, resume: bool) -> bool:
    """The token after the prompt is known, so that decoding can start."""
    return resume or first_token is not None


def quiet(granted: bool, proven_quiet: bool) -> bool:
    """No writer can touch the destinations: none was let in, or it is proven to have stopped."""
    return proven_quiet or not granted


def drain_is_proof(drain_proves_quiet: bool) -> bool:
    """Over this transport nothing is in flight once the sender has drained."""
    return drain_proves_quiet


def still_live(state: HandoffState) -> bool:
    """The hand-off may still commit; otherwise news about progress is too late."""
    return state in LIVE


def not_granted(grant: bytes | None) -> bool:
    """The receiver has not granted the write yet."""
    return grant is None


def stale_nack(nack: Nack, current_rewrite: int, announced: bool) -> bool:
    """The NACK is about an earlier write than the last one announced: a rewrite would overwrite verified cells."""
    return not announced or nack.rewrite != current_rewrite


def out_of_time(deadline: Lease | None, now: float) -> bool:
    """The decode worker no longer waits for the prompt."""
    return deadline is not None and deadline.expired(now)


def reads_pending(num_writes_under_way: int) -> bool:
    """A write still reads the sources."""
    return num_writes_under_way > 0


def unsealed_commit(state: HandoffState) -> bool:
    """The peer commits a hand-off that was never sealed."""
    return state is not HandoffState.SEALED
