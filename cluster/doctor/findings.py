"""Findings of `tandem doctor`: their severity, and how they are shown."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem.config.cluster import ClusterConfig


class Status(Enum):
    """Severity of a finding."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Single fact about this machine."""

    name: str
    status: Status
    detail: str
    hint: str = ""
    """Suggested remedy; empty if there is none."""


Check = Callable[[ClusterConfig], list[Finding]]


def has_failed(findings: list[Finding]) -> bool:
    """Return whether any finding is a failure."""
    return any(finding.status is Status.FAIL for finding in findings)


def as_json(findings: list[Finding]) -> str:
    """Render all findings as JSON."""
    rows = [asdict(finding) | {"status": finding.status.value} for finding in findings]
    return json.dumps({"ok": not has_failed(findings), "checks": rows}, indent=2)


def print_findings(console: Console, findings: list[Finding]) -> None:
    """Print all findings as a table."""
    marks = {
        Status.OK: Text("✓", style="green"),
        Status.INFO: Text("·", style="dim"),
        Status.WARN: Text("!", style="yellow"),
        Status.FAIL: Text("✗", style="bold red"),
    }
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        detail = Text(finding.detail)
        if finding.hint:
            detail.append(f"\n→ {finding.hint}", style="yellow" if finding.status is not Status.INFO else "dim")
        table.add_row(marks[finding.status], Text(finding.name, style="bold"), detail)
    console.print(table)
    wrong = sum(finding.status is Status.FAIL for finding in findings)
    warnings = sum(finding.status is Status.WARN for finding in findings)
    if wrong == 1:
        verdict = "[bold red]1 problem prevents Tandem from running here[/bold red]"
    elif wrong:
        verdict = f"[bold red]{wrong} problems prevent Tandem from running here[/bold red]"
    else:
        verdict = "[green]This machine can run Tandem[/green]"
    if warnings:
        verdict += f", {warnings} warning{'' if warnings == 1 else 's'}"
    console.print(f"\n{verdict}")
