"""The rates for people: one line per contestant, one column per case."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.transfer_bench.figures import medians
from bench.transfer_bench.rounds import Turn


def show(console: Console, done: Sequence[Turn]) -> None:
    """Print the table, in the order in which contestants and cases first ran."""
    rates = medians(done, lambda turn: turn.bytes_per_s / 1e9)
    names = dict.fromkeys(turn.contestant for turn in done)
    cases = dict.fromkeys(turn.case for turn in done)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GB/s, median over rounds", no_wrap=True)
    for case in cases:
        table.add_column("\n".join(case.rsplit(".", 1)), justify="right", no_wrap=True)
    for name in names:
        table.add_row(Text(name), *(f"{rates[name, case]:.2f}" if (name, case) in rates else "" for case in cases))
    console.print(table)
