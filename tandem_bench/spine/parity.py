"""Parity of the whole cluster, HTTP in and HTTP out, with transformers alone, token for token."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from rich.markup import escape

from tandem_bench.clusters import COLOCATED, MEMORY, Setup
from tandem_bench.errors import ClusterFailed
from tandem_bench.report import Row, figure
from tandem_bench.spine.sittings import ALONE_COLD, BATCH_COLD, Exam, Pass, Sitting, num_differing, sit

MODES = (COLOCATED, MEMORY, "shm", "tcp")
_CLUSTERS_AT_ONCE = 2
Tokens = tuple[int, ...]
Note = Callable[[str], None]


def setups(chunks: Sequence[int]) -> list[Setup]:
    """Return every mode with every chunk size, in fp32, with every prompt through both pools where there are two."""
    return [
        Setup(mode=mode, prefill_chunk_tokens=chunk, local_prefill_tokens=0, num_threads=1)
        for chunk, mode in product(chunks, MODES)
    ]


async def sit_all(wanted: Mapping[Setup, Sequence[Pass]], exam: Exam, note: Note) -> list[Sitting]:
    """Run two clusters at a time, as tokens do not depend on speed."""
    gate = asyncio.Semaphore(_CLUSTERS_AT_ONCE)

    async def one(setup: Setup, passes: Sequence[Pass]) -> Sitting:
        async with gate:
            note(f"parity: {setup.mode}, {setup.dtype}, chunks of {setup.prefill_chunk_tokens}")
            try:
                return await sit(setup, exam, passes)
            except ClusterFailed as error:
                # One retry: a failed start, such as on a taken port, says nothing about parity.
                note(f"[red]{setup.mode} did not start: {escape(str(error))}[/red]")
                return await sit(setup, exam, passes)

    # Each ends by itself: a cluster that is cancelled during its start would be left running.
    ended = await asyncio.gather(*(one(setup, passes) for setup, passes in wanted.items()), return_exceptions=True)
    for result in ended:
        if isinstance(result, BaseException):
            raise result
    return [result for result in ended if isinstance(result, Sitting)]


async def cluster_rows(
    exam: Exam, expected: Sequence[Tokens], passes: Mapping[int, Sequence[Pass]], note: Note
) -> list[Row]:
    """Count differing answers by mode, by chunk size and by pass, each summed over all the others.

    `passes`: by chunk size; every mode runs all of them.
    """
    wanted = {setup: passes[setup.prefill_chunk_tokens] for setup in setups(list(passes))}
    sittings = await sit_all(wanted, exam, note)
    wrong = {(s.setup, one): num_differing(given, expected) for s in sittings for one, given in s.answers.items()}
    _explain(sittings, wrong, note)

    def row(name: str, counts: Sequence[int]) -> Row:
        return figure(f"parity.{name}", sum(counts), f"of {len(counts) * len(exam.prompts)} answers differ", at_most=0)

    passes_seen = dict.fromkeys(one for _, one in wrong)
    rows = [row(f"mode.{mode}", [n for (setup, _), n in wrong.items() if setup.mode == mode]) for mode in MODES]
    for chunk in passes:
        rows.append(row(f"chunk.{chunk}", [n for (s, _), n in wrong.items() if s.prefill_chunk_tokens == chunk]))
    rows += [row(f"pass.{one.name}", [n for (_, other), n in wrong.items() if other == one]) for one in passes_seen]
    return rows + _route_rows(sittings) + _cache_rows(sittings)


def _explain(sittings: Sequence[Sitting], wrong: Mapping[tuple[Setup, Pass], int], note: Note) -> None:
    """Name what a sum hides: which cluster, pass and prompts differ."""
    for sitting in sittings:
        where = f"{sitting.setup.mode}, chunks of {sitting.setup.prefill_chunk_tokens}"
        if len(sitting.placements) > 1:
            note(f"[red]{where}: placements {sitting.placements}[/red]")
        for one, given in sitting.answers.items():
            if count := wrong[sitting.setup, one]:
                note(f"[red]{where}, {one.name}: {count} differ[/red]")
            if one.is_hit and (missed := [i for i, answer in enumerate(given) if not answer.cached_tokens]):
                note(f"[red]{where}, {one.name}: prompts {missed} found no prefix[/red]")


def _route_rows(sittings: Sequence[Sitting]) -> list[Row]:
    """Report the router's own counts, so that a fallback is not mistaken for a hand-off."""
    rows = []
    for mode in MODES:
        mine = [s for s in sittings if s.setup.mode == mode]
        requests, through_both = sum(s.num_requests for s in mine), sum(s.num_disaggregated for s in mine)
        goal = {"at_most": 0.0} if mode == COLOCATED else {"at_least": float(requests)}
        rows.append(figure(f"parity.both_pools.{mode}", through_both, f"of {requests} requests", **goal))
    retries = sum(s.num_retries for s in sittings)
    return [*rows, figure("parity.retries", retries, "attempts after a first", at_most=0)]


def _cache_rows(sittings: Sequence[Sitting]) -> list[Row]:
    """Check that cold runs used no cache and that warm runs did."""
    cold = [a.cached_tokens for s in sittings for one, given in s.answers.items() if not one.is_hit for a in given]
    hits = [a.cached_tokens for s in sittings for one, given in s.answers.items() if one.is_hit for a in given]
    return [
        figure("parity.cached.cold", sum(cold), "tokens from a cache", at_most=0),
        figure("parity.cached.hit_missed", hits.count(0), f"of {len(hits)} found no prefix", at_most=0),
        figure("parity.cached.hit_mean", sum(hits) / max(1, len(hits)), "tokens from a cache"),
    ]


async def half_precision_rows(exam: Exam, fp32: Sequence[Tokens], bf16: Sequence[Tokens], note: Note) -> list[Row]:
    """Return how often bf16 gives the same tokens, without a goal. `fp32`, `bf16`: transformers' own answers."""
    setups = [
        Setup(mode=mode, dtype=dtype, local_prefill_tokens=0, num_threads=1)
        for mode, dtype in (("shm", "float32"), (COLOCATED, "bfloat16"), ("shm", "bfloat16"))
    ]
    passes = (ALONE_COLD, BATCH_COLD)
    single, colocated, shipped = await sit_all(dict.fromkeys(setups, passes), exam, note)
    own_fp32 = [answer.token_ids for answer in single.answers[ALONE_COLD]]
    own_alone = [answer.token_ids for answer in colocated.answers[ALONE_COLD]]

    def rate(name: str, answers: Sequence[Tokens], expected: Sequence[Tokens]) -> Row:
        same = sum(a == b for a, b in zip(answers, expected, strict=True))
        return figure(f"bf16.{name}", 100.0 * same / len(expected), "% of prompts identical")

    rows = [rate("transformers_vs_its_fp32", bf16, fp32)]
    for sitting in (colocated, shipped):
        for one in passes:
            answers = [answer.token_ids for answer in sitting.answers[one]]
            where = f"{sitting.setup.mode}.{one.name}"
            rows.append(rate(f"{where}.vs_transformers", answers, bf16))
            rows.append(rate(f"{where}.vs_cluster_fp32", answers, own_fp32))
            if (sitting, one) != (colocated, ALONE_COLD):
                rows.append(rate(f"{where}.vs_colocated_alone", answers, own_alone))
    return rows
