"""The engine in process on a tiny model: real scheduler, real runner, real tokens; and its handicapped selves."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from bench import reference
from bench.engine_bench import baselines, policies
from bench.engine_bench.baselines import Bench
from bench.engine_bench.options import BASELINE_NAMES
from bench.engine_bench.policies import Ask, mixed_asks
from bench.engine_bench.rig import Rig, assemble_from
from bench.engine_bench.workload import Job, random_prompts
from bench.make_model import write_model
from bench.prompts import Prompt
from bench.shapes import SHAPES

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


def test_tokens_are_those_of_transformers_and_times_only_grow(rig: Rig, model: Path) -> None:
    prompts = random_prompts(Random("rig"), 5, 40, VOCAB)
    done = rig.run(Job(prompts=prompts, num_tokens=6))
    wanted = reference.answers(model, [Prompt(token_ids=prompt) for prompt in prompts], 6, dtype="float32")
    assert list(done.tokens) == wanted
    assert all(gap >= 0 for gap in done.gaps_s)
    assert all(row[0] > 0 for row in done.arrivals_s)


def test_steps_are_accounted_for(rig: Rig) -> None:
    done = rig.run(Job(prompts=random_prompts(Random("steps"), 3, 40, VOCAB), num_tokens=5))
    assert done.steps is not None
    # 40 tokens in chunks of 32, then one token at a time.
    assert done.steps.num_steps >= 6
    assert 0 < done.steps.model_s < done.steps.execute_s < done.steps.wall_s <= done.end_s + 0.5
    assert 0 < done.steps.scheduling_percent < done.steps.overhead_percent < 100
    assert 3 <= len(done.steps.decode_steps_s) < done.steps.num_steps


def test_newcomers_come_while_the_others_decode(rig: Rig) -> None:
    rng = Random("newcomers")
    job = Job(prompts=random_prompts(rng, 3, 20, VOCAB), num_tokens=24, newcomers=random_prompts(rng, 40, 24, VOCAB))
    done = rig.run(job)
    assert 1 <= done.num_newcomers < 40
    alone = rig.run(Job(prompts=job.prompts, num_tokens=24))
    assert done.tokens == alone.tokens
    assert rig.parts.scheduler.load().num_running == 0


def test_output_depends_on_the_whole_context(rig: Rig) -> None:
    """Random weights must not make a model that ignores its prompt: benchmarks compare its tokens."""
    (prompt,) = random_prompts(Random("context"), 1, 60, VOCAB)
    changed = (prompt[0] ^ 1, *prompt[1:])
    first, second = rig.run(Job(prompts=(prompt, changed), num_tokens=8)).tokens
    assert first != second


def test_closed_batches_hold_the_same_requests() -> None:
    asks = mixed_asks(Random(0), 10, vocab_size=50, prompt_tokens=(3, 9), mean_tokens=8, max_tokens=20)
    assert [ask for batch in policies.static(asks, 4) for ask in batch] == list(asks)
    assert [len(batch) for batch in policies.static(asks, 4)] == [4, 4, 2]
    for batch, rectangle in zip(policies.static(asks, 4), policies.padded(asks, 4), strict=True):
        assert {len(ask.prompt) for ask in rectangle} == {max(len(ask.prompt) for ask in batch)}
        assert {ask.num_tokens for ask in rectangle} == {max(ask.num_tokens for ask in batch)}
        for ask, wide in zip(batch, rectangle, strict=True):
            assert wide.prompt[-len(ask.prompt) :] == ask.prompt


def test_memory_of_slots_is_counted_in_full(rig: Rig) -> None:
    parts = rig.parts
    asks = [[Ask(prompt=tuple(range(20, 36)), num_tokens=4)]]
    paged = policies.serve(parts.scheduler, parts.runner, asks)
    slots = policies.serve(parts.scheduler, parts.runner, asks, reserved_tokens=160)
    assert paged.useful_tokens == slots.useful_tokens == 4
    # 16 tokens fill their block; 17, 18 and 19 have two.
    assert paged.kv_use == pytest.approx((1 + 17 / 32 + 18 / 32 + 19 / 32) / 4)
    assert slots.kv_use == pytest.approx((16 + 17 + 18 + 19) / 160 / 4)


def test_every_baseline_has_a_gain_to_tell(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "cached_model", lambda *_, **__: model)
    bench = Bench(
        shape="tiny",
        num_blocks=48,
        max_model_len=256,
        max_rows=16,
        batch_size=4,
        num_asks=12,
        mean_tokens=8,
        max_tokens=32,
        contexts=(64,),
        turns=1,
    )
    rows = baselines.rows(BASELINE_NAMES, lambda _: None, bench=bench, settings={"engine.num_threads": 1})
    values = {row.name: row.value for row in rows}
    for name in ("no-kv-cache.64", "contiguous-kv", "static-batching", "padded-batches"):
        assert values[f"baseline.{name}.gain"] > 0
    # Counted, not timed: these hold on any machine.
    assert values["baseline.contiguous-kv.rows"] == 3
    assert values["baseline.contiguous-kv.rows_paged"] > 3
    assert values["baseline.contiguous-kv.use_paged"] > 2 * values["baseline.contiguous-kv.use"]
