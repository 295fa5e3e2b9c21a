"""Figures from measurements: medians over rounds, shares of the roofline, ratios to the peers, and the goals."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tandem_bench.engine.ceilings import Ceilings
from tandem_bench.engine.contestants import PLAIN, TANDEM
from tandem_bench.engine.footprint import Footprint
from tandem_bench.engine.roofline import ModelCost, mean_context
from tandem_bench.engine.rounds import Cell, Measurement, round_ratios
from tandem_bench.engine.workload import Outcome, StepCosts, median_of
from tandem_bench.peers.process import Started
from tandem_bench.report import Row, figure
from tandem_bench.spine.speed import percentile

DECODE_GOAL = 1.2
"""Goal relative to the best peer of the same round, at concurrency 4 and 16; at 1 or this share of the limit:"""
LIMIT_SHARE_GOAL = 0.9
LOW_BIT_SHARE_GOALS = {8: 0.85, 4: 0.75}
"""The same by the bits of quantized weights."""
PLAIN_GOALS = {1: 2.4, 16: 1.3}
"""Goals of four bits relative to the same engine with sixteen, by concurrency."""
PREFILL_GOAL = 1.5
GAP_GOAL_S = 0.4
OVERHEAD_GOAL_PERCENT = 3.0
LOAD_GOAL_S = 4.0
MEMORY_GOAL_BYTES = 400 * 10**6
"""Goal for memory beyond weights and KV pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Medians of one engine in one cell over its rounds."""

    contestant: str
    cell: Cell
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    first_token_s: float
    gap_p50_s: float
    gap_p99_s: float
    read_bytes_per_s: float
    """Minimum rate at which the engine must have read memory while decoding."""
    limit_share: float
    """Share of the rate that the bandwidth measured around the job would allow."""
    flops_per_s: float
    """Minimum rate of operations that the engine must have computed during the prompts."""
    machine_bytes_per_s: float
    """Read bandwidth, measured around each job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Start-up and memory of one engine, apart from its measurements."""

    started: Started
    footprint: Footprint


def summarize(done: Sequence[Measurement], cost: ModelCost) -> list[Summary]:
    """Summarize each engine and cell, in the order in which they first ran."""
    groups: dict[tuple[str, Cell], list[Measurement]] = {}
    for seen in done:
        groups.setdefault((seen.contestant, seen.cell), []).append(seen)
    return [_summary(name, cell, group, cost) for (name, cell), group in groups.items()]


def _summary(name: str, cell: Cell, group: Sequence[Measurement], cost: ModelCost) -> Summary:
    context = mean_context(cell.prompt_tokens, cell.num_tokens)
    step_bytes = cost.decode_step_bytes(cell.concurrency, context)
    outcomes = [seen.outcome for seen in group]
    decode = median(seen.decode_tokens_per_s for seen in outcomes)
    prefill = median(seen.prefill_tokens_per_s for seen in outcomes)
    return Summary(
        contestant=name,
        cell=cell,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
        first_token_s=median(seen.first_token_s for seen in outcomes),
        gap_p50_s=median(seen.gap_s(50) for seen in outcomes),
        gap_p99_s=median(seen.gap_s(99) for seen in outcomes),
        read_bytes_per_s=decode / cell.concurrency * step_bytes,
        limit_share=median(
            seen.outcome.decode_tokens_per_s / cost.decode_limit(cell.concurrency, context, seen.read_bytes_per_s)
            for seen in group
        ),
        flops_per_s=prefill * cost.prompt_flops_per_token(cell.prompt_tokens),
        machine_bytes_per_s=median(seen.read_bytes_per_s for seen in group),
    )


def speed_rows(summaries: Iterable[Summary], *, judged: bool) -> list[Row]:
    """Return every summary's figures; `judged` compares Tandem's with the goals that need no peer."""
    rows: list[Row] = []
    for seen in summaries:
        name = f"{seen.contestant}.{seen.cell.label}".replace(" ", "_")
        if seen.cell.with_newcomers:
            goal = GAP_GOAL_S if judged and seen.contestant == TANDEM and seen.cell.concurrency == 16 else None
            rows.append(figure(f"{name}.itl_p99", seen.gap_p99_s, "s", at_most=goal))
            continue
        rows += [
            figure(f"{name}.prefill", seen.prefill_tokens_per_s, "tokens/s"),
            figure(f"{name}.prefill_rate", seen.flops_per_s / 1e12, "TFLOP/s"),
            figure(f"{name}.decode", seen.decode_tokens_per_s, "tokens/s"),
            figure(f"{name}.decode_read", seen.read_bytes_per_s / 1e9, "GB/s"),
            figure(f"{name}.decode_of_limit", 100 * seen.limit_share, "%"),
            figure(f"{name}.machine_read", seen.machine_bytes_per_s / 1e9, "GB/s, around the job"),
            figure(f"{name}.ttft_p50", seen.first_token_s, "s"),
            figure(f"{name}.itl_p50", seen.gap_p50_s, "s"),
            figure(f"{name}.itl_p99", seen.gap_p99_s, "s"),
        ]
    return rows


def limit_rows(cost: ModelCost, ceilings: Ceilings, cells: Iterable[Cell]) -> list[Row]:
    """Return the roofline of the model on this machine."""
    rows = [
        figure("model.weights", cost.weights_bytes / 1e9, "GB"),
        figure("model.kv", cost.kv_numbers_per_token * cost.item_bytes / 1e3, "kB per token"),
    ]
    for cell in cells:
        if cell.with_newcomers:
            continue
        context = mean_context(cell.prompt_tokens, cell.num_tokens)
        limit = cost.decode_limit(cell.concurrency, context, ceilings.read_bytes_per_s)
        rows.append(figure(f"limit.{cell.label}.decode", limit, f"tokens/s at {context:g} tokens of context"))
    for length in sorted({cell.prompt_tokens for cell in cells if not cell.with_newcomers}):
        unit = f"tokens/s at torch's GEMM rate, {cost.prompt_flops_per_token(length) / 1e6:.3g} MFLOP each"
        rows.append(
            figure(f"limit.p{length}.prefill_gemm", cost.prefill_limit(length, ceilings.gemm_flops_per_s), unit)
        )
        if ceilings.peak_flops_per_s is not None:
            peak = cost.prefill_limit(length, ceilings.peak_flops_per_s)
            rows.append(figure(f"limit.p{length}.prefill_peak", peak, "tokens/s at the arithmetic peak"))
    return rows


def ratio_rows(done: Sequence[Measurement], cost: ModelCost, *, judged: bool) -> list[Row]:
    """Return the median ratios of Tandem to each peer and to the best one, per round."""
    rows: list[Row] = []
    for cell in dict.fromkeys(seen.cell for seen in done):
        if cell.with_newcomers:
            continue
        for kind, rate, goal in (
            ("decode", _decode_rate, DECODE_GOAL if cell.concurrency > 1 else None),
            ("prefill", _prefill_rate, PREFILL_GOAL),
        ):
            for name, ratios in round_ratios(done, cell, rate).items():
                unit = f"times {name}, median of {len(ratios)} rounds"
                at_least = goal if judged and name == "best" else None
                if judged and name == PLAIN and kind == "decode" and cost.weight_bits == 4:
                    at_least = PLAIN_GOALS.get(cell.concurrency)
                rows.append(
                    figure(
                        f"ratio.{cell.label}.{kind}.{_label(name)}", median(ratios.values()), unit, at_least=at_least
                    )
                )
        if cell.concurrency == 1 and (shares := _alone_shares(done, cell, cost)):
            share = _share_goal(cost)
            unit = f"times the smaller of {DECODE_GOAL:g} x best and {share:g} x limit"
            at_least = 1.0 if judged else None
            rows.append(figure(f"ratio.{cell.label}.decode.wanted", median(shares), unit, at_least=at_least))
    return rows


def _alone_shares(done: Sequence[Measurement], cell: Cell, cost: ModelCost) -> list[float]:
    """Return the share of the decode goal reached per round without peers: they win where memory limits all."""
    context = mean_context(cell.prompt_tokens, cell.num_tokens)
    shares = []
    over_best = round_ratios(done, cell, _decode_rate).get("best", {})
    for mine in done:
        if mine.cell != cell or mine.contestant != TANDEM or mine.round_index not in over_best:
            continue
        rate = mine.outcome.decode_tokens_per_s
        limit = cost.decode_limit(cell.concurrency, context, mine.read_bytes_per_s)
        shares.append(max(over_best[mine.round_index] / DECODE_GOAL, rate / (_share_goal(cost) * limit)))
    return shares


def _share_goal(cost: ModelCost) -> float:
    return LOW_BIT_SHARE_GOALS.get(cost.weight_bits, LIMIT_SHARE_GOAL)


def life_rows(entries: Mapping[str, Entry], *, judged: bool) -> list[Row]:
    """Return the start-up time and memory of every engine."""
    rows: list[Row] = []
    for contestant, entry in entries.items():
        name, is_own = _label(contestant), contestant == TANDEM
        about, memory = entry.started.about, entry.footprint
        load_goal = LOAD_GOAL_S if judged and is_own else None
        rows += [
            figure(f"{name}.start", entry.started.ready_s, "s from exec to ready"),
            figure(f"{name}.load", entry.started.load_s, "s", below=load_goal),
            figure(f"{name}.memory_peak", memory.peak_bytes / 1e6, "MB resident, files' pages included"),
            figure(f"{name}.memory_private", memory.private_bytes / 1e6, "MB anonymous or shared memory"),
        ]
        if is_own:
            stated = about["weights_bytes"] + about["kv_bytes"]
            beyond = (memory.peak_bytes - stated) / 1e6
            unit = f"MB of the peak beyond weights and KV pool ({stated / 1e6:.0f} MB)"
            goal = MEMORY_GOAL_BYTES / 1e6 if judged else None
            rows.append(figure(f"{name}.memory_beyond", beyond, unit, at_most=goal))
    return rows


def step_rows(done: Sequence[Measurement], *, judged: bool) -> list[Row]:
    """Return the breakdown of a step of Tandem's engine, by cell."""
    rows: list[Row] = []
    for cell in dict.fromkeys(seen.cell for seen in done):
        costs = [seen.outcome.steps for seen in done if seen.cell == cell and seen.outcome.steps is not None]
        if not costs or cell.with_newcomers:
            continue
        name = f"{TANDEM}.{cell.label}"
        goal = OVERHEAD_GOAL_PERCENT if judged and cell.concurrency == 16 else None
        rows += [
            figure(f"{name}.step_p50", 1000 * _step_s(costs, 50), "ms, decoding"),
            figure(f"{name}.step_p99", 1000 * _step_s(costs, 99), "ms, decoding"),
            figure(
                f"{name}.overhead",
                median(seen.overhead_percent for seen in costs),
                "% of a step outside the model",
                at_most=goal,
            ),
            figure(
                f"{name}.overhead_scheduling",
                median(seen.scheduling_percent for seen in costs),
                "% of a step outside the runner",
            ),
        ]
    return rows


def _step_s(costs: Sequence[StepCosts], percent: float) -> float:
    return median_of([percentile(seen.decode_steps_s, percent) for seen in costs if seen.decode_steps_s])


def _decode_rate(outcome: Outcome) -> float:
    return outcome.decode_tokens_per_s


def _prefill_rate(outcome: Outcome) -> float:
    return outcome.prefill_tokens_per_s


def _label(contestant: str) -> str:
    """Return a contestant's name as part of a row's: without spaces and dots."""
    return contestant.replace(" ", "_").replace(".", "_")
