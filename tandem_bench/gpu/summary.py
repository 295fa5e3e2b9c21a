"""What the suite says: plain text for people, one JSON object for machines."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tandem_bench import report
from tandem_bench.gpu.isolation import Result
from tandem_bench.gpu.stage import Stage

_VERDICTS = {True: "met", False: "NOT MET", None: ""}


def text(result: Result) -> str:
    """One part: a line for how it ended, then its notes and figures."""
    lines = [f"== {result.part}: {result.status.value}, {result.seconds:.1f} s"]
    lines += [f"   {name:<40} {value}" for name, value in result.notes.items()]
    for row in result.rows:
        goal = "" if row.goal is None else f"   {row.goal} {_VERDICTS[row.met]}"
        lines.append(f"   {row.name:<40} {report.shown(row.value):>12} {row.unit}{goal}")
    if result.error is not None:
        lines += [f"   | {line}" for line in result.error.rstrip().splitlines()]
    return "\n".join(lines)


def verdict(results: Sequence[Result], seconds: float) -> str:
    rows = [row for result in results for row in result.rows]
    judged = sum(row.met is not None for row in rows)
    missed = [row.name for row in rows if row.met is False]
    incomplete = [f"{result.part} ({result.status.value})" for result in results if not result.is_complete]
    words = [f"{seconds:.0f} s, {judged - len(missed)} of {judged} goals met"]
    words += [f"missed: {', '.join(missed)}"] if missed else []
    words += [f"incomplete: {', '.join(incomplete)}"] if incomplete else []
    return "; ".join(words)


def num_missed(results: Sequence[Result]) -> int:
    return sum(report.num_missed(result.rows) for result in results)


def write_json(path: Path, results: Sequence[Result], *, stage: Stage, seconds: float) -> None:
    """Everything so far: `{"device", "shape", "seed", "seconds", "parts": [...], "rows": [...]}`.

    `rows` are those of all parts together, as other benchmarks write theirs.
    """
    parts = [asdict(result) | {"status": result.status.value} for result in results]
    whole: dict[str, Any] = {
        "device": stage.device,
        "shape": stage.shape,
        "seed": stage.seed,
        "seconds": round(seconds, 2),
    }
    whole["is_complete"] = all(result.is_complete for result in results)
    rows = [asdict(row) for result in results for row in result.rows]
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps({**whole, "parts": parts, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)  # whoever stops the suite meanwhile keeps the file of the part before
