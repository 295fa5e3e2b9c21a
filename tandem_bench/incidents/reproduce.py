"""Runs an incident: each phase's cluster, its load, and what Prometheus recorded."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import yaml

from tandem_bench.clusters import running
from tandem_bench.errors import CannotMeasure
from tandem_bench.incidents.prometheus import RULES, Watch, watching
from tandem_bench.incidents.scene import Incident, Phase

HELD = 0.2
"""Share of a phase's second half in which an alert's expression must have a result to count as raised."""

_WINDOW = re.compile(r"\[\d+[mhd]\]")
"""Range of an alert's own rates: minutes and hours, which a phase does not last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one phase."""

    phase: Phase
    watch: Watch
    start_s: float
    end_s: float
    """Time of the last request; the last answers may still be in progress."""
    ended_s: float
    clients: Mapping[str, float]

    @property
    def settled_s(self) -> float:
        """Time at which the second half of the phase starts."""
        return (self.start_s + self.end_s) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    outcomes: tuple[Outcome, ...]
    held: Mapping[str, tuple[float, ...]]
    """Shares of each phase's second half, by alert."""
    figures: Mapping[str, tuple[float | None, ...]]

    @property
    def is_shown(self) -> bool:
        """Whether every alert is raised during the fault, and in no other phase."""
        return all(
            (share >= HELD) is outcome.phase.is_trouble
            for shares in self.held.values()
            for share, outcome in zip(shares, self.outcomes, strict=True)
        )


@asynccontextmanager
async def reproduced(incident: Incident, seconds: float) -> AsyncIterator[Report]:
    """Run the incident; its Prometheus still answers inside the context. Raises ClusterFailed or CannotMeasure."""
    if incident.prepare is not None:
        await asyncio.to_thread(incident.prepare)
    async with AsyncExitStack() as stack:
        watch = await stack.enter_async_context(watching())
        outcomes: list[Outcome] = []
        for number, phase in enumerate(incident.phases):
            if number and not incident.one_history:
                watch = await stack.enter_async_context(watching())
            outcomes.append(await _run(phase, watch, seconds))
        yield await _report(incident, tuple(outcomes))


async def _run(phase: Phase, watch: Watch, seconds: float) -> Outcome:
    async with running(phase.setup) as cluster:
        watch.look_at(cluster.url)
        start_s = time.time()
        clients = await phase.load(cluster.url, seconds)
        ended_s = time.time()
        watch.look_at(None)
    end_s = min(ended_s, start_s + seconds)
    return Outcome(phase=phase, watch=watch, start_s=start_s, end_s=end_s, ended_s=ended_s, clients=clients)


async def _report(incident: Incident, outcomes: tuple[Outcome, ...]) -> Report:
    expressions = _alarms()
    stand_ins = {name: await _well(expr, outcomes) for name, expr in incident.baselines.items()}
    held: dict[str, tuple[float, ...]] = {}
    for alarm in incident.alarms:
        expr = expressions[alarm] if incident.one_history else _WINDOW.sub("[30s]", expressions[alarm])
        for name, value in stand_ins.items():
            expr = expr.replace(name, f"{value:g}")
        held[alarm] = tuple([await one.watch.held(expr, one.settled_s, one.end_s) for one in outcomes])
    figures = {
        name: tuple([await one.watch.peak(expr, one.settled_s, one.end_s) for one in outcomes])
        for name, expr in incident.figures.items()
    }
    return Report(outcomes=outcomes, held=held, figures=figures)


async def _well(expr: str, outcomes: tuple[Outcome, ...]) -> float:
    peaks = [await one.watch.peak(expr, one.settled_s, one.end_s) for one in outcomes if not one.phase.is_trouble]
    found = [peak for peak in peaks if peak is not None]
    if not found:
        raise CannotMeasure(f"no phase without the fault has a value of {expr}")
    return max(found)


def _alarms() -> dict[str, str]:
    groups = [group for path in RULES.glob("*.yaml") for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule}
