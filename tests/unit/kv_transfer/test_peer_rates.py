"""What is expected of a peer: its own rate, its transport's, that of all."""

from kv_transfer.peer_rates import PeerRates


def test_each_peer_has_its_own_rate() -> None:
    rates = PeerRates()
    assert rates.bytes_per_s("a", "tcp") == 0.0
    for _ in range(100):
        rates.observe("a", "tcp", 1000, 1.0)
        rates.observe("b", "shm", 9000, 1.0)
    assert round(rates.bytes_per_s("a", "tcp")) == 1000
    assert round(rates.bytes_per_s("b")) == 9000
    assert round(rates.bytes_per_s("c", "tcp")) == 1000
    assert round(rates.bytes_per_s("c", "shm")) == 9000
    assert rates.bytes_per_s("c", "nixl") == 0.0
    assert 1000 < rates.bytes_per_s("c") < 9000


def test_a_write_of_unknown_time_says_nothing() -> None:
    rates = PeerRates()
    rates.observe("a", "tcp", 1000, 0.0)
    assert rates.bytes_per_s("a", "tcp") == 0.0
    rates.observe("b", "tcp", 500, 1.0)
    assert rates.bytes_per_s("a", "tcp") == 500.0


def test_peers_that_sent_nothing_for_long_are_forgotten() -> None:
    rates = PeerRates()
    for number in range(2000):
        rates.observe(f"peer {number}", "tcp" if number else "shm", 10 if number else 1000, 1.0)
        rates.observe("often", "tcp", 77, 1.0)
    assert rates.bytes_per_s("peer 0", "none") == 0.0
    assert round(rates.bytes_per_s("often", "none")) == 77
