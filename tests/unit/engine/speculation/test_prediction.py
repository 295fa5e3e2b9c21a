"""Drafts from the answer that a client expects: where they begin, and how they find their way back after an edit."""

import sys
from array import array
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings

from engine.speculation.prediction import ClientPrediction
from engine.speculation.proposer import NO_DRAFT, Ask
from engine.types.request import Request
from tests.support.engine import ledger

few = st.integers(0, 3)
TEXT = list(range(100, 160))


def predicted(prediction: Sequence[int], output: Sequence[int] = ()) -> Request:
    request = ledger.request([7, 8, 9], output=output)
    request.prediction = array("i", prediction)
    return request


def draft(source: ClientPrediction, request: Request, most: int = 4) -> list[int]:
    (found,) = source.propose([Ask(request, most)])
    assert len(found.token_ids) <= most
    assert found.source == ("prediction" if found.token_ids else "")
    return list(found.token_ids)


def test_prediction_begins_with_its_first_token_and_follows_answer() -> None:
    source, request = ClientPrediction(), predicted(TEXT)
    assert draft(source, request) == TEXT[:4]
    request.token_ids.extend(TEXT[:5])
    assert draft(source, request) == TEXT[5:9]
    request.token_ids.append(TEXT[5])
    assert draft(source, request, most=1) == [TEXT[6]]
    request.token_ids.extend(TEXT[6:58])
    assert draft(source, request) == TEXT[58:]
    request.token_ids.extend(TEXT[58:])
    assert draft(source, request) == []
    request.token_ids.append(1)
    assert draft(source, request) == []
    source.forget(request)
    assert not source._followers


def test_prediction_request_without_one_gets_no_draft() -> None:
    source, request = ClientPrediction(), ledger.request([1, 2])
    assert source.propose([Ask(request, 3)]) == [NO_DRAFT]
    request.prediction = array("i")
    assert source.propose([Ask(request, 3)]) == [NO_DRAFT]
    assert not source._followers


def test_prediction_is_found_again_after_replaced_inserted_and_removed_tokens() -> None:
    for edit, resumes_at in (([1, 2, 3], 12), ([1], 10), ([], 20)):
        source, request = ClientPrediction(), predicted(TEXT)
        assert draft(source, request)
        request.token_ids.extend([*TEXT[:10], *edit])
        assert not edit or draft(source, request) == []
        for number, token in enumerate(TEXT[resumes_at : resumes_at + 2], 1):
            request.token_ids.append(token)
            found = draft(source, request)
            assert found == (TEXT[resumes_at + 2 : resumes_at + 6] if number == 2 else [])


def test_prediction_prefers_nearest_place_and_moved_text_by_its_length() -> None:
    common = [1, 2, 3]
    text = [*TEXT[:10], *common, 50, *TEXT[10:20], *common, 51, *TEXT[20:], *range(300, 400)]
    source, request = ClientPrediction(), predicted(text)
    assert draft(source, request)
    request.token_ids.extend([*TEXT[:5], 77, *common])
    assert draft(source, request)[:1] == [50]
    request.token_ids.extend([51, *TEXT[20:24]])
    assert draft(source, request) == TEXT[24:28]
    # Far from there, and before it.
    request.token_ids.extend([88, *range(370, 380)])
    assert draft(source, request) == [380, 381, 382, 383]
    request.token_ids.extend([88, *TEXT[:3]])
    assert draft(source, request) == TEXT[3:7]


def test_prediction_wrong_place_does_not_move_where_later_searches_begin() -> None:
    far = [*range(200, 300), 1, 2, 3, 60]
    text = [*TEXT[:8], 1, 2, 9, *TEXT[8:], *far]
    source, request = ClientPrediction(), predicted(text)
    request.token_ids.extend([*TEXT[:8], 5, 1, 2, 3])
    assert draft(source, request) == [60]
    request.token_ids.extend([*TEXT[8:10]])
    assert draft(source, request) == TEXT[10:14]


def test_prediction_continued_answer_goes_on_where_it_was() -> None:
    """A stream that another worker continues comes with its output; so does one whose first token came by hand-off."""
    source = ClientPrediction()
    assert draft(source, predicted(TEXT, output=TEXT[:30])) == TEXT[30:34]
    assert draft(source, predicted(TEXT, output=[5, *TEXT[40:50]])) == TEXT[50:54]
    assert draft(source, predicted(TEXT, output=[5])) == []


def test_prediction_tokens_beyond_unicode_are_followed_but_not_found_again() -> None:
    large = sys.maxunicode + 5
    source, request = ClientPrediction(), predicted([large, 2, 3, 4, 5, 6])
    request.token_ids.extend([large, 2])
    assert draft(source, request) == [3, 4, 5, 6]
    request.token_ids.extend([9, 3, 4])
    assert draft(source, request) == []


@settings(max_examples=300, deadline=None)
@given(
    prediction=st.lists(few, max_size=40),
    output=st.lists(few, max_size=40),
    portions=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=12),
)
def test_prediction_drafts_are_runs_of_it_within_bounds(
    prediction: list[int], output: list[int], portions: list[tuple[int, int]]
) -> None:
    source, request = ClientPrediction(), predicted(prediction)
    given_tokens = 0
    for count, most in [*portions, (40, 3)]:
        new = output[given_tokens : given_tokens + count]
        given_tokens += len(new)
        request.token_ids.extend(new)
        found = draft(source, request, most)
        so_far = output[:given_tokens]
        places = [i for i in range(len(prediction)) if found and prediction[i : i + len(found)] == found]
        assert not found or places
        if so_far == prediction[:given_tokens]:
            assert found == prediction[given_tokens : given_tokens + most]
        elif found:
            # Two tokens at least are the same before some such place, and the draft is as long as may be.
            before = [i for i in places if so_far[-2:] == prediction[max(0, i - 2) : i]]
            assert any(len(found) == min(most, len(prediction) - i) for i in before)
