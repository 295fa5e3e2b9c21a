"""What a benchmark says: rows of figures, as a table for people and as JSON for machines."""

import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "<": operator.lt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured figure; `goal` and `met` are None where nothing is promised."""

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
    """A row, judged where a goal is given. Raises ValueError for more than one goal."""
    bounds = {"<=": at_most, ">=": at_least, "<": below}
    goals = [(sign, bound) for sign, bound in bounds.items() if bound is not None]
    if len(goals) > 1:
        raise ValueError(f"{name}: one goal, not {len(goals)}")
    if not goals:
        return Row(name=name, value=value, unit=unit)
    sign, bound = goals[0]
    return Row(name=name, value=value, unit=unit, goal=f"{sign} {bound:g}", met=_COMPARE[sign](value, bound))


def num_missed(rows: Sequence[Row]) -> int:
    """How many goals were not met."""
    return sum(row.met is False for row in rows)


def show(console: "Console", rows: Sequence[Row]) -> None:
    """Print the table. Rich is imported here: figures are also made where it is not installed."""
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
    if missed := num_missed(rows):
        console.print(f"{missed} goals not met", style="bold red")


def shown(value: float) -> str:
    """Four significant digits; whole numbers in full."""
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """`{"rows": [{"name", "value", "unit", "goal", "met"}]}`."""
    path.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> list[Row]:
    """Rows that another program wrote in the same shape."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [Row(**row) for row in rows]
