"""How many drafts are verified: as many as pay by measured times, and never more than a few percent in vain."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.pace import SpeculationPace, StepTimes
from engine.speculation.proposer import Draft
from engine.types.step_output import StepTimings


class Machine:
    """Steps of a machine whose times are known, each with whatever the pace lets it verify."""

    def __init__(self, *, row_s: float, chance: float, num_sequences: int, seed: int = 0, noise: float = 0.0) -> None:
        self.pace = SpeculationPace(max_rows=64, max_draft_tokens=8)
        self.rng = Random(seed)
        self.row_s, self.chance, self.num_sequences, self.noise = row_s, chance, num_sequences, noise
        self.seconds = 0.0
        self.tokens = self.drafted = 0
        self.base_s = 1.0

    @property
    def plain_rate(self) -> float:
        return self.num_sequences / self.step_s(self.num_sequences)

    def step_s(self, num_rows: int) -> float:
        return self.base_s + self.row_s * num_rows

    def run(self, num_steps: int, length: int = 4) -> float:
        """Tokens per second over so many steps, relative to none but plain ones."""
        self.seconds, self.tokens, self.drafted = 0.0, 0, 0
        for _ in range(num_steps):
            drafts = []
            if self.pace.max_drafts(self.num_sequences, beside_chunk=False):
                drafts = [Draft((1,) * length, "s")] * self.num_sequences
            lengths = self.pace.lengths(drafts, self.num_sequences)
            kept = [self.accepted(count) for count in lengths]
            for count, right in zip(lengths, kept, strict=True):
                if count:
                    self.pace.settled(Draft((1,) * count, "s"), right, is_over=False)
            rows = self.num_sequences + sum(lengths)
            seconds = self.step_s(rows) * (1.0 + self.noise * self.rng.uniform(-1.0, 1.0))
            self.pace.observe(StepTimings(0.0, seconds, 0.0, rows, self.num_sequences, False, sum(lengths), sum(kept)))
            self.seconds += seconds
            self.tokens += self.num_sequences + sum(kept)
            self.drafted += sum(lengths)
        return self.tokens / self.seconds / self.plain_rate

    def accepted(self, length: int) -> int:
        right = 0
        while right < length and self.rng.random() < self.chance:
            right += 1
        return right


@pytest.mark.parametrize("num_sequences", [1, 40])
@pytest.mark.parametrize("chance", [0.0, 0.3])
@pytest.mark.parametrize("row_s", [0.05, 0.5, 1.0])
def test_pace_useless_drafts_cost_at_most_three_percent(num_sequences: int, chance: float, row_s: float) -> None:
    machine = Machine(row_s=row_s, chance=chance, num_sequences=num_sequences, noise=0.1)
    machine.run(200)
    assert machine.run(1000) >= 0.97


def test_pace_cheap_rows_and_right_drafts_are_used_in_full() -> None:
    machine = Machine(row_s=0.01, chance=0.95, num_sequences=2)
    machine.run(100)
    assert machine.run(500) > 3.5


def test_pace_chooses_within_five_percent_of_best_fixed_number() -> None:
    for row_s, chance in ((0.1, 0.8), (0.3, 0.8)):
        machine = Machine(row_s=row_s, chance=chance, num_sequences=2)
        machine.run(200)
        found = machine.run(600, length=8)
        fixed = [
            (sum(chance**i for i in range(count + 1)) * 2 / machine.step_s(2 + 2 * count)) / machine.plain_rate
            for count in range(9)
        ]
        assert found >= 0.95 * max(fixed)


def test_pace_source_that_turns_bad_is_left_and_tried_again_later() -> None:
    machine = Machine(row_s=0.2, chance=0.9, num_sequences=1)
    machine.run(300)
    machine.chance = 0.0
    assert machine.run(1500) >= 0.96
    few = machine.drafted
    machine.chance = 0.9
    machine.run(600)
    assert machine.run(600) > 1.5
    assert machine.drafted > 4 * few


def test_pace_longer_contexts_do_not_pass_for_losses() -> None:
    machine = Machine(row_s=0.05, chance=0.9, num_sequences=1)
    machine.run(100)
    for _ in range(20):
        machine.base_s *= 1.1
        gained = machine.run(100)
    assert gained > 2.0


def test_pace_unmeasured_or_mixed_steps_get_no_drafts() -> None:
    pace = SpeculationPace(max_rows=64, max_draft_tokens=8)
    assert not pace.max_drafts(1, beside_chunk=False)
    pace.observe(StepTimings(0.0, 1.0, 0.0, 1, 1))
    assert pace.max_drafts(1, beside_chunk=False)
    assert not pace.max_drafts(1, beside_chunk=True)
    assert not pace.max_drafts(2, beside_chunk=False)
    pace.observe(StepTimings(0.0, 1.0, 0.0, 100, 2))
    assert not pace.max_drafts(2, beside_chunk=False)


def test_pace_not_adaptive_takes_what_fits() -> None:
    pace = SpeculationPace(adaptive=False, max_rows=5, max_draft_tokens=4)
    assert pace.max_drafts(3, beside_chunk=True) == 5
    assert pace.lengths([Draft((1, 2, 3), "s")] * 3, 3) == [3, 2, 0]


def test_step_times_are_interpolated_between_medians() -> None:
    times = StepTimes()
    assert times.typical(2) is None
    assert times.seconds(3, least=1, least_s=0.5) == 0.5
    for seconds in (2.0, 9.0, 2.0):
        times.add(3, seconds)
    times.add(5, 3.0)
    found = [times.seconds(rows, least=1, least_s=1.0) for rows in (2, 3, 4, 5, 50)]
    assert found == [1.5, 2.0, 2.5, 3.0, 3.0]
    # What was measured with fewer sequences says nothing of this many.
    assert times.seconds(5, least=4, least_s=7.0) == 3.0
    assert times.seconds(9, least=6, least_s=7.0) == 7.0
    times.add(33, 5.0)
    assert times.typical(34) == 5.0
    assert times.typical(37) is None


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab")), max_size=30),
    measured=st.lists(st.tuples(st.integers(1, 60), st.floats(0.1, 9.0)), max_size=9),
    max_rows=st.integers(1, 40),
)
def test_pace_lengths_keep_bounds_and_likelier_drafts_come_first(
    lengths: list[tuple[int, str]], measured: list[tuple[int, float]], max_rows: int
) -> None:
    pace, num_sequences = SpeculationPace(max_rows=max_rows, max_draft_tokens=9), max(1, len(lengths))
    pace.observe(StepTimings(0.0, 1.0, 0.0, num_sequences, num_sequences))
    for rows, seconds in measured:
        pace.observe(StepTimings(0.0, seconds, 0.0, num_sequences + rows, num_sequences, num_draft_tokens=rows))
    pace.settled(Draft((1,) * 8, "b"), 0, is_over=False)
    drafts = [Draft((1,) * length, source if length else "") for length, source in lengths]
    found = pace.lengths(drafts, num_sequences)
    assert all(count <= len(draft.token_ids) for count, draft in zip(found, drafts, strict=True))
    assert sum(found) <= max_rows
    if not measured:
        # As if more rows took no time.
        assert sum(found) == min(max_rows, sum(length for length, _ in lengths))
    taken, left = [], []
    for count, draft in zip(found, drafts, strict=True):
        chance = pace.chance(draft.source)
        taken += [chance ** (i + 1) for i in range(count)]
        left += [chance ** (i + 1) for i in range(count, len(draft.token_ids))]
    assert not taken or not left or min(taken) >= max(left) - 1e-12
