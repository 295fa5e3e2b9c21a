"""All of `python -m tandem_bench transfer`: rates in rounds, Python's share, checksums; rows as they come."""

import argparse
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tandem_bench.errors import CannotMeasure, require_extra
from tandem_bench.peers.environments import PeerEnvironment, ensure
from tandem_bench.peers.process import EngineProcess, Launch
from tandem_bench.report import Row, figure
from tandem_bench.report import print_table as show_rows
from tandem_bench.transfer import contestants, figures, options
from tandem_bench.transfer.cases import Case, make_cases, pool_bytes
from tandem_bench.transfer.clusters import overlap, pull
from tandem_bench.transfer.contestants import COPY, COPY_RANGES, PLAIN, SHM, SHM_BARE, TCP, TCP_BARE, Contestant
from tandem_bench.transfer.figures import medians
from tandem_bench.transfer.pair import END_HOST, ENDS
from tandem_bench.transfer.planning import seconds_per_block
from tandem_bench.transfer.pools import Pools
from tandem_bench.transfer.rounds import Absence, Contest, Field, Turn


def print_turns(console: Console, done: Sequence[Turn]) -> None:
    """Print the tables, in the order in which contestants and cases first ran."""
    rates = medians(done, lambda turn: turn.bytes_per_s / 1e9)
    _print(console, "GB/s, median over rounds", {key: f"{rate:.2f}" for key, rate in rates.items()})
    sender = medians(done, lambda turn: turn.sender_cpu_s / turn.num_bytes * 1e9)
    receiver = medians(done, lambda turn: turn.receiver_cpu_s / turn.num_bytes * 1e9)
    _print(
        console, "CPU s per GB, sender + receiver", {key: f"{sender[key]:.2f} + {receiver[key]:.2f}" for key in rates}
    )


def _print(console: Console, title: str, cells: Mapping[tuple[str, str], str]) -> None:
    """Print one line per contestant, one column per case; `cells` by contestant and case."""
    names, cases = (dict.fromkeys(key[i] for key in cells) for i in range(2))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(title, no_wrap=True)
    for case in cases:
        table.add_column("\n".join(case.rsplit(".", 1)), justify="right", no_wrap=True)
    for name in names:
        table.add_row(Text(name), *(cells.get((name, case), "") for case in cases))
    console.print(table)


_COLORS: Mapping[str, str] = {
    COPY: "#c1121f",
    COPY_RANGES: "#e5989b",
    PLAIN: "#6d6875",
    SHM: "#0b6e4f",
    SHM_BARE: "#7bc8a4",
    TCP: "#274690",
    TCP_BARE: "#8fa8d6",
}
_OTHER = ("#e08e45", "#9b5de5", "#b7b7b7")
_GROUP_WIDTH = 0.85


