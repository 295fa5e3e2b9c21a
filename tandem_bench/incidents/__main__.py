"""`python -m tandem_bench.incidents NAME`: reproduces an incident on a real cluster, with the fault and without.

Each phase is a cluster loaded for some seconds, with a Prometheus that has our rules. Exit code 1: an alert was not
raised during the fault, or was raised without it; 2: it could not be measured.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tandem_bench.errors import CannotMeasure
from tandem_bench.incidents.known import INCIDENTS
from tandem_bench.incidents.panels import DASHBOARDS, Prometheus, draw_panels
from tandem_bench.incidents.reproduce import Report, reproduced
from tandem_bench.incidents.scene import Incident, Shown


def panel_of(shown: Shown) -> dict[str, Any]:
    """Return the panel as in its dashboard's file. LookupError if it does not exist."""
    dashboard = json.loads((DASHBOARDS / f"{shown.dashboard}.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        if panel["title"] == shown.title and panel["type"] != "row":
            found: dict[str, Any] = panel
            return found
    raise LookupError(f"no panel {shown.title!r} on dashboard {shown.dashboard}")


def draw(incident: Incident, report: Report, path: Path) -> None:
    """Draw a row for each panel; a column for each phase, or one for all if they share a history."""
    first, last = report.outcomes[0], report.outcomes[-1]
    if incident.one_history:
        whole = " → ".join(outcome.phase.name for outcome in report.outcomes)
        columns = {whole: Prometheus(first.watch.url, start_s=first.start_s, end_s=last.ended_s)}
    else:
        columns = {
            outcome.phase.name: Prometheus(outcome.watch.url, start_s=outcome.start_s, end_s=outcome.ended_s)
            for outcome in report.outcomes
        }
    draw_panels([panel_of(shown) for shown in incident.panels], columns, path)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tandem_bench.incidents", description=__doc__)
    made.add_argument("name", choices=[*INCIDENTS], help="incident of docs/operate/walkthroughs.md")
    made.add_argument("--seconds", type=float, default=40.0, help="seconds of load per phase")
    made.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the panels that show the incident")
    return made


async def _main(incident: Incident, seconds: float, picture: Path | None) -> int:
    print(incident.story)
    async with reproduced(incident, seconds) as report:
        print("\n".join(lines(report)))
        if picture is not None:
            draw(incident, report, picture)
            print(f"drawn: {picture}")
    return 0 if report.is_shown else 1


def lines(report: Report) -> list[str]:
    """Render the table: a line for each figure, a column for each phase."""
    phases = [outcome.phase.name for outcome in report.outcomes]
    rows = [("", phases)]
    for name in report.outcomes[0].clients:
        rows.append((name, [f"{outcome.clients[name]:.4g}" for outcome in report.outcomes]))
    for name, values in report.figures.items():
        rows.append((name, ["-" if value is None else f"{value:.3g}" for value in values]))
    for name, shares in report.held.items():
        rows.append((name, [f"raised for {share:.0%}" for share in shares]))
    widths = [max(len(row[1][column]) for row in rows) for column in range(len(phases))]
    first = max(len(name) for name, _ in rows)
    return [
        name.ljust(first) + "  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for name, cells in rows
    ]


def main() -> int:
    options = parser().parse_args()
    try:
        return asyncio.run(_main(INCIDENTS[options.name](), options.seconds, options.picture))
    except CannotMeasure as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
