"""Chooses how many drafts a step verifies, so that speculation never costs more than it brings. Pure.

Verifying n drafts beside b sequences makes a step of b + n rows, and brings b + g tokens, where g is the sum of the
chances that a draft and all before it are right. With T(rows) the time of a step, n is chosen to maximise
(b + g) / T(b + n); n = 0 where nothing beats b / T(b). Chances are averages over all drafts of a source.

Times are measured, and estimates may be wrong, so what speculation gains and loses is also accounted for: a step with
drafts is worth as much as the steps without that would have brought its tokens. Losses are paid from a credit, which
grows by `MAX_LOSS` of all time spent; without credit nothing is drafted.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import mul
from statistics import median
from typing import NamedTuple

from engine.speculation.proposer import Draft
from engine.types.step_output import StepTimings

MAX_LOSS = 0.02
"""Share of the time that may be lost. Stated as 3 %: the rest is for what proposing itself takes."""
_NUM_REMEMBERED = 5
_FIRST_CHANCE = 0.6
"""Chance that a draft of a new source is taken to be right."""
_WEIGHT = 0.05
_RETURN = 0.002
"""Share by which a chance returns to the first one with every step: a source that failed is tried again."""
_MIN_CHANCE = 0.02
_MAX_CREDIT_STEPS = 20.0
_MAX_SINCE_PLAIN = 64
"""Steps with drafts after which one without is taken, to measure what they are compared with."""
_EXACT_ROWS = 16
"""Numbers of rows up to this are told apart; beyond it, to within an eighth."""


class StepTimes:
    """Typical duration of steps by their number of rows: medians of the last few, interpolated in between."""

    __slots__ = ("_recent", "_sizes", "_typical")

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._typical: dict[int, float] = {}
        self._sizes: list[int] = []
        """Rounded numbers of rows that have been measured, ascending."""

    def add(self, num_rows: int, seconds: float) -> None:
        size = _rounded(num_rows)
        if (recent := self._recent.get(size)) is None:
            recent = self._recent[size] = deque(maxlen=_NUM_REMEMBERED)
            self._sizes.insert(bisect_left(self._sizes, size), size)
        recent.append(seconds)
        self._typical[size] = median(recent)

    def typical(self, num_rows: int) -> float | None:
        """Duration of a step of so many rows; None if none has been measured."""
        return self._typical.get(_rounded(num_rows))

    def seconds(self, num_rows: int, *, least: int, least_s: float) -> float:
        """Duration of a step of so many rows, where one of `least` rows takes `least_s`.

        Beyond what has been measured it is taken to be that of the largest size: too little, so that more rows are
        tried and measured.
        """
        size, typical = _rounded(num_rows), self._typical
        place = bisect_left(self._sizes, size)
        low, low_s = least, least_s
        if place and self._sizes[place - 1] > least:
            low, low_s = self._sizes[place - 1], typical[self._sizes[place - 1]]
        if place == len(self._sizes):
            return low_s
        high = self._sizes[place]
        return low_s + (typical[high] - low_s) * (size - low) / (high - low)


class _Level(NamedTuple):
    """Drafts of one source that are as far from their sequences' last tokens, and hence as likely."""

    chance: float
    """Chance that such a draft and all before it are right."""
    places: Sequence[int]
    """Sequences that have one."""


