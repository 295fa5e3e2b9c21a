"""Matches are those of a search that compares everything with everything."""

from array import array
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings

from engine.speculation.token_history import MAX_CANDIDATES, MAX_MATCH, RUN, TokenHistory, repeated

few = st.integers(0, 3)


def longest(tokens: Sequence[int], context: Sequence[int], before: int) -> tuple[int, int]:
    """The longest match among the newest ends of the context's last run, by comparison of every pair of tokens."""
    best, follows = 0, 0
    ends = [i for i in range(RUN - 1, min(before, len(tokens))) if tokens[i + 1 - RUN : i + 1] == context[-RUN:]]
    for end in sorted(ends, reverse=True)[:MAX_CANDIDATES]:
        length = 0
        while length < min(MAX_MATCH, end + 1, len(context)) and tokens[end - length] == context[-1 - length]:
            length += 1
        if length > best:
            best, follows = length, end + 1
    return (best, follows) if best >= RUN else (0, 0)


@settings(max_examples=300, deadline=None)
@given(tokens=st.lists(few, max_size=60), portions=st.lists(st.integers(1, 20), max_size=6))
def test_history_own_end_is_found_where_it_was_before(tokens: list[int], portions: list[int]) -> None:
    live = array("i")
    history = TokenHistory(live)
    start = 0
    for portion in [*portions, 60]:
        live.extend(tokens[start : start + portion])
        start += portion
        while not history.index(7):
            pass
        known = tokens[: len(live)]
        expected = longest(known, known, len(known) - 1) if len(known) >= RUN else (0, 0)
        assert history.find(live, before=len(live) - 1) == expected


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(few, max_size=60), context=st.lists(few, max_size=40))
def test_history_end_of_other_sequence_is_found(tokens: list[int], context: list[int]) -> None:
    history = TokenHistory(array("i", tokens))
    assert history.index(1000)
    expected = longest(tokens, context, len(tokens)) if len(context) >= RUN else (0, 0)
    assert history.find(array("i", context)) == expected


def test_history_growth_keeps_every_position() -> None:
    live = array("i")
    history = TokenHistory(live)
    for i in range(3000):
        live.append(i)
        history.index(1)
    assert history.num_indexed == 3000
    for at in (2, 100, 2500):
        assert history.find(array("i", range(at - 2, at + 1))) == (RUN, at + 1)


def test_repeated_continuation_reads_on_in_itself() -> None:
    assert list(repeated(array("i", [9, 1, 2, 3, 1, 2, 3]), 4, 8)) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert list(repeated(array("i", [9, 1, 2, 3]), 1, 2)) == [1, 2]
    assert list(repeated(array("i", [9, 1]), 2, 5)) == []
