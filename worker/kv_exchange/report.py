"""What a worker has counted of moving KV, as routers are told of it with every load report."""

from collections.abc import Sequence

from kv_transfer.session.receiver_hub import ReceiverHub
from kv_transfer.session.sender_hub import SenderHub
from kv_transfer.session.stats import TransferStats
from tandem.v1 import session_pb2 as pb
from worker.kv_exchange.fetch import FetchStats


def transfer_report(
    sender_hub: SenderHub,
    receiver_hub: ReceiverHub,
    fetches: FetchStats,
    *,
    num_loans: int,
    num_lent_tokens: int,
    inherited: Sequence[pb.InheritedBlocks] = (),
) -> pb.TransferReport:
    """Totals since start, and gauges of now."""
    return pb.TransferReport(
        sent=_side(sender_hub.stats),
        received=_side(receiver_hub.stats),
        fetches_started=fetches.started,
        fetches_completed=fetches.completed,
        fetches_failed=fetches.failed,
        fetches_declined=fetches.declined,
        fetched_tokens=fetches.num_tokens,
        lent_tokens=num_lent_tokens,
        pinned_blocks=sender_hub.num_pinned_blocks,
        leased_blocks=receiver_hub.num_leased_blocks,
        quarantined_blocks=receiver_hub.stats.quarantined_blocks,
        loans=num_loans,
        inherited=inherited,
    )


def _side(stats: TransferStats) -> pb.TransferSide:
    ended = [
        pb.TransferEnds(
            fetch=key.is_fetch,
            transport=key.transport,
            outcome=key.outcome.value,
            count=totals.count,
            num_bytes=totals.num_bytes,
            seconds=totals.seconds,
            chunks=totals.chunks,
            damaged_chunks=totals.nacks,
        )
        for key, totals in stats.ended.items()
    ]
    return pb.TransferSide(
        started=stats.started,
        ended=ended,
        bad_messages=stats.bad_messages,
        live=stats.live,
        bytes_per_s=stats.bytes_per_s,
    )
