"""The link rate is bytes over the seconds of just those bytes."""

import pytest

from kv_transfer.stats import TransferStats


def test_no_rate_before_the_first_chunk() -> None:
    stats = TransferStats()
    assert stats.bytes_per_s == 0.0
    stats.count_chunk(100, 0.0)
    assert stats.bytes_per_s == 0.0, "a chunk without a time says nothing"
    assert (stats.chunks, stats.num_bytes, stats.seconds) == (1, 100, 0.0)


def test_the_rate_follows_the_link_and_big_chunks_count_more() -> None:
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
