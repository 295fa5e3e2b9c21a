"""Rounds: their order, comparisons, and rounds skipped for lack of time."""

from dataclasses import replace

import pytest

from tandem_bench.engine import rounds
from tandem_bench.engine.figures import ratio_rows, speed_rows, summarize
from tandem_bench.engine.footprint import NOTHING, Footprint
from tandem_bench.engine.roofline import ModelCost
from tandem_bench.engine.rounds import Cell, Measurement, Plan, TimeBox, guess, round_ratios, run_rounds
from tandem_bench.engine.workload import Job, Outcome
from tandem_bench.peers.process import Started
from tandem_bench.shapes import SHAPES

ONE = Cell(concurrency=1, prompt_tokens=8, num_tokens=3)
FOUR = Cell(concurrency=4, prompt_tokens=8, num_tokens=3)
BUSY = Cell(concurrency=4, prompt_tokens=8, num_tokens=3, with_newcomers=True)
COST = ModelCost.from_config(SHAPES["tiny"].model_config(), "bfloat16")


class FakeEngine:
    """A contestant with a fake time set by the test."""

    def __init__(self, name: str, step_s: float) -> None:
        self.name = name
        self._step_s = step_s
        self.jobs: list[Job] = []

    async def start(self) -> Started:
        return Started(ready_s=0.0, load_s=0.0, about={})

    async def run(self, job: Job) -> Outcome:
        self.jobs.append(job)
        times = tuple(self._step_s * (i + 1) for i in range(job.num_tokens))
        return Outcome(job=job, arrivals_s=(times,) * len(job.prompts))

    @property
    def footprint(self) -> Footprint:
        return NOTHING

    async def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def _no_settle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_SETTLE_S", 0.0)


def plan(*cells: Cell, num_rounds: int = 1, notes: list[str] | None = None) -> Plan:
    note = (notes if notes is not None else []).append
    return Plan(cells=cells, num_rounds=num_rounds, vocab_size=512, bandwidth=lambda: 1e9, note=note)


async def test_rounds_every_engine_gets_the_same_job_in_rotating_order() -> None:
    engines = [FakeEngine(name, 1.0) for name in ("tandem", "a", "b")]
    done = await run_rounds(plan(ONE, num_rounds=3), engines, TimeBox(None))
    order = [seen.contestant for seen in done]
    assert order == ["tandem", "a", "b", "a", "b", "tandem", "b", "tandem", "a"]
    assert engines[0].jobs == engines[1].jobs == engines[2].jobs
    assert len({job.prompts for job in engines[0].jobs}) == 3


async def test_rounds_newcomers_need_supporting_engine() -> None:
    engines = [FakeEngine("tandem", 1.0), FakeEngine("transformers", 1.0)]
    done = await run_rounds(plan(BUSY), engines, TimeBox(None))
    assert [seen.contestant for seen in done] == ["tandem"]
    assert len(engines[0].jobs[0].newcomers) > 1


async def test_rounds_job_beyond_the_time_is_skipped_and_noted() -> None:
    notes: list[str] = []
    clock = iter([0.0, *[5.0] * 20])
    done = await run_rounds(
        plan(ONE, FOUR, notes=notes), [FakeEngine("tandem", 2.0)], TimeBox(10.0, lambda: next(clock))
    )
    assert [seen.cell for seen in done] == [ONE]
    assert any("c4.p8: skipped" in text for text in notes)


def test_rounds_guess_grows_with_work() -> None:
    known = [measurement("tandem", 0, 1.0, cell=ONE)]
    assert guess(FOUR, []) is None
    near, far, busy = (guess(cell, known) for cell in (ONE, FOUR, BUSY))
    assert near is not None
    assert far is not None
    assert busy is not None
    assert near < far < busy


def measurement(
    name: str, round_index: int, step_s: float, *, cell: Cell = FOUR, bandwidth: float = 1e9
) -> Measurement:
    job = cell.job(round_index, 512)
    times = tuple(step_s * (i + 1) for i in range(job.num_tokens))
    return Measurement(
        contestant=name,
        cell=cell,
        round_index=round_index,
        outcome=Outcome(job=job, arrivals_s=(times,) * len(job.prompts)),
        read_bytes_per_s=bandwidth,
    )


