"""Definitions of the times by which every engine is measured."""

import math
from random import Random

import pytest

from tandem_bench.client import Completion
from tandem_bench.engine.contestants import arrivals
from tandem_bench.engine.workload import Job, Outcome, outcome, random_prompts

JOB = Job(prompts=((1, 2, 3), (4, 5, 6, 7, 8)), num_tokens=3)


def seen(*rows: tuple[float, ...]) -> Outcome:
    return Outcome(job=JOB, arrivals_s=rows)


def test_outcome_prefill_ends_with_the_last_first_token() -> None:
    done = seen((1.0, 1.5, 4.0), (2.0, 3.0, 4.0))
    assert done.prefill_s == 2.0
    assert done.prefill_tokens_per_s == 8 / 2.0
    assert done.decode_tokens_per_s == 3 / 2.0  # 1.5 came while the other was in its prompt
    assert done.first_token_s == 1.5


def test_outcome_gaps_are_between_tokens_of_one_answer() -> None:
    done = seen((1.0, 1.5, 4.0), (2.0, 3.0, 4.0))
    assert sorted(done.gaps_s) == [0.5, 1.0, 1.0, 2.5]
    assert done.gap_s(50) == 1.0
    assert done.gap_s(99) == 2.5


def test_outcome_of_single_tokens_has_no_decode_rate() -> None:
    done = Outcome(job=Job(prompts=((1,), (2,)), num_tokens=1), arrivals_s=((1.0,), (2.0,)))
    assert math.isnan(done.decode_tokens_per_s)
    assert math.isnan(done.gap_s(99))


@pytest.mark.parametrize("rows", [((1.0, 2.0, 3.0),), ((1.0, 2.0), (1.0, 2.0, 3.0))])
def test_outcome_with_missing_tokens_is_refused(rows: tuple[tuple[float, ...], ...]) -> None:
    with pytest.raises(ValueError, match="requested for"):
        seen(*rows)


def test_outcome_from_reply_includes_steps() -> None:
    steps = {"num_steps": 4, "wall_s": 2.0, "execute_s": 1.9, "model_s": 1.8, "decode_steps_s": [0.1, 0.2]}
    reply = {"arrivals_s": [[1, 2, 3]] * 2, "num_newcomers": 5, "steps": steps, "tokens": [[7, 8, 9]] * 2}
    done = outcome(JOB, reply)
    assert done.num_newcomers == 5
    assert done.tokens == ((7, 8, 9),) * 2
    assert done.steps is not None
    assert done.steps.overhead_percent == pytest.approx(10)
    assert done.steps.scheduling_percent == pytest.approx(5)


def test_random_prompts_are_reproducible_with_distinct_prefixes() -> None:
    prompts = random_prompts(Random("a"), 8, 32, 65_536)
    assert prompts == random_prompts(Random("a"), 8, 32, 65_536)
    assert {len(prompt) for prompt in prompts} == {32}
    assert len({prompt[:4] for prompt in prompts}) == 8
    assert all(300 <= token < 65_536 for prompt in prompts for token in prompt)


def test_arrivals_are_restored_from_stream_gaps() -> None:
    answer = Completion(
        request_id="cmpl-1",
        token_ids=(1, 2, 3, 4),
        cached_tokens=0,
        first_token_s=1.0,
        gaps_s=(0.5, 0.25),
        prefill_s=0.0,
        transfer_s=0.0,
    )
    assert arrivals(answer) == (1.0, 1.0, 1.5, 1.75)
