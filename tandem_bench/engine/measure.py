"""All of `python -m tandem_bench engine`: ceilings, engines in rounds, the worker, baselines; rows as they come."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console

from engine.model.config import load_model_config
from engine.model.spec import ModelSpec
from tandem.config.cluster import load
from tandem_bench.engine import ceilings, figures, options, plot, tables
from tandem_bench.engine.contestants import (
    TANDEM,
    Contestant,
    Stage,
    WorkerContestant,
    ours,
    peer,
)
from tandem_bench.engine.figures import Entry, Summary
from tandem_bench.engine.roofline import ModelCost
from tandem_bench.engine.rounds import Cell, Measurement, Plan, TimeBox, run_rounds, warm_up
from tandem_bench.engine.workload import OUTPUT_TOKENS, PROMPT_TOKENS
from tandem_bench.errors import CannotMeasure
from tandem_bench.make_model import cached_model
from tandem_bench.peers.process import Started
from tandem_bench.report import Row
from tandem_bench.report import print_table as show_rows
from tandem_bench.shapes import REFERENCE, SHAPES

CONCURRENCIES = (1, 4, 16)
QUICK_TOKENS = 32
"""Answer tokens where the whole command must end within a minute."""
QUICK_LIMIT_S = 50.0
_BLOCK = 16
_SPARE_BLOCKS = 32
_WORKER_EXTRA_S = 5.0
"""Additional start-up time of a cluster, which starts a router and a supervisor as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Which cells are measured, how often, and within what time."""

    cells: tuple[Cell, ...]
    prefill_cells: tuple[Cell, ...]
    worker_cells: tuple[Cell, ...]
    num_rounds: int
    limit_s: float | None

    @classmethod
    def from_options(cls, given: argparse.Namespace) -> "Scale":
        """Choose quick without flags; with peers the full workload; `--full` adds lengths."""
        is_quick = not (given.full or given.peer)
        num_tokens = QUICK_TOKENS if is_quick else OUTPUT_TOKENS
        cells = tuple(Cell(concurrency=n, prompt_tokens=PROMPT_TOKENS, num_tokens=num_tokens) for n in CONCURRENCIES)
        lengths = tuple(
            Cell(concurrency=n, prompt_tokens=length, num_tokens=64) for n, length in ((16, 128), (1, 2048), (4, 2048))
        )
        busy = Cell(concurrency=16, prompt_tokens=128 if is_quick else 512, num_tokens=48, with_newcomers=True)
        return cls(
            cells=cells + lengths if given.full else cells,
            prefill_cells=(busy,),
            worker_cells=cells[1:2] if is_quick and not given.only else cells,
            num_rounds=given.rounds or (1 if is_quick else 3),
            limit_s=QUICK_LIMIT_S if is_quick and not given.only and not given.rounds else None,
        )

    def engine_cells(self, parts: tuple[str, ...]) -> tuple[Cell, ...]:
        """Return the jobs that engines get in each round."""
        return (self.cells if "engine" in parts else ()) + (self.prefill_cells if "prefills" in parts else ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model under measurement, and its conditions."""

    stage: Stage
    config: ModelSpec
    cost: ModelCost
    device: torch.device
    is_judged: bool
    """Whether the goals apply to this model on this machine."""


