"""Progress of loading weights and its remaining time: published a few times a second, logged every ten seconds.

Pure: the clock and the callbacks that publish and log are passed in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

PUBLISH_S = 0.25
LOG_S = 10.0
_LEAST_SHARE = 0.02
"""Minimum time before the remaining time can be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A report on how far loading has come."""

    share: float
    """Share of the values that are loaded, 0 to 1."""
    left_s: float | None
    """Predicted remaining seconds; None while unknown."""

    @classmethod
    def read(cls, value: Any) -> Self:
        """Parse a decoded JSON value. Raises LookupError, TypeError or ValueError for anything else."""
        left_s = value["left_s"]
        share = float(value["share"])
        if not 0.0 <= share <= 1.0:
            raise ValueError("share must be in [0, 1]")
        return cls(share=share, left_s=None if left_s is None else float(left_s))

    def as_json(self) -> Mapping[str, Any]:
        return {"share": round(self.share, 4), "left_s": None if self.left_s is None else round(self.left_s, 1)}

    def __str__(self) -> str:
        left = "" if self.left_s is None or self.share == 1.0 else f", {_duration(self.left_s)} left"
        return f"loading weights: {self.share:.0%}{left}"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class LoadProgress:
    """Called by the loader with the number of values loaded and the total."""

    def __init__(
        self, *, clock: Callable[[], float], publish: Callable[[LoadReport], None], log: Callable[[LoadReport], None]
    ) -> None:
        """`publish` gets reports often, the final one included; `log` every ten seconds."""
        self._clock = clock
        self._publish = publish
        self._log = log
        self._started_s = self._logged_s = clock()
        self._published_s: float | None = None

    def __call__(self, done: int, total: int) -> None:
        now_s = self._clock()
        is_over = done >= total
        is_due = self._published_s is None or now_s - self._published_s >= PUBLISH_S
        if not (is_over or is_due):
            return
        share = done / total if total else 1.0
        left_s = (now_s - self._started_s) * (1.0 - share) / share if share >= _LEAST_SHARE else None
        report = LoadReport(share=min(1.0, share), left_s=left_s)
        self._published_s = now_s
        self._publish(report)
        if now_s - self._logged_s >= LOG_S:
            self._logged_s = now_s
            self._log(report)
