"""Whether a process that should say all the time that it is alive does so. Pure: the clock is an argument."""

from router.workers.silence import SilenceWatch

LOOK_S = 1.0
"""Between two looks."""


class Beats:
    """Of one process, from when it serves."""

    def __init__(self, *, silence_s: float, now: float) -> None:
        """`silence_s`: who has said nothing for so long hangs."""
        self._watch = SilenceWatch(silence_s=silence_s, period_s=LOOK_S, now_s=now)
        self.look_at = now + LOOK_S
        """When `is_silent` is to be asked next."""

    def heard(self, now: float) -> None:
        """It says that it is alive."""
        self._watch.heard(now)

    def is_silent(self, now: float) -> bool:
        """Whether that has turned out now; asked too soon, it has not."""
        if now < self.look_at:
            return False
        self.look_at = now + LOOK_S
        return self._watch.is_silent(now)
