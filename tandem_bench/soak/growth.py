"""Growth of a process over a soak: the slope of what it holds, robust against what comes and goes. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tandem_bench.report import Row, figure

MB = 1 << 20
MAX_MB_PER_HOUR = 1.0
RESOLUTION_MB = 1.0
"""Growth that an allocator may show by itself: a run shorter than an hour is judged by this much in total."""
RESOLUTION_SHARED_MB = 40.0
"""The same for shared memory: more than one KV pool (32 MB in `tandem_bench/soak/measure.py`), since those of peers are
mapped and unmapped as a whole when peers start and end.
"""
MAX_HANDLES_PER_HOUR = 2.0
RESOLUTION_HANDLES = 8.0
"""The same for open files and for threads, whose number depends on the load of the moment."""
MIN_SAMPLES = 20
_MAX_SAMPLES = 1000
"""Slopes are counted between all pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one process holds at one moment."""

    at_s: float
    own_bytes: int
    """Resident memory that no other process can map: anonymous."""
    shared_bytes: int
    """Resident pages of files and of shared memory, peers' KV pools among them."""
    num_files: int
    num_threads: int


@dataclass(slots=True, kw_only=True)
class Life:
    """Samples of one process from its start, or the soak's, to its end."""

    name: str
    pid: int
    samples: list[Sample] = field(default_factory=list)

    def rows(self, *, warm_up_s: float, least_s: float) -> list[Row]:
        """Figures after the warm-up, counted from the first sample; none for a process that lived too briefly.

        `least_s`: how long it must have lived after that.
        """
        kept = [sample for sample in self.samples if sample.at_s - self.samples[0].at_s >= warm_up_s]
        if len(kept) < MIN_SAMPLES or kept[-1].at_s - kept[0].at_s < least_s:
            return []
        times_s = [sample.at_s for sample in kept]
        hours = (times_s[-1] - times_s[0]) / 3600

        def growth(values: Sequence[float]) -> float:
            return slope(times_s, values) * 3600

        own = [sample.own_bytes / MB for sample in kept]
        shared = [sample.shared_bytes / MB for sample in kept]
        return [
            *(
                figure(
                    f"{self.name}: growth of {what}",
                    growth(values),
                    "MB/h",
                    at_most=max(MAX_MB_PER_HOUR, resolution_mb / hours),
                )
                for what, values, resolution_mb in (
                    ("own memory", own, RESOLUTION_MB),
                    ("shared memory", shared, RESOLUTION_SHARED_MB),
                )
            ),
            # What fills up grows less and less; what leaks does not.
            figure(f"{self.name}: growth of own memory in the second half", _late_growth(times_s, own), "MB/h"),
            figure(f"{self.name}: RSS at the end", own[-1] + shared[-1], "MB"),
            *(
                figure(
                    f"{self.name}: growth of {what}",
                    growth(values),
                    "1/h",
                    at_most=max(MAX_HANDLES_PER_HOUR, RESOLUTION_HANDLES / hours),
                )
                for what, values in (
                    ("open files", [sample.num_files for sample in kept]),
                    ("threads", [sample.num_threads for sample in kept]),
                )
            ),
        ]


def _late_growth(times_s: Sequence[float], values: Sequence[float]) -> float:
    half = len(times_s) // 2
    return slope(times_s[half:], values[half:]) * 3600


def slope(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope between all pairs of points (Theil and Sen), per second: 29 % of outliers do not move it.

    Raises ValueError for fewer than two moments.
    """
    step = -(-len(times_s) // _MAX_SAMPLES)
    x, y = np.asarray(times_s[::step], dtype=float), np.asarray(values[::step], dtype=float)
    later, earlier = np.tril_indices(len(x), -1)
    apart = x[later] - x[earlier]
    if not (apart > 0).any():
        raise ValueError("a slope needs two moments")
    return float(np.median((y[later] - y[earlier])[apart > 0] / apart[apart > 0]))
