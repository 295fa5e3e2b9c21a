"""What workers report of moving KV, from protobuf. Labels are ours: what a peer makes up becomes `other`."""

from router.types.worker_view import MigratedBlocks, TransferEnds, TransferReport, TransferSide
from tandem.v1 import session_pb2 as pb

_TRANSPORTS = frozenset({"memory", "shm", "tcp", "torch_dist", "cuda_ipc", "nixl"})
_OUTCOMES = frozenset({"committed", "failed", "expired", "cancelled"})
_INHERITED = frozenset({"moved", "failed", "held", "computed", "no_room", "no_time"})
_MAX_ENDS = 2 * (len(_TRANSPORTS) + 1) * len(_OUTCOMES)


def transfers_from_pb(report: pb.TransferReport) -> TransferReport:
    return TransferReport(
        sides=(_side("sent", report.sent), _side("received", report.received)),
        fetches_started=report.fetches_started,
        fetches_completed=report.fetches_completed,
        fetches_failed=report.fetches_failed,
        fetches_declined=report.fetches_declined,
        fetched_tokens=report.fetched_tokens,
        lent_tokens=report.lent_tokens,
        pinned_blocks=report.pinned_blocks,
        leased_blocks=report.leased_blocks,
        quarantined_blocks=report.quarantined_blocks,
        loans=report.loans,
        inherited=tuple(map(_inherited, report.inherited[: len(_INHERITED)])),
    )


def _inherited(blocks: pb.InheritedBlocks) -> MigratedBlocks:
    return MigratedBlocks(
        outcome=blocks.outcome if blocks.outcome in _INHERITED else "other",
        num_blocks=blocks.blocks,
        num_bytes=blocks.num_bytes,
    )


def _side(direction: str, side: pb.TransferSide) -> TransferSide:
    return TransferSide(
        direction=direction,
        started=side.started,
        ended=tuple(map(_ends, side.ended[:_MAX_ENDS])),
        bad_messages=side.bad_messages,
        live=side.live,
        bytes_per_s=side.bytes_per_s,
    )


def _ends(ends: pb.TransferEnds) -> TransferEnds:
    unreached = "none" if not ends.transport else "other"
    return TransferEnds(
        kind="fetch" if ends.fetch else "handoff",
        transport=ends.transport if ends.transport in _TRANSPORTS else unreached,
        outcome=ends.outcome if ends.outcome in _OUTCOMES else "other",
        count=ends.count,
        num_bytes=ends.num_bytes,
        seconds=ends.seconds,
        chunks=ends.chunks,
        damaged_chunks=ends.damaged_chunks,
    )
