"""Leases and their clock."""

import pytest

from kv_transfer.protocol.leases import Lease, LeaseClock


def test_lease_renewed_counts_from_last_renewal() -> None:
    lease = Lease(2.0, 10.0)
    lease.renew(11.0)
    lease.renew(5.0)
    assert not lease.expired(12.9)
    assert lease.expired(13.0)


def test_lease_clock_own_pause_is_not_counted() -> None:
    clock = LeaseClock(100.0, max_step_s=0.5)
    assert clock.tick(100.4) == pytest.approx(100.4)
    assert clock.read(100.6) == pytest.approx(100.6)
    assert clock.read(160.0) == pytest.approx(100.9)
    assert clock.tick(160.0) == pytest.approx(100.9)
    assert clock.tick(160.1) == pytest.approx(101.0)
