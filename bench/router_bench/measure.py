"""The whole of `python -m bench router`: part by part, rows as they come."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from bench.report import Row, show
from bench.router_bench import door_rows, options


async def measure(given: argparse.Namespace, rows: list[Row], *, out: Console) -> None:
    """Measure and show what was asked for; `rows` grow part by part, so that a later part's failure loses nothing."""
    for part in options.parts(given):
        found = _PARTS[part](given.rounds, given.peer)
        show(out, found)
        rows += found


_PARTS: Mapping[str, Callable[[int, Sequence[str]], list[Row]]] = {"doors": door_rows.rows}
