"""The report of a benchmark: rows of figures, as a table for people and as JSON for programs."""

import json
import operator
import os
import platform
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.config.source.regular_file import read_regular_text

if TYPE_CHECKING:
    from rich.console import Console

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure; `goal` and `met` are None where there is no goal."""

    name: str
    value: float
    unit: str
    goal: str | None = None
    met: bool | None = None


def figure(
    name: str,
    value: float,
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
) -> Row:
    """Build a row, judged where a goal is given. Raises ValueError for more than one goal."""
    bounds = {"<=": at_most, ">=": at_least, "<": below}
    goals = [(sign, bound) for sign, bound in bounds.items() if bound is not None]
    if len(goals) > 1:
        raise ValueError(f"{name}: at most one goal is allowed, got {len(goals)}")
    if not goals:
        return Row(name=name, value=value, unit=unit)
    sign, bound = goals[0]
    return Row(name=name, value=value, unit=unit, goal=f"{sign} {bound:g}", met=_COMPARE[sign](value, bound))


def num_missed(rows: Sequence[Row]) -> int:
    """Count the goals that were missed."""
    return sum(row.met is False for row in rows)


def print_table(console: "Console", rows: Sequence[Row]) -> None:
    """Print the table. Rich is imported here, as figures are also made where it is not installed."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit")
    table.add_column("goal", no_wrap=True)
    table.add_column("")
    for row in rows:
        verdict = {True: Text("met", style="green"), False: Text("NOT MET", style="bold red"), None: Text("")}[row.met]
        table.add_row(Text(row.name), shown(row.value), Text(row.unit), row.goal or "", verdict)
    console.print(table)
    missed = [f"{row.name} {shown(row.value)}, expected {row.goal}" for row in rows if row.met is False]
    if missed:
        count = f"{len(missed)} goal{'s' * (len(missed) > 1)} not met"
        console.print(Text(f"{count}: {'; '.join(missed)}", style="bold red"), soft_wrap=True)


def shown(value: float) -> str:
    """Render four significant digits; whole numbers and integer parts in full."""
    is_whole = float(value).is_integer() or abs(value) >= 1e4
    return f"{value:,.0f}" if is_whole and abs(value) < 1e15 else f"{value:.4g}"


def write_json(path: Path, rows: Sequence[Row], *, about: Mapping[str, object] | None = None) -> None:
    """Write `{"about": {...}, "rows": [{"name", "value", "unit", "goal", "met"}]}`; `about`: when, where and what."""
    report = {"about": dict(about or {}), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def circumstances(command: Sequence[str]) -> dict[str, object]:
    """Return when and where a benchmark runs, which its figures must be stored with."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "version": version("tandem-serve"),
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def read_json(path: Path) -> list[Row]:
    """Read rows that another program wrote in the same format."""
    rows = json.loads(read_regular_text(path, max_bytes=64 << 20))["rows"]
    return [Row(**row) for row in rows]