def test_rounds_ratios_are_within_one_round() -> None:
    # The machine halves its speed in the second round: the ratios do not move.
    done = [
        measurement(name, round_index, base * slow)
        for round_index, slow in ((0, 1.0), (1, 2.0), (2, 1.0))
        for name, base in (("tandem", 1.0), ("a", 2.0), ("b", 3.0))
    ]
    ratios = round_ratios(done, FOUR, lambda seen: seen.decode_tokens_per_s)
    assert ratios["a"] == pytest.approx({0: 2.0, 1: 2.0, 2: 2.0})
    assert ratios["b"] == pytest.approx({0: 3.0, 1: 3.0, 2: 3.0})
    assert ratios["best"] == ratios["a"]


def test_rounds_without_tandem_or_peer_are_not_compared() -> None:
    done = [measurement("tandem", 0, 1.0), measurement("a", 1, 1.0)]
    assert round_ratios(done, FOUR, lambda seen: seen.decode_tokens_per_s) == {}


def test_rounds_goals_are_against_best_peer() -> None:
    done = [measurement("tandem", 0, 1.0), measurement("a", 0, 1.3), measurement("b", 0, 1.1)]
    rows = {row.name: row for row in ratio_rows(done, COST, judged=True)}
    assert rows["ratio.c4.p8.decode.a"].met is None
    assert rows["ratio.c4.p8.decode.best"].met is False  # 1.1 < 1.2
    assert rows["ratio.c4.p8.prefill.best"].value == pytest.approx(1.1)
    assert all(row.met is None for row in ratio_rows(done, COST, judged=False))


def test_rounds_own_dense_weights_are_no_peer() -> None:
    done = [measurement("tandem", 0, 1.0), measurement("tandem bfloat16", 0, 2.0), measurement("a.b c", 0, 3.0)]
    ratios = round_ratios(done, FOUR, lambda seen: seen.decode_tokens_per_s)
    assert ratios["tandem bfloat16"] == pytest.approx({0: 2.0})
    assert ratios["best"] == ratios["a.b c"]
    rows = {row.name: row for row in ratio_rows(done, COST, judged=True)}
    assert rows["ratio.c4.p8.decode.a_b_c"].value == pytest.approx(3.0)
    # The goals of four bits, at one sequence and at sixteen.
    one = Cell(concurrency=1, prompt_tokens=8, num_tokens=5)
    done = [measurement("tandem", 0, 1.0, cell=one), measurement("tandem bfloat16", 0, 2.3, cell=one)]
    four_bits = replace(COST, weight_bits=4)
    found = {row.name: row.met for row in ratio_rows(done, four_bits, judged=True)}
    assert found["ratio.c1.p8.decode.tandem_bfloat16"] is False
    assert {row.met for row in ratio_rows(done, COST, judged=True) if "bfloat16" in row.name} == {None}


def test_rounds_lower_machine_limit_decides_single_stream_goal() -> None:
    rate = measurement("tandem", 0, 1.0, cell=ONE).outcome.decode_tokens_per_s
    at_limit = rate * COST.decode_step_bytes(1, 9.5) / 0.95  # 95 % of this bandwidth is used
    done = [measurement("tandem", 0, 1.0, cell=ONE, bandwidth=at_limit), measurement("a", 0, 1.0, cell=ONE)]
    rows = {row.name: row for row in ratio_rows(done, COST, judged=True)}
    assert rows["ratio.c1.p8.decode.wanted"].met is True
    far = [measurement("tandem", 0, 1.0, cell=ONE, bandwidth=10 * at_limit), measurement("a", 0, 1.0, cell=ONE)]
    rows = {row.name: row for row in ratio_rows(far, COST, judged=True)}
    assert rows["ratio.c1.p8.decode.wanted"].met is False


def test_rounds_summaries_are_medians_relative_to_bandwidth() -> None:
    done = [measurement("tandem", i, step_s, bandwidth=1e6 / step_s) for i, step_s in enumerate((1.0, 2.0, 4.0))]
    (summary,) = summarize(done, COST)
    assert summary.decode_tokens_per_s == pytest.approx(4 / 2.0)
    expected = summary.decode_tokens_per_s / COST.decode_limit(4, 9.5, 1e6 / 2.0)
    assert summary.limit_share == pytest.approx(expected)
    names = [row.name for row in speed_rows([summary], judged=True)]
    assert "tandem.c4.p8.decode_of_limit" in names


def test_rounds_itl_during_prefills_is_judged_at_sixteen() -> None:
    cell = Cell(concurrency=16, prompt_tokens=8, num_tokens=3, with_newcomers=True)
    for step_s, met in ((0.39, True), (0.41, False)):
        (row,) = speed_rows(summarize([measurement("tandem", 0, step_s, cell=cell)], COST), judged=True)
        assert (row.name, row.met) == ("tandem.c16.prefills.itl_p99", met)
