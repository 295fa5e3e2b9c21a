"""Tables of the engine benchmark: one line per engine and kind of job, instead of one per figure."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem_bench.engine.figures import Summary


def print_summaries(console: Console, summaries: Sequence[Summary]) -> None:
    """Print the table, with a separator between kinds of jobs."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("job", "engine"):
        table.add_column(column, no_wrap=True)
    for column in (
        "prefill\ntokens/s",
        "\nTFLOP/s",
        "decode\ntokens/s",
        "\nGB/s",
        "of its\nlimit",
        "TTFT p50\nms",
        "ITL p50\nms",
        "ITL p99\nms",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    ordered = in_order(summaries)
    for i, seen in enumerate(ordered):
        is_last = i + 1 == len(ordered) or ordered[i + 1].cell != seen.cell
        table.add_row(Text(job_name(seen)), Text(seen.contestant), *_numbers(seen), end_section=is_last)
    console.print(table)


def in_order(summaries: Sequence[Summary]) -> list[Summary]:
    """Sort by kind of job, those with newcomers last; engines in the order in which they ran."""
    return sorted(summaries, key=lambda seen: (seen.cell.with_newcomers, seen.cell))


def job_name(seen: Summary) -> str:
    """Name the job in a column's width."""
    cell = seen.cell
    name = f"{cell.concurrency} x {cell.prompt_tokens}+{cell.num_tokens}"
    return f"{name} + prefills" if cell.with_newcomers else name


def _numbers(seen: Summary) -> tuple[str, ...]:
    gaps = (f"{1000 * seen.gap_p50_s:,.0f}", f"{1000 * seen.gap_p99_s:,.0f}")
    if seen.cell.with_newcomers:
        return ("", "", "", "", "", "", *gaps)
    return (
        f"{seen.prefill_tokens_per_s:,.0f}",
        f"{seen.flops_per_s / 1e12:.2f}",
        f"{seen.decode_tokens_per_s:,.1f}",
        f"{seen.read_bytes_per_s / 1e9:.1f}",
        f"{100 * seen.limit_share:.0f} %",
        f"{1000 * seen.first_token_s:,.0f}",
        *gaps,
    )