class SpeculationPace:
    """Bounds the drafts of each step. Durations are passed in, no clock is read."""

    def __init__(self, *, adaptive: bool = True, max_rows: int, max_draft_tokens: int) -> None:
        """`adaptive` False: whatever is proposed is verified. `max_rows`: most drafts of one step, `max_draft_tokens`:
        of one sequence.
        """
        self._adaptive = adaptive
        self._max_rows = max_rows
        self._max_draft_tokens = max_draft_tokens
        self._plain = StepTimes()
        """Steps without drafts, by sequences."""
        self._drafted = StepTimes()
        """Steps with drafts, by rows."""
        self._chances: dict[str, float] = {}
        self._credit_s = 0.0
        self._since_plain = 0

    def max_drafts(self, num_sequences: int, *, beside_chunk: bool) -> int:
        """Most drafts that could be of use in a step that decodes `num_sequences`; 0: nothing need be proposed.

        None beside a chunk of a prompt: its time is that of the chunk, from which nothing can be learnt.
        """
        if not self._adaptive:
            return self._max_rows
        if beside_chunk or self._credit_s <= 0.0 or self._plain.typical(num_sequences) is None:
            return 0
        if self._since_plain >= _MAX_SINCE_PLAIN:
            return 0
        chance = max(self._chances.values(), default=_FIRST_CHANCE)
        # As if each sequence had a long draft of the best source.
        likely = accumulate(repeat(chance, self._max_draft_tokens), mul)
        levels = [_Level(together, range(num_sequences)) for together in likely]
        return self._max_rows if self._best_number(num_sequences, levels, is_any_enough=True) else 0

    def lengths(self, drafts: Sequence[Draft], num_sequences: int) -> list[int]:
        """How many tokens of each draft to verify, in a step that decodes `num_sequences`."""
        if not self._adaptive:
            lengths, left = [], self._max_rows
            for draft in drafts:
                lengths.append(min(left, len(draft.token_ids)))
                left -= lengths[-1]
            return lengths
        levels = self._levels(drafts)
        left = self._best_number(num_sequences, levels)
        lengths = [0] * len(drafts)
        for level in levels:
            if left <= 0:
                break
            for place in level.places[:left]:
                lengths[place] += 1
            left -= len(level.places)
        return lengths

    def _levels(self, drafts: Sequence[Draft]) -> list[_Level]:
        """The drafts by source and depth, the likeliest first. Within a source chances only fall with depth, and the
        sort is stable, so that those are taken first that come first in their drafts.
        """
        by_source: dict[str, list[int]] = defaultdict(list)
        for place, draft in enumerate(drafts):
            if draft.token_ids:
                by_source[draft.source].append(place)
        levels = []
        for source, all_places in by_source.items():
            one, together, places, depth = self.chance(source), 1.0, all_places, 0
            while places:
                depth += 1
                together *= one
                levels.append(_Level(together, places))
                places = [place for place in places if len(drafts[place].token_ids) > depth]
        levels.sort(key=lambda level: -level.chance)
        return levels

    def chance(self, source: str) -> float:
        """Average chance that a draft of this source is right if those before it are."""
        return self._chances.get(source, _FIRST_CHANCE)

    def settled(self, draft: Draft, num_kept: int, *, is_over: bool) -> None:
        """Learn that the first `num_kept` tokens of a draft were right; `is_over`: the others were never compared."""
        chance = self.chance(draft.source)
        for _ in range(num_kept):
            chance += _WEIGHT * (1.0 - chance)
        if num_kept < len(draft.token_ids) and not is_over:
            chance -= _WEIGHT * chance
        self._chances[draft.source] = max(_MIN_CHANCE, chance)

    def observe(self, timings: StepTimings) -> None:
        """Learn from a step's duration."""
        for source, chance in self._chances.items():
            self._chances[source] = chance + _RETURN * (_FIRST_CHANCE - chance)
        seconds, num_sequences = timings.step_s, timings.num_requests
        if not timings.is_decode or seconds <= 0.0:
            return
        self._credit_s += MAX_LOSS * seconds
        if not timings.num_draft_tokens:
            self._since_plain = 0
            self._plain.add(num_sequences, seconds)
        else:
            self._since_plain += 1
            self._drafted.add(timings.num_tokens, seconds)
            plain_s = self._plain.typical(num_sequences) or seconds
            self._credit_s += plain_s * (1.0 + timings.num_accepted_tokens / num_sequences) - seconds
        most_s = _MAX_CREDIT_STEPS * seconds
        self._credit_s = max(-most_s, min(most_s, self._credit_s))

    def _best_number(self, num_sequences: int, levels: Sequence[_Level], *, is_any_enough: bool = False) -> int:
        """How many of these drafts, the likeliest first, maximise tokens per second. Of a level all are tried, and
        powers of two. `is_any_enough`: any number that is better than none will do.
        """
        plain_s = self._plain.typical(num_sequences)
        if not plain_s:
            return 0
        best, best_rate, number, tokens = 0, num_sequences / plain_s, 0, float(num_sequences)
        most_tokens = tokens + sum([level.chance * len(level.places) for level in levels])
        for level in levels:
            count = min(len(level.places), self._max_rows - number)
            for part in _parts(count):
                num_rows = num_sequences + number + part
                seconds = max(plain_s, self._drafted.seconds(num_rows, least=num_sequences, least_s=plain_s))
                rate = (tokens + part * level.chance) / seconds
                if rate > best_rate:
                    best, best_rate = number + part, rate
                    if is_any_enough:
                        return best
            number += count
            tokens += count * level.chance
            if count < len(level.places) or most_tokens / seconds <= best_rate:
                break  # no room for more, or nothing that is left could make up for this step's time
        return best


def _parts(count: int) -> Iterable[int]:
    """Powers of two below `count`, and `count`."""
    return [*(1 << i for i in range(count.bit_length()) if 1 << i < count), count]


def _rounded(num_rows: int) -> int:
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << (num_rows.bit_length() - 4)
    return -(-num_rows // step) * step
