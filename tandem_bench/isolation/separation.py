"""How well one number tells two kinds of trials apart: the area under the ROC curve, from ranks. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from statistics import median
from typing import NamedTuple

from tandem_bench.report import Row, figure

MAX_OFF = 0.03
"""Of the AUC from 0.5: two and a third standard errors of 2,000 probes."""


class Probe(NamedTuple):
    """One guess of a prefix by its time to first token."""

    ttft_s: float
    was_sent: bool
    """Whether the victim had sent the prefix before."""
    cached_tokens: int
    """What the answer itself tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """Area under the ROC curve of "fast means sent": 0.5 is a guess, 1.0 is certainty."""

    auc: float
    standard_error: float
    """Under the hypothesis that both kinds are alike."""
    num_probes: int

    @classmethod
    def from_probes(cls, probes: Sequence[Probe]) -> "Separation":
        """By Mann and Whitney; equal times count as half. Raises ValueError unless there are probes of both kinds."""
        num_sent = sum(probe.was_sent for probe in probes)
        num_others = len(probes) - num_sent
        if not num_sent or not num_others:
            raise ValueError("a separation needs probes of both kinds")
        rank_sum, first_rank = 0.0, 1
        for _, tied in groupby(sorted(probes), key=lambda probe: probe.ttft_s):
            kinds = [probe.was_sent for probe in tied]
            rank_sum += sum(kinds) * (first_rank + (len(kinds) - 1) / 2)
            first_rank += len(kinds)
        slower_pairs = rank_sum - num_sent * (num_sent + 1) / 2
        return cls(
            auc=1 - slower_pairs / (num_sent * num_others),
            standard_error=sqrt((len(probes) + 1) / (12 * num_sent * num_others)),
            num_probes=len(probes),
        )

    @property
    def off(self) -> float:
        """Distance from a guess, in either direction: a prefix that is slower if it was sent is told, too."""
        return abs(self.auc - 0.5)


def median_ms(probes: Sequence[Probe], *, was_sent: bool) -> float:
    """Return the median time to first token of one kind, in milliseconds."""
    return median(probe.ttft_s for probe in probes if probe.was_sent is was_sent) * 1e3


def leak_rows(probes: list[Probe]) -> list[Row]:
    """Figures that say whether another tenant's prefixes can be told; few probes have no goal for the AUC."""
    found = Separation.from_probes(probes)
    told = sum(probe.cached_tokens for probe in probes)
    return [
        figure("another tenant: AUC", found.auc, ""),
        figure("another tenant: standard error of the AUC", found.standard_error, ""),
        figure(
            "another tenant: AUC off 0.5",
            found.off,
            "",
            at_most=MAX_OFF if 2 * found.standard_error <= MAX_OFF else None,
        ),
        figure("another tenant: cached tokens that its answers told", told, "", at_most=0),
    ]
