"""A peer's silence is distinguished from the router's own stall."""

from tandem.process.silence import SilenceWatch


def test_silence_is_detected_within_a_period() -> None:
    watch = SilenceWatch(silence_s=1.5, period_s=0.2, now_s=10.0)
    checks_s = [10.0 + 0.2 * look for look in range(1, 20)]
    assert next(now_s for now_s in checks_s if watch.is_silent(now_s)) <= 11.7


def test_silence_ends_with_a_message() -> None:
    watch = SilenceWatch(silence_s=1.0, period_s=0.2, now_s=0.0)
    for look in range(1, 100):
        watch.on_message(0.2 * look - 0.1)
        assert not watch.is_silent(0.2 * look)


def test_silence_excludes_own_stalls() -> None:
    watch = SilenceWatch(silence_s=1.0, period_s=0.2, now_s=0.0)
    assert not watch.is_silent(30.0)
    checks_s = [30.0 + 0.2 * look for look in range(1, 20)]
    assert 30.4 < next(now_s for now_s in checks_s if watch.is_silent(now_s)) <= 31.2
