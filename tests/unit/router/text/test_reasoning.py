"""Reasoning is separated from the answer, independently of how the text is split."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.reasoning import FAMILIES, Reasoning, ReasoningParser, ReasoningTokens, ThinkingMarks, marks_of

THINK = FAMILIES["think"]
WHITE = " \t\r\n"
TEXTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "<th", "</thi", "nk>", ">", "/", " ", "\n", "a", "ink", "é😀"])
).map("".join)


def whole(text: str, *, is_open: bool) -> tuple[str, str]:
    """Reasoning and answer of an unsplit text."""
    body = text
    if not is_open:
        begun = text.lstrip(WHITE)
        if not begun.startswith(THINK.begin):
            return "", text
        body = begun.removeprefix(THINK.begin)
    thought, _, answer = body.partition(THINK.end)
    return thought.strip(WHITE), answer.lstrip(WHITE)


def read(pieces: Sequence[str], *, is_open: bool, marks: ThinkingMarks = THINK) -> tuple[str, str]:
    parser = ReasoningParser(marks, is_open=is_open)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.flush()
    assert all(part.text for part in parts)
    # The answer comes after all of the thinking.
    assert [part.is_reasoning for part in parts] == sorted((part.is_reasoning for part in parts), reverse=True)
    thought, answer = ("".join(p.text for p in parts if p.is_reasoning is kind) for kind in (True, False))
    return thought, answer


@given(TEXTS, st.booleans(), st.data())
def test_reasoning_parser_any_split_agrees(text: str, is_open: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    expected = whole(text, is_open=is_open)
    assert read(pieces, is_open=is_open) == expected
    assert read(list(text), is_open=is_open) == expected


@given(TEXTS, st.booleans())
def test_reasoning_tokens_are_counted_up_to_end_of_thinking(text: str, is_open: bool) -> None:
    tokens = list(text.encode())
    counter = ReasoningTokens(THINK, lambda token: bytes([token]), is_open=is_open)
    for token in tokens:
        counter.add([token])
    thinks = is_open or text.lstrip(WHITE).startswith(THINK.begin)
    end = text.find(THINK.end)
    of_it = text if end < 0 else text[: end + len(THINK.end)]
    assert counter.count == (len(of_it.encode()) if thinks else 0)


@pytest.mark.parametrize("marks", FAMILIES.values(), ids=FAMILIES)
def test_reasoning_marks_of_every_family_are_parsed(marks: ThinkingMarks) -> None:
    text = f"\n{marks.begin}\nLet me see.\n{marks.end}\n\nIt is 4."
    assert read(list(text), is_open=False, marks=marks) == ("Let me see.", "It is 4.")
    assert marks_of(f"{{{{ x }}}}{marks.end}") == marks
    one = Reasoning(marks=marks, is_open=False, may_begin=True, shown_ids=frozenset(), bytes_of=lambda token: b"")
    assert one.answer_in(text) == "It is 4."


def test_reasoning_parser_endless_whitespace_takes_linear_time() -> None:
    """A looping model writes whitespace up to the limit: each piece costs the same, however much is held back."""
    pieces = ["\n" * 8] * 5_000
    assert read([*pieces, "<think>", *pieces, "a", *pieces, "</think>", *pieces, "b"], is_open=False) == ("a", "b")
    between = ["<think>a", *pieces, "b</think>c"]
    assert read(between, is_open=False) == (f"a{''.join(pieces)}b", "c")
    assert read([*pieces, "a"], is_open=False) == ("", f"{''.join(pieces)}a")


def test_reasoning_parser_closed_reasoning_is_answer() -> None:
    assert read(["<think>\n\n</think>\n\n", "hello"], is_open=False) == ("", "hello")


def test_reasoning_family_comes_from_template_or_setting() -> None:
    assert marks_of("{{ messages }}") is None
    assert marks_of("{{ messages }}", "think") == THINK
    assert marks_of(f"{{{{ x }}}}{THINK.end}", "none") is None
    assert marks_of(f"{{{{ x }}}}{THINK.end}", "magistral") == FAMILIES["magistral"]