async def measure(given: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Measure and print the requested parts, adding to `rows` part by part, so that a later failure loses nothing.

    Raises CannotMeasure, ConfigError.
    """

    def note(text: str) -> None:
        err.print(f"[dim]{text}[/dim]", soft_wrap=True)

    parts = options.parts(given)
    if set(parts) & set(options.MODEL_PARTS):
        await _model(given, rows, out=out, note=note)
    for part in parts:
        if part in _OTHERS:
            note(part)
            found = _OTHERS[part](given, out, note)
            rows += found


async def _model(given: argparse.Namespace, rows: list[Row], *, out: Console, note: Callable[[str], None]) -> None:
    """Measure the parts in which engines continue prompts."""
    scale = Scale.from_options(given)
    subject = make_subject(given, scale, note)
    box = TimeBox(scale.limit_s)
    best = ceilings.measure(subject.device, getattr(torch, given.dtype), subject.stage.num_threads)
    first = best.rows() + figures.limit_rows(subject.cost, best, scale.cells)
    show_rows(out, first)
    rows += first
    summaries = await _engines(given, scale, subject, box, rows, out=out, note=note)
    if given.plot is not None and summaries:
        plot.draw(given.plot, summaries, title=_title(given, subject, summaries))


def _baselines(given: argparse.Namespace, out: Console, note: Callable[[str], None]) -> list[Row]:
    from tandem_bench.engine import baselines

    settings = {"engine.num_threads": given.threads} | dict(map(_setting, given.set))
    found = baselines.rows(options.baselines(given), note, settings=settings)
    show_rows(out, found)
    return found


def _scheduling(_given: argparse.Namespace, out: Console, _note: Callable[[str], None]) -> list[Row]:
    from tandem_bench.scheduler import step_cost

    found = step_cost.rows()
    show_rows(out, found)
    return found


def _eviction(_given: argparse.Namespace, out: Console, _note: Callable[[str], None]) -> list[Row]:
    from tandem_bench.scheduler import eviction

    return eviction.rows(out)


_OTHERS: Mapping[str, Callable[[argparse.Namespace, Console, Callable[[str], None]], list[Row]]] = {
    "baselines": _baselines,
    "scheduling": _scheduling,
    "eviction": _eviction,
}


def make_subject(given: argparse.Namespace, scale: Scale, note: Callable[[str], None]) -> Subject:
    """Find or make the model, and compute the memory that the jobs need. Raises ConfigError, CannotMeasure."""
    settings = dict(map(_setting, given.set))
    if given.bits is not None:
        settings["engine.quantization"] = f"int{given.bits}"
    load(None, settings)  # report errors in the settings before anything is measured
    if given.device == "cuda" and not torch.cuda.is_available():
        raise CannotMeasure("--device cuda: torch sees no CUDA device")
    model = given.model or cached_model(SHAPES[given.shape], dtype=given.dtype, note=note)
    config = load_model_config(model)
    cells = scale.cells + scale.prefill_cells
    longest = max([cell.prompt_tokens + cell.num_tokens for cell in cells]) + _BLOCK
    if longest > config.max_context:
        raise CannotMeasure(f"{model} has a context of {config.max_context} tokens; the jobs need {longest}")
    has_cuda = torch.cuda.is_available() and given.device != "cpu"
    stage = Stage(
        model=Path(model),
        dtype=given.dtype,
        num_threads=given.threads or os.cpu_count() or 1,
        device=given.device,
        max_model_len=longest,
        max_num_seqs=max(cell.concurrency for cell in cells) + 1,
        num_blocks=pool_blocks(cells),
        settings=settings,
        bits=given.bits,
    )
    return Subject(
        stage=stage,
        config=config,
        cost=ModelCost.from_config(config, given.dtype, bits=given.bits),
        device=torch.device("cuda" if has_cuda else "cpu"),
        is_judged=given.model is None and given.shape == REFERENCE and given.dtype == "bfloat16" and not has_cuda,
    )


def _title(given: argparse.Namespace, subject: Subject, summaries: Sequence[Summary]) -> str:
    name = given.model.name if given.model else f"{given.shape} random model"
    where = f"{subject.stage.num_threads} threads" if subject.device.type == "cpu" else subject.device.type
    rates = sorted({round(seen.machine_bytes_per_s / 1e9) for seen in summaries})
    spread = f"{rates[0]}" if len(rates) == 1 else f"{rates[0]} to {rates[-1]}"
    today = datetime.now(UTC).date()
    weights = given.dtype if given.bits is None else f"int{given.bits}"
    return f"{name}, {weights}, {where}, {today}; the memory read {spread} GB/s meanwhile"


def pool_blocks(cells: tuple[Cell, ...]) -> int:
    """Return the blocks for the largest job with all sequences at full length, a newcomer, and some spare room."""

    def needed(cell: Cell) -> int:
        resident = cell.concurrency * (-(-(cell.prompt_tokens + cell.num_tokens) // _BLOCK) + 1)
        return resident + (PROMPT_TOKENS // _BLOCK + 1 if cell.with_newcomers else 0)

    return max(map(needed, cells)) + _SPARE_BLOCKS


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if not name.startswith("engine.") or not value:
        raise CannotMeasure(f"--set must be engine.KEY=VALUE, not {text!r}")
    return name, yaml.safe_load(value)


async def _engines(
    given: argparse.Namespace,
    scale: Scale,
    subject: Subject,
    box: TimeBox,
    rows: list[Row],
    *,
    out: Console,
    note: Callable[[str], None],
) -> list[Summary]:
    """Run rounds of all engines side by side, then the worker alone."""
    parts = options.parts(given)
    done: list[Measurement] = []
    entries: Mapping[str, Entry] = {}
    if cells := scale.engine_cells(parts):
        peers = [each for name in options.peers(given) for each in peer(name, subject.stage, note)]
        contestants = [*ours(subject.stage), *peers]
        plan = _plan(cells, scale.num_rounds, subject, note)
        done, entries = await _compete(contestants, plan, box)
    if "worker" in parts:
        start_s = entries[TANDEM].started.ready_s + _WORKER_EXTRA_S if TANDEM in entries else 0.0
        if box.left_s > start_s:
            plan = _plan(scale.worker_cells, 1, subject, note)
            worker_done, worker_entries = await _compete([WorkerContestant(subject.stage)], plan, box, known=done)
            entries = {**entries, **worker_entries}
        else:
            worker_done = []
            left = f"starting it takes {start_s:.0f} s and {max(0.0, box.left_s):.0f} s are left"
            note(f"worker: skipped, {left}; use --full or --only worker")
    else:
        worker_done = []
    summaries = figures.summarize([*done, *worker_done], subject.cost)
    tables.print_summaries(out, summaries)
    rows += figures.speed_rows(summaries, judged=subject.is_judged)
    rest = [
        *figures.step_rows(done, judged=subject.is_judged),
        *figures.ratio_rows(done, subject.cost, judged=subject.is_judged),
        *figures.life_rows(entries, judged=subject.is_judged),
    ]
    # Print the judged rows of the table above again, with their verdicts.
    show_rows(out, [row for row in rows if row.met is not None] + rest)
    rows += rest
    return summaries


def _plan(cells: tuple[Cell, ...], num_rounds: int, subject: Subject, note: Callable[[str], None]) -> Plan:
    return Plan(
        cells=cells,
        num_rounds=num_rounds,
        vocab_size=subject.config.vocab_size,
        bandwidth=ceilings.ReadMeter(subject.device, subject.stage.num_threads).bytes_per_s,
        note=note,
    )


async def _compete(
    contestants: Sequence[Contestant], plan: Plan, box: TimeBox, *, known: Sequence[Measurement] = ()
) -> tuple[list[Measurement], Mapping[str, Entry]]:
    """Start all engines, run the rounds and stop all; return also each engine's start-up and memory."""
    started: dict[str, Started] = {}
    async with AsyncExitStack() as stack:
        for contestant in contestants:
            stack.push_async_callback(contestant.stop)
            started[contestant.name] = await contestant.start()
            about = started[contestant.name].about.items()
            notes = [
                f"ready after {started[contestant.name].ready_s:.1f} s",
                *(f"{key} {value}" for key, value in about),
            ]
            plan.note(f"{contestant.name}: {', '.join(notes)}")
            await warm_up(contestant, plan.vocab_size, concurrency=max(cell.concurrency for cell in plan.cells))
        done = await run_rounds(plan, contestants, box, known=known)
        entries = {
            contestant.name: Entry(started=started[contestant.name], footprint=contestant.footprint)
            for contestant in contestants
        }
    return done, entries
