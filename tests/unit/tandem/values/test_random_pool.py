"""Random numbers drawn many at a time: none comes twice."""

from tandem.values import random_pool
from tandem.values.random_pool import RandomPool


def test_random_pool_draws_each_byte_once(monkeypatch):
    drawn = iter(range(100))
    monkeypatch.setattr(random_pool.os, "urandom", lambda size: bytes([next(drawn)]) * size)
    monkeypatch.setattr(random_pool, "_DRAWN_BYTES", 4)
    pool = RandomPool()
    assert [pool.token_hex(3), pool.token_hex(3)] == ["00" * 3, "01" * 3]
    assert pool.token_hex(1) == "01", "what is left is used"
    assert pool.token_hex(9) == "02" * 9, "more than is drawn at a time"


def test_random_pool_numbers_have_the_bits_asked_for():
    pool = RandomPool()
    assert len({pool.token_hex(16) for _ in range(1000)}) == 1000
    for num_bits in (1, 8, 63):
        found = [pool.randbits(num_bits) for _ in range(500)]
        assert 0 <= min(found) <= max(found) < 1 << num_bits
        assert max(found) >= 1 << (num_bits - 1)