def draw(path: Path, done: Sequence[Turn]) -> None:
    """Write a PNG (or another format by the suffix): one group of bars per case. Raises ExtraMissing."""
    require_extra("matplotlib", "--plot")
    from matplotlib.figure import Figure

    rates = medians(done, lambda turn: turn.bytes_per_s / 1e9)
    names = list(dict.fromkeys(turn.contestant for turn in done))
    cases = list(dict.fromkeys(turn.case for turn in done))
    others = [name for name in names if name not in _COLORS]
    colors = {**_COLORS, **{name: _OTHER[i % len(_OTHER)] for i, name in enumerate(others)}}
    drawing = Figure(figsize=(11, 4.5), layout="constrained")
    axes = drawing.subplots()
    width = _GROUP_WIDTH / len(names)
    for i, name in enumerate(names):
        places = [place + (i - (len(names) - 1) / 2) * width for place in range(len(cases))]
        heights = [rates.get((name, case), 0.0) for case in cases]
        bars = axes.bar(places, heights, width * 0.92, color=colors[name], label=name, zorder=2)
        axes.bar_label(bars, [f"{height:.1f}" for height in heights], padding=2, fontsize=7)
    axes.set_xticks(range(len(cases)), ["\n".join(case.rsplit(".", 1)) for case in cases])
    axes.set_ylabel("GB/s, median over rounds")
    axes.grid(axis="y", color="#e5e5e5", zorder=0)
    drawing.legend(loc="outside lower center", ncols=-(-len(names) // 2), frameon=False, fontsize=9)
    drawing.savefig(path, dpi=140)


ENVIRONMENT = PeerEnvironment(
    name="checksums", steps=(("numpy==2.4.6", "isal==1.9.1", "google-crc32c==1.9.0", "xxhash==4.1.0"),)
)
PIECE_KIB = (64, 256, 1024)


async def rows(note: Callable[[str], None]) -> list[Row]:
    """Measure rates alone, cost after a copy of the same piece, and whether other threads run. Raises CannotMeasure."""
    python = ensure(ENVIRONMENT, note)
    process = EngineProcess(
        Launch(
            name="checksums",
            python=python,
            adapter=str(ENDS / "on_checksums.py"),
            options={"class": "Sender", "pools": {}, "pool_bytes": 0, "piece_kib": PIECE_KIB},
            host=END_HOST,
        )
    )
    try:
        await process.spawn()
        await process.ready()
        found: list[dict[str, Any]] = (await process.run({"do": "run", "with": {"name": "all"}}))["result"]
    finally:
        await process.stop()
    result = []
    for seen in found:
        name = f"checksum.{seen['name']}.{seen['kib']}k"
        result += [
            figure(name, seen["hot"] / 1e9, "GB/s, cache-hot"),
            figure(f"{name}.after_copy", seen["cost_percent"], "% more time than the copy alone"),
            figure(f"{name}.gil", seen["blocked_percent"], "% of a long call in which no other thread gets a turn"),
        ]
    return result


BUSY_LOAD = 0.5
"""Number of running processes per CPU from which on measurements are disturbed."""
LIMIT_S = 30.0
"""Time limit of the rounds unless their number is given: with start and checks the command takes about a minute."""


class PeersAbsent(CannotMeasure):
    """Some peers are absent; everything else was measured."""


async def measure(given: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Measure and print the requested parts, adding to `rows` part by part, so that a later failure loses nothing.

    Raises CannotMeasure; PeersAbsent at the very end.
    """

    def note(text: str) -> None:
        err.print(f"[dim]{text}[/dim]", soft_wrap=True)

    absent: list[Absence] = []
    for part in options.parts(given):
        await _PARTS[part](given, rows, absent, out, note)
    if absent:
        reasons = "; ".join(f"{peer.name}: {peer.reason}" for peer in absent)
        raise PeersAbsent(f"peers not measured, so their goals are neither met nor missed: {reasons}")


async def _rates(
    given: argparse.Namespace,
    rows: list[Row],
    absent: list[Absence],
    out: Console,
    note: Callable[[str], None],
) -> None:
    names = options.peers(given)
    cases = _cases(given)
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    rows.append(figure("machine.load", load, "running processes per CPU in the minute before"))
    if load > BUSY_LOAD:
        note(f"{load:.1f} processes per CPU are already running: rates are unreliable, CPU times less so")
    async with AsyncExitStack() as stack:
        pools = stack.enter_context(Pools(pool_bytes(given.mib << 20)))
        field = Field(pools, stack, note)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-bench-")))
        await _admit(field, names, cases, folder, note)
        limit_s = None if given.rounds else LIMIT_S
        contest = Contest(cases=cases, num_rounds=given.rounds or options.ROUNDS, limit_s=limit_s, note=note)
        done = await field.run(contest)
    absent += field.absent
    print_turns(out, done)
    found = _rate_rows(done, names, field.absent)
    show_rows(out, [row for row in found if not row.name.startswith(("rate.", "cpu."))])
    rows += found
    if given.plot is not None:
        draw(given.plot, done)


async def _admit(
    field: Field, names: Sequence[str], cases: Sequence[Case], folder: Path, note: Callable[[str], None]
) -> None:
    for contestant in (*contestants.limits(), *contestants.ours()):
        await field.admit(contestant, cases, may_fail=False)
    makers: dict[str, Callable[[], Contestant]] = {contestants.TLS: partial(contestants.tls, folder)}
    makers |= {name: partial(contestants.peer, name, note) for name in names}
    for name, make in makers.items():
        try:
            contestant = make()
        except CannotMeasure as error:
            field.miss(name, error)
        else:
            await field.admit(contestant, cases, may_fail=True)


def _rate_rows(done: Sequence[Turn], names: Sequence[str], absent: Sequence[Absence]) -> list[Row]:
    return [
        *figures.rate_rows(done),
        *figures.cpu_rows(done),
        *figures.ratio_rows(done, names),
        *figures.checksum_rows(done),
        *figures.absence_rows(absent),
    ]


async def _planning(
    given: argparse.Namespace,
    rows: list[Row],
    _absent: list[Absence],
    out: Console,
    _note: Callable[[str], None],
) -> None:
    with Pools(pool_bytes(given.mib << 20)) as pools:
        found = figures.python_rows(seconds_per_block(_cases(given), pools))
    show_rows(out, found)
    rows += found


def _alone(measured: Callable[[Callable[[str], None]], Awaitable[list[Row]]]) -> "_Part":
    """Wrap a part that has no options."""

    async def part(
        _given: argparse.Namespace,
        rows: list[Row],
        _absent: list[Absence],
        out: Console,
        note: Callable[[str], None],
    ) -> None:
        found = await measured(note)
        show_rows(out, found)
        rows += found

    return part


def _cases(given: argparse.Namespace) -> tuple[Case, ...]:
    try:
        return make_cases(given.mib << 20)
    except ValueError as error:
        raise CannotMeasure(f"--mib {given.mib}: {error}") from None


_Part = Callable[
    [argparse.Namespace, list[Row], list[Absence], Console, Callable[[str], None]],
    Awaitable[None],
]
_PARTS: Mapping[str, _Part] = {
    "rates": _rates,
    "planning": _planning,
    "checksums": _alone(rows),
    "overlap": _alone(overlap.rows),
    "pull": _alone(pull.rows),
}
