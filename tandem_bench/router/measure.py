"""The whole of `python -m tandem_bench router`: part by part, rows as they come."""

import argparse
from collections.abc import Callable, Mapping

from rich.console import Console

from tandem_bench.report import Row
from tandem_bench.report import print_table as show_rows
from tandem_bench.router import cost_rows, options, overload, placement, prefix_map, redis


async def measure(given: argparse.Namespace, rows: list[Row], *, out: Console) -> None:
    """Measure and show what was asked for; `rows` grow part by part, so that a later part's failure loses nothing."""
    for part in options.parts(given):
        if part == "doors":
            found = cost_rows.rows(given.rounds, given.peer)
        else:
            found = await overload.rows() if part == "overload" else _PARTS[part](given.repeats)
        show_rows(out, found)
        rows += found


_PARTS: Mapping[str, Callable[[int], list[Row]]] = {
    "placement": placement.rows,
    "prefix_map": prefix_map.rows,
    "redis": redis.rows,
}
