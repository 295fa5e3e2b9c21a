"""Rows of the built-in model's own gates, as `python -m training.evaluate` measures them."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem_bench.errors import EvaluationFailed
from tandem_bench.report import Row, read_json


async def rows(model: Path, *, samples: int, lengths: Sequence[int]) -> list[Row]:
    """Perplexity, needles and JSON objects. Raises EvaluationFailed."""
    with TemporaryDirectory(prefix="tandem-bench-") as folder:
        file = Path(folder) / "gates.json"
        command = ["training.evaluate", "--model", str(model), "--samples", str(samples), "--json", str(file)]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *command,
            "--lengths",
            *map(str, lengths),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        if process.returncode:
            raise EvaluationFailed(errors.decode(errors="replace")[-2000:])
        return [_named(row) for row in read_json(file)]


def _named(row: Row) -> Row:
    goal = None if row.met is None else row.goal
    return Row(name=f"model.{row.name}", value=row.value, unit=row.unit, goal=goal, met=row.met)
