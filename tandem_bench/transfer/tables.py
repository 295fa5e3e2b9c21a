"""Rates and CPU time for people: one line per contestant, one column per case."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem_bench.transfer.figures import medians
from tandem_bench.transfer.rounds import Turn


def print_tables(console: Console, done: Sequence[Turn]) -> None:
    """Print the tables, in the order in which contestants and cases first ran."""
    rates = medians(done, lambda turn: turn.bytes_per_s / 1e9)
    _print(console, "GB/s, median over rounds", {key: f"{rate:.2f}" for key, rate in rates.items()})
    sender = medians(done, lambda turn: turn.sender_cpu_s / turn.num_bytes * 1e9)
    receiver = medians(done, lambda turn: turn.receiver_cpu_s / turn.num_bytes * 1e9)
    _print(
        console, "CPU s per GB, sender + receiver", {key: f"{sender[key]:.2f} + {receiver[key]:.2f}" for key in rates}
    )


def _print(console: Console, title: str, cells: Mapping[tuple[str, str], str]) -> None:
    """One line per contestant, one column per case; `cells` by contestant and case."""
    names, cases = (dict.fromkeys(key[i] for key in cells) for i in range(2))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, no_wrap=True)
    for case in cases:
        table.add_column("\n".join(case.rsplit(".", 1)), justify="right", no_wrap=True)
    for name in names:
        table.add_row(Text(name), *(cells.get((name, case), "") for case in cases))
    console.print(table)
