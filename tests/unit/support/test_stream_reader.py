"""When the stream campaigns treat two answers as equal."""

from dataclasses import replace

import pytest

from tests.proofs.streams.reader import Answer

WHOLE = Answer(
    texts={0: "ab", 1: "c"},
    token_ids={0: [5, 6], 1: [7]},
    finishes={0: "length", 1: "length"},
    usage={"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "cached_tokens": 0},
)


def test_stream_answer_comparison_ignores_cache_and_timing() -> None:
    assert WHOLE.same_as(replace(WHOLE, usage=WHOLE.usage | {"cached_tokens": 8}, came_s={0: [1.0, 2.0]}))


@pytest.mark.parametrize(
    "change",
    [
        {"texts": {0: "ab", 1: "d"}},
        {"token_ids": {0: [5, 6], 1: [8]}},
        {"finishes": {0: "length"}},
        {"usage": None},
        {"usage": WHOLE.usage | {"prompt_tokens": 8, "total_tokens": 11}},
        {"usage": WHOLE.usage | {"completion_tokens": 4, "total_tokens": 13}},
        {"usage": WHOLE.usage | {"total_tokens": 13}},
    ],
)
def test_stream_answer_comparison_finds_every_difference(change: dict[str, object]) -> None:
    other = replace(WHOLE, **change)
    assert not WHOLE.same_as(other)
    assert not other.same_as(WHOLE)


def test_stream_answers_without_usage_are_never_equal() -> None:
    assert not replace(WHOLE, usage=None).same_as(replace(WHOLE, usage=None))
    wrong = WHOLE.usage | {"completion_tokens": 2, "total_tokens": 11}
    assert not replace(WHOLE, usage=wrong).same_as(replace(WHOLE, usage=wrong))
