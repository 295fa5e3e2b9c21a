"""What was read of a file is good for a while after the file could last be read, and no longer."""

from router.access.file_trust import QUIET_S, FileTrust

TRUST_S = 300.0


def test_what_is_looked_at_again_and_again_stays_good() -> None:
    trust = FileTrust(0.0, trust_s=TRUST_S)
    for now in range(0, 3600, 100):
        trust.on_unchanged(float(now))
        assert trust.distrust(now + 99.0) is None
        assert trust.stale_s(now + 99.0) == 0.0


def test_a_file_that_cannot_be_read_is_distrusted_in_time_and_trusted_again_once_it_is_read() -> None:
    trust = FileTrust(0.0, trust_s=TRUST_S)
    trust.on_unchanged(10.0)
    assert trust.on_unreadable("a FIFO")
    assert not trust.on_unreadable("a FIFO"), "said once"
    assert trust.on_unreadable("Permission denied")
    assert not trust.is_readable
    assert trust.stale_s(110.0) == 100.0
    assert trust.distrust(309.9) is None
    assert trust.distrust(310.0) == "not read for 300 s"
    trust.on_taken(400.0)
    assert trust.is_readable
    assert trust.distrust(400.0) is None
    assert trust.stale_s(400.0) == 0.0


def test_one_that_makes_no_sense_is_stale_and_what_was_read_before_stays_good() -> None:
    trust = FileTrust(0.0, trust_s=TRUST_S)
    trust.on_refused(10.0)
    for now in range(11, 1000):
        trust.on_unchanged(float(now))
    assert trust.is_readable
    assert trust.stale_s(1000.0) == 1000.0
    assert trust.distrust(1000.0) is None
    trust.on_taken(1001.0)
    assert trust.stale_s(1001.0) == 0.0


def test_a_look_that_hangs_is_told_once_and_ends_the_trust() -> None:
    trust = FileTrust(0.0, trust_s=TRUST_S)
    assert trust.on_waiting(QUIET_S - 0.1) is None
    assert trust.on_waiting(QUIET_S) == "checking it takes longer than 10 s"
    assert trust.on_waiting(QUIET_S + 1.0) is None
    assert trust.stale_s(60.0) == 60.0
    assert trust.distrust(TRUST_S) is not None


def test_without_a_bound_what_was_read_is_good_for_ever() -> None:
    trust = FileTrust(0.0)
    trust.on_unreadable("gone")
    assert trust.distrust(1e9) is None
    assert trust.stale_s(1e9) == 1e9
