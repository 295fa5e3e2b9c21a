"""Stop strings against a plain definition, for any split of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import MAX_STOP_CHARS, MAX_STOP_STRINGS, StopMatcher, StopStrings
from tandem.errors import InvalidRequest


def expected(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """The first place where a stop string ends; the longest that ends there."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            return text[: end if include else end - max(map(len, found))], True
    return text, False


_AB = st.text(alphabet="ab", min_size=1, max_size=5)


@given(
    stops=st.lists(_AB, min_size=1, max_size=4),
    parts=st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    include=st.booleans(),
)
def test_stop_matcher_any_split_gives_the_same_result(stops: list[str], parts: list[str], include: bool) -> None:
    matcher = StopMatcher(StopStrings(stops), include_match=include)
    shown = "".join(map(matcher.feed, parts)) + matcher.flush()
    assert (shown, matcher.match is not None) == expected("".join(parts), stops, include)


@given(stops=st.lists(_AB, min_size=1, max_size=4), text=st.text(alphabet="abc", max_size=30))
def test_stop_matcher_holds_only_possible_matches(stops: list[str], text: str) -> None:
    matcher = StopMatcher(StopStrings(stops), include_match=False)
    shown = matcher.feed(text)
    if matcher.match is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_stop_matcher_emits_text_once_no_match_is_possible() -> None:
    matcher = StopMatcher(StopStrings(["STOP"]), include_match=False)
    assert [matcher.feed(part) for part in ("a S", "T", "x", "STO", "P more", "never")] == ["a ", "", "STx", "", "", ""]
    assert matcher.match == "STOP"
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["x" * (MAX_STOP_CHARS + 1)], ["x"] * (MAX_STOP_STRINGS + 1)])
def test_stop_strings_beyond_bounds_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        StopStrings(stops)
