"""The link rate is bytes over the seconds of those bytes only."""

import pytest

from kv_transfer.session.stats import AttemptOutcome, AttemptTally, EndKey, TransferStats, TransferTotals


def test_stats_before_first_chunk_have_no_rate() -> None:
    stats = TransferStats()
    assert stats.bytes_per_s == 0.0
    stats.count_chunk(100, 0.0)
    assert stats.bytes_per_s == 0.0, "a chunk without a time says nothing"
    assert (stats.chunks, stats.num_bytes, stats.seconds) == (1, 100, 0.0)


def test_stats_rate_follows_link_weighted_by_chunk_size() -> None:
    stats = TransferStats()
    stats.count_chunk(1000, 0.5)
    assert stats.bytes_per_s == pytest.approx(2000.0)
    stats.count_chunk(0, 0.0)
    assert stats.bytes_per_s == pytest.approx(2000.0)
    stats.count_chunk(1, 0.1)
    assert 1500.0 < stats.bytes_per_s < 2000.0, "a tiny slow chunk moves it little"
    for _ in range(200):
        stats.count_chunk(1000, 10.0)
    assert stats.bytes_per_s == pytest.approx(100.0, rel=0.01)


def test_stats_attempt_ends_once_and_counts_late_chunks() -> None:
    stats = TransferStats()
    first, second = AttemptTally(stats, is_fetch=False), AttemptTally(stats, is_fetch=True)
    first.chunk(100, 0.5)
    first.nack()
    second.chunk(7, 0.25)
    assert not stats.ended, "what is under way is not shown as if it had ended"
    first.end(AttemptOutcome.FAILED, "tcp")
    first.end(AttemptOutcome.COMMITTED, "tcp")
    first.chunk(11, 0.125)
    second.end(AttemptOutcome.COMMITTED, "shm")
    assert stats.ended == {
        EndKey(False, "tcp", AttemptOutcome.FAILED): TransferTotals(
            count=1, num_bytes=111, seconds=0.625, chunks=2, nacks=1
        ),
        EndKey(True, "shm", AttemptOutcome.COMMITTED): TransferTotals(count=1, num_bytes=7, seconds=0.25, chunks=1),
    }
    assert (stats.started, stats.committed, stats.failed, stats.expired, stats.cancelled) == (2, 1, 1, 0, 0)
    assert (stats.num_bytes, stats.seconds, stats.chunks, stats.nacks) == (118, 0.875, 3, 1)
