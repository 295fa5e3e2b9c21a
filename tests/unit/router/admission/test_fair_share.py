"""Fair shares: counters of tenants that come, go and come back."""

import pytest

from router.admission.fair_share import VirtualCounters

CREDIT = 100.0


def counters(**had: float) -> VirtualCounters:
    """Counters of tenants with these totals, and an empty queue."""
    found = VirtualCounters(weight_of=lambda tenant: 4.0 if tenant == "heavy" else 1.0)
    for tenant, cost in had.items():
        found.activate(tenant, ())
        found.charge(tenant, input_tokens=cost - found.counter(tenant))
    return found


def test_fair_share_service_without_contention_is_no_debt() -> None:
    one = counters(idle=0.0, busy=0.0)
    for _ in range(20):
        one.unclaimed("busy", 50.0, credit=CREDIT)
        one.activate("busy", (), credit=CREDIT)
        one.served("busy", input_tokens=25.0)
    one.unclaimed("idle", 50.0, credit=CREDIT)
    one.activate("idle", (), credit=CREDIT)
    # It comes after 20 requests of the other, and one of them is all that it is ahead by.
    assert 0.0 <= one.counter("busy") - one.counter("idle") <= 25.0


def test_fair_share_service_under_contention_is_bounded_debt() -> None:
    one = counters(idle=0.0, busy=0.0)
    for _ in range(20):
        one.activate("busy", (), credit=CREDIT)
        one.served("busy", input_tokens=25.0)
    one.activate("idle", (), credit=CREDIT)
    assert one.counter("busy") - one.counter("idle") == CREDIT


def test_fair_share_unclaimed_service_is_capped_at_one_credit() -> None:
    one = counters(a=0.0, b=500.0)
    for _ in range(10):
        one.unclaimed("a", 1000.0, credit=CREDIT)
    one.activate("a", (), credit=CREDIT)
    assert one.counter("a") == one.counter("b") == 500.0
    # A new one comes without the credit that both have.
    assert one.lifted("new", (), credit=CREDIT) == 600.0


def test_fair_share_credits_do_not_add_up_over_waiting_tenants() -> None:
    one = counters(a=0.0, b=0.0, c=0.0, busy=1000.0)
    waiting = ["busy"]
    for tenant in ("a", "b", "c"):
        one.activate(tenant, waiting, credit=CREDIT)
        waiting.append(tenant)
    # The second is a credit behind the one that has had most, and not two behind, because the first waits on credit.
    assert [one.counter(tenant) for tenant in ("a", "b", "c")] == [900.0] * 3


def test_fair_share_credit_is_divided_by_weight() -> None:
    one = counters(heavy=0.0, light=1000.0)
    assert one.lifted("heavy", ["light"], credit=CREDIT) == 975.0
    one.unclaimed("heavy", 40.0, credit=CREDIT)
    assert one.lifted("new", (), credit=CREDIT) == pytest.approx(10.0)
