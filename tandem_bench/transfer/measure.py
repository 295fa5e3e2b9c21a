"""The whole of `python -m tandem_bench transfer`: rates in rounds, Python's share, checksums; rows as they come."""

import argparse
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure
from tandem_bench.report import show as show_rows
from tandem_bench.transfer import checksums, contestants, figures, options, plot, tables
from tandem_bench.transfer.cases import Case, make_cases, pool_bytes
from tandem_bench.transfer.clusters import overlap, pull
from tandem_bench.transfer.contestants import Contestant
from tandem_bench.transfer.planning import seconds_per_block
from tandem_bench.transfer.pools import Pools
from tandem_bench.transfer.rounds import Absence, Contest, Field, Turn

BUSY_LOAD = 0.5
"""Running processes per CPU from which on others disturb what is measured."""
LIMIT_S = 30.0
"""Of the rounds, where nobody said how many: with starting and checking the whole command takes about a minute."""


class PeersAbsent(CannotMeasure):
    """Everything else was measured."""


async def measure(given: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Measure and show what was asked for; `rows` grow part by part, so that a later part's failure loses nothing.

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
        note(f"{load:.1f} processes per CPU are running already: rates will say little, CPU times more")
    async with AsyncExitStack() as stack:
        pools = stack.enter_context(Pools(pool_bytes(given.mib << 20)))
        field = Field(pools, stack, note)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="tandem-bench-")))
        await _admit(field, names, cases, folder, note)
        limit_s = None if given.rounds else LIMIT_S
        contest = Contest(cases=cases, num_rounds=given.rounds or options.ROUNDS, limit_s=limit_s, note=note)
        done = await field.run(contest)
    absent += field.absent
    tables.print_tables(out, done)
    found = _rate_rows(done, names, field.absent)
    show_rows(out, [row for row in found if not row.name.startswith(("rate.", "cpu."))])
    rows += found
    if given.plot is not None:
        plot.draw(given.plot, done)


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
    """A part that no option concerns."""

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
    "checksums": _alone(checksums.rows),
    "overlap": _alone(overlap.rows),
    "pull": _alone(pull.rows),
}
