"""A file's last content stays valid for a limited time after the last successful read."""

from router.access.file_trust import QUIET_S, FileTrust

TRUST_S = 300.0


def test_file_trust_checked_regularly_stays_trusted() -> None:
    trust = FileTrust(0.0, trust_s=TRUST_S)
    for now in range(0, 3600, 100):
        trust.on_unchanged(float(now))
        assert trust.distrust_reason(now + 99.0) is None
        assert trust.stale_s(now + 99.0) == 0.0


def test_file_trust_unreadable_file_lapses_until_read_again() -> None:
    trust = FileTrust(0.0, trust_s=TRUST_S)
    trust.on_unchanged(10.0)
    assert trust.on_unreadable("a FIFO")
    assert not trust.on_unreadable("a FIFO"), "said once"
    assert trust.on_unreadable("Permission denied")
    assert not trust.is_readable
    assert trust.stale_s(110.0) == 100.0
    assert trust.distrust_reason(309.9) is None
    assert trust.distrust_reason(310.0) == "not read for 300 s"
    trust.on_taken(400.0)
    assert trust.is_readable
    assert trust.distrust_reason(400.0) is None
    assert trust.stale_s(400.0) == 0.0


def test_file_trust_invalid_content_keeps_previous_content() -> None:
    trust = FileTrust(0.0, trust_s=TRUST_S)
    trust.on_refused(10.0)
    for now in range(11, 1000):
        trust.on_unchanged(float(now))
    assert trust.is_readable
    assert trust.stale_s(1000.0) == 1000.0
    assert trust.distrust_reason(1000.0) is None
    trust.on_taken(1001.0)
    assert trust.stale_s(1001.0) == 0.0


def test_file_trust_hanging_check_is_reported_once_and_lapses() -> None:
    trust = FileTrust(0.0, trust_s=TRUST_S)
    assert trust.on_waiting(QUIET_S - 0.1) is None
    assert trust.on_waiting(QUIET_S) == "checking it takes longer than 10 s"
    assert trust.on_waiting(QUIET_S + 1.0) is None
    assert trust.stale_s(60.0) == 60.0
    assert trust.distrust_reason(TRUST_S) is not None


def test_file_trust_without_bound_never_lapses() -> None:
    trust = FileTrust(0.0)
    trust.on_unreadable("gone")
    assert trust.distrust_reason(1e9) is None
    assert trust.stale_s(1e9) == 1e9
