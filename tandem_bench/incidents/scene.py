"""The parts of an incident: the same load on a cluster with the fault and without it, and what is observed."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tandem_bench.clusters import Setup

Load = Callable[[str, float], Awaitable[Mapping[str, float]]]
"""Function that puts load on the router's URL for so many seconds; returns what clients saw, by name and unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One cluster under the load."""

    name: str
    setup: Setup
    load: Load
    is_trouble: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Panel of a dashboard, as its file has it."""

    dashboard: str
    """Stem of the dashboard's file name."""
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One walk-through of docs/operate/walkthroughs.md."""

    story: str
    phases: tuple[Phase, ...]
    panels: tuple[Shown, ...]
    alarms: tuple[str, ...]
    """Alerts that must be raised with the fault and not without."""
    figures: Mapping[str, str]
    """Expressions by name, of which the peak in each phase is reported."""
    one_history: bool = False
    """Whether the alerts compare with the past, so that one Prometheus must see all phases."""
    prepare: Callable[[], object] | None = None
    """Preparation before the first phase."""
    baselines: Mapping[str, str] = field(default_factory=dict)
    """Recorded baselines of a day, which a benchmark cannot have: each is replaced by the peak of this expression over
    the phases without the fault.
    """
