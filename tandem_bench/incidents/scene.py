"""What an incident is: the same load on a cluster in trouble and on the cured one, and what is looked at meanwhile."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tandem_bench.clusters import Setup

Load = Callable[[str, float], Awaitable[Mapping[str, float]]]
"""Given the router's URL and for how many seconds; returns what clients saw, by name and unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One cluster under the load."""

    name: str
    setup: Setup
    load: Load
    is_trouble: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One panel of one board, as the file has it."""

    board: str
    """The file's stem."""
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One walk-through of docs/operate/walkthroughs.md."""

    story: str
    phases: tuple[Phase, ...]
    panels: tuple[Shown, ...]
    alarms: tuple[str, ...]
    """Each must hold in trouble and must not when cured."""
    figures: Mapping[str, str]
    """Name to expression: the peak of each phase is told."""
    one_history: bool = False
    """The alarms compare with what was before: one Prometheus sees all phases."""
    prepare: Callable[[], object] | None = None
    """What must be there before the first phase."""
    baselines: Mapping[str, str] = field(default_factory=dict)
    """Recorded baselines of a day, which no bench has: each is stood in for by the peak of this expression over the
    phases that are well."""
