"""The engine in process on a tiny model: real scheduler, runner and tokens; and handicapped variants."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tandem_bench.engine import baselines, policies
from tandem_bench.engine.baselines import Bench
from tandem_bench.engine.options import BASELINE_NAMES
from tandem_bench.engine.policies import Ask, Lengths
from tandem_bench.engine.rig import Rig, assemble_from
from tandem_bench.engine.workload import Job, random_prompts
from tandem_bench.make_model import write_model
from tandem_bench.prompts import Prompt
from tandem_bench.shapes import SHAPES
from tandem_bench.spine import measure

VOCAB = SHAPES["tiny"].vocab_size


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder, SHAPES["tiny"], dtype="float32")
    return folder


@pytest.fixture(scope="module")
def rig(model: Path) -> Iterator[Rig]:
    overrides = {
        "model.path": str(model),
        "engine.device": "cpu",
        "engine.num_blocks": 96,
        "engine.num_threads": 1,
        "engine.prefill_chunk_tokens": 32,
    }
    with Rig(assemble_from(overrides)) as made:
        yield made


def test_rig_tokens_equal_transformers_and_times_increase(rig: Rig, model: Path) -> None:
    prompts = random_prompts(Random("rig"), 5, 40, VOCAB)
    done = rig.run(Job(prompts=prompts, num_tokens=6))
    wanted = measure.answers(model, [Prompt(token_ids=prompt) for prompt in prompts], 6, dtype="float32")
    assert list(done.tokens) == wanted
    assert all(gap >= 0 for gap in done.gaps_s)
    assert all(row[0] > 0 for row in done.arrivals_s)


def test_rig_counts_steps_and_their_time(rig: Rig) -> None:
    done = rig.run(Job(prompts=random_prompts(Random("steps"), 3, 40, VOCAB), num_tokens=5))
    assert done.steps is not None
    # 40 tokens in chunks of 32, then one token at a time.
    assert done.steps.num_steps >= 6
    assert 0 < done.steps.model_s < done.steps.execute_s < done.steps.wall_s <= done.end_s + 0.5
    assert 0 < done.steps.scheduling_percent < done.steps.overhead_percent < 100
    assert 3 <= len(done.steps.decode_steps_s) < done.steps.num_steps


def test_rig_newcomers_arrive_during_decode(rig: Rig) -> None:
    rng = Random("newcomers")
    job = Job(prompts=random_prompts(rng, 3, 20, VOCAB), num_tokens=24, newcomers=random_prompts(rng, 40, 24, VOCAB))
    done = rig.run(job)
    assert 1 <= done.num_newcomers < 40
    alone = rig.run(Job(prompts=job.prompts, num_tokens=24))
    assert done.tokens == alone.tokens
    assert rig.parts.scheduler.load().num_running == 0


def test_rig_output_depends_on_whole_context(rig: Rig) -> None:
    """Random weights must not yield a model that ignores its prompt: benchmarks compare its tokens."""
    (prompt,) = random_prompts(Random("context"), 1, 60, VOCAB)
    changed = (prompt[0] ^ 1, *prompt[1:])
    first, second = rig.run(Job(prompts=(prompt, changed), num_tokens=8)).tokens
    assert first != second


LENGTHS = Lengths(mean_prompt=20, mean_answer=8, most=64)


def test_bench_lengths_are_mixed_and_bounded() -> None:
    asks = LENGTHS.draw(Random(0), 2000, 50)
    assert asks == LENGTHS.draw(Random(0), 2000, 50)
    assert max(len(ask.prompt) + ask.num_tokens for ask in asks) == 64
    assert sum(ask.num_tokens for ask in asks) / 2000 == pytest.approx(8, rel=0.15)
    lengths = sorted(ask.num_tokens for ask in asks)
    assert lengths[1000] < 7
    assert lengths[-20] > 24


def test_policies_closed_and_padded_batches_hold_same_requests() -> None:
    asks = LENGTHS.draw(Random(0), 10, 50)
    static, padded = deque(asks), deque(asks)
    for size in (4, 4, 2):
        assert policies.closed(4)(static, 1) == []
        batch, rectangle = policies.closed(4)(static, 0), policies.padded(4)(padded, 0)
        assert len(batch) == size
        assert {len(ask.prompt) for ask in rectangle} == {max(len(ask.prompt) for ask in batch)}
        assert {ask.num_tokens for ask in rectangle} == {max(ask.num_tokens for ask in batch)}
        for ask, wide in zip(batch, rectangle, strict=True):
            assert wide.prompt[-len(ask.prompt) :] == ask.prompt
            assert wide.num_useful_tokens == ask.num_tokens
    assert not static
    assert policies.padded(4)(padded, 0) == []


def test_bench_arrivals_have_requested_rate() -> None:
    asks = policies.arriving(Random(0), LENGTHS.draw(Random(0), 1000, 50), 5.0)
    assert asks[-1].arrival_s == pytest.approx(200, rel=0.1)
    assert [ask.arrival_s for ask in asks] == sorted(ask.arrival_s for ask in asks)


def test_policies_reserved_slots_count_full_memory(rig: Rig) -> None:
    parts = rig.parts
    asks = [Ask(prompt=tuple(range(20, 36)), num_tokens=4)]
    paged = policies.serve(parts.scheduler, parts.runner, asks, policies.continuous)
    slots = policies.serve(parts.scheduler, parts.runner, asks, policies.continuous, reserved_tokens=160)
    assert [answer.num_tokens for answer in (*paged.answers, *slots.answers)] == [4, 4]
    # 16 tokens fill their block; 17, 18 and 19 have two.
    assert paged.kv_use == pytest.approx((1 + 17 / 32 + 18 / 32 + 19 / 32) / 4)
    assert slots.kv_use == pytest.approx((16 + 17 + 18 + 19) / 160 / 4)


def test_bench_times_count_from_own_arrival(rig: Rig) -> None:
    parts = rig.parts
    prompt = tuple(range(20, 36))
    asks = [Ask(prompt=prompt, num_tokens=40), Ask(prompt=prompt[::-1], num_tokens=2, arrival_s=0.05)]
    served = policies.serve(parts.scheduler, parts.runner, asks, policies.closed(4))
    assert [answer.num_tokens for answer in served.answers] == [40, 2]
    assert all(0.0 < answer.first_s < answer.end_s < served.wall_s for answer in served.answers)
    assert served.wall_s >= 0.05
    assert parts.scheduler.load().num_running == 0


def test_baselines_show_a_gain(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "cached_model", lambda *_, **__: model)
    bench = Bench(
        shape="tiny",
        lengths=Lengths(mean_prompt=20, mean_answer=8, most=128),
        num_blocks=64,
        num_slots=3,
        max_rows=16,
        batch_size=4,
        num_asks=12,
        contexts=(64,),
        crowd=(2, 64),
    )
    rows = baselines.rows(BASELINE_NAMES, lambda _: None, bench=bench, settings={"engine.num_threads": 1})
    values = {row.name: row.value for row in rows}
    for name in ("no-kv-cache.64", "no-kv-cache.2x64", "contiguous-kv", "static-batching", "padded-batches"):
        assert values[f"baseline.{name}.gain"] > 0
    # Counted, not timed: these hold on any machine.
    assert values["baseline.contiguous-kv.rows"] == 3
    assert values["baseline.contiguous-kv.rows_paged"] > 3
    assert values["baseline.contiguous-kv.use_paged"] > 2 * values["baseline.contiguous-kv.use"]
