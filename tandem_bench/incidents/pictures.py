"""The panels that show an incident, in trouble and cured, as the boards have them."""

import json
from pathlib import Path
from typing import Any

from tandem_bench.incidents.panels import BOARDS, Prometheus, draw_beside
from tandem_bench.incidents.reproduce import Report
from tandem_bench.incidents.scene import Incident, Shown


def panel_of(shown: Shown) -> dict[str, Any]:
    """As its board's file has it. LookupError when there is none."""
    board = json.loads((BOARDS / f"{shown.board}.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        if panel["title"] == shown.title and panel["type"] != "row":
            found: dict[str, Any] = panel
            return found
    raise LookupError(f"no panel {shown.title!r} on board {shown.board}")


def draw(incident: Incident, report: Report, path: Path) -> None:
    """A row for each panel; a column for each phase, or one for all of them where they have one history."""
    first, last = report.outcomes[0], report.outcomes[-1]
    if incident.one_history:
        whole = " → ".join(outcome.phase.name for outcome in report.outcomes)
        columns = {whole: Prometheus(first.watch.url, start_s=first.start_s, end_s=last.ended_s)}
    else:
        columns = {
            outcome.phase.name: Prometheus(outcome.watch.url, start_s=outcome.start_s, end_s=outcome.ended_s)
            for outcome in report.outcomes
        }
    draw_beside([panel_of(shown) for shown in incident.panels], columns, path)
