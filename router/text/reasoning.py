"""Separates a model's reasoning from its answer. Pure.

Families of models write their reasoning between two marks, before the answer; some templates write the first mark
themselves, at the prompt's end. What counts as reasoning depends on the text alone, never on how it was split. White
space at the marks belongs to neither side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

_WHITE = " \t\r\n"


class ThinkingMarks(NamedTuple):
    begin: str
    end: str


FAMILIES: Mapping[str, ThinkingMarks] = {
    "think": ThinkingMarks("<think>", "</think>"),
    "magistral": ThinkingMarks("[THINK]", "[/THINK]"),
    "seed_oss": ThinkingMarks("<seed:think>", "</seed:think>"),
}
"""Reasoning marks by family name. Qwen3, DeepSeek-R1, QwQ and others write the first."""


def marks_of(template: str, forced: str | None = None) -> ThinkingMarks | None:
    """Return the marks of the family whose end mark the chat template contains, or of the one named `forced`, if given,
    which may be `none`. None: everything that the model writes is its answer.
    """
    if forced is not None:
        return FAMILIES.get(forced)
    return next((marks for marks in FAMILIES.values() if marks.end in template), None)


class AnswerPart(NamedTuple):
    """A piece of an answer's text."""

    is_reasoning: bool
    text: str


class _Phase(Enum):
    BEFORE = auto()
    """Start of the answer: it is not known yet whether the model reasons."""
    THINKING = auto()
    BETWEEN = auto()
    """The reasoning has ended; of the answer there has been white space at most."""
    ANSWER = auto()


class ReasoningParser:
    """Separates the text of one choice as it grows."""

    def __init__(self, marks: ThinkingMarks, *, is_open: bool) -> None:
        """`is_open`: the prompt ends with the first mark."""
        self._marks = marks
        self._phase = _Phase.THINKING if is_open else _Phase.BEFORE
        self._has_thought = is_open
        self._white: list[str] = []
        """The last white space, which may border on a mark."""
        self._held = ""
        """Text after it that may still become a mark. No longer than one, so that each character is examined once."""
        self._is_first = True
        """Whether no reasoning has been passed on yet."""

    @property
    def has_ended(self) -> bool:
        """Whether the reasoning has ended, or there is none."""
        return self._phase in (_Phase.BETWEEN, _Phase.ANSWER)

    @property
    def has_thought(self) -> bool:
        """Whether there was a first mark."""
        return self._has_thought

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the new parts of the answer."""
        if self._phase is _Phase.ANSWER:
            return [AnswerPart(False, text)] if text else []
        parts: list[AnswerPart] = []
        if self._phase is _Phase.BEFORE:
            text = self._begin(text, parts)
        if self._phase is _Phase.THINKING:
            text = self._think(text, parts)
        if self._phase is _Phase.BETWEEN and (answer := text.lstrip(_WHITE)):
            self._answer(answer, parts)
        return parts

    def flush(self) -> list[AnswerPart]:
        """Return what was held back: the answer has ended."""
        parts: list[AnswerPart] = []
        if self._phase is _Phase.BEFORE:
            self._answer(self._taken(self._held), parts)
        if self._phase is _Phase.THINKING and self._held:
            parts.append(AnswerPart(True, self._taken(self._held)))
        return parts

    def _taken(self, text: str) -> str:
        """Return what was held back, followed by this text."""
        self._held = ""
        if self._white:
            text = "".join((*self._white, text))
            self._white.clear()
        return text

    def _begin(self, text: str, parts: list[AnswerPart]) -> str:
        """Decide whether the model reasons; return the rest of the text."""
        begun = self._held + text
        if not self._held:
            begun = text.lstrip(_WHITE)
            self._white.append(text[: len(text) - len(begun)])
        if begun.startswith(self._marks.begin):
            self._phase, self._has_thought = _Phase.THINKING, True
            self._taken("")
            return begun.removeprefix(self._marks.begin)
        if self._marks.begin.startswith(begun):
            self._held = begun
        else:
            self._answer(self._taken(begun), parts)
        return ""

    def _think(self, text: str, parts: list[AnswerPart]) -> str:
        """Handle reasoning; return the rest of the text once it has ended."""
        thought, mark, rest = (self._held + text).partition(self._marks.end)
        held = "" if mark else thought[len(thought) - _common(thought, self._marks.end) :]
        thought = thought.removesuffix(held)
        trimmed = thought.rstrip(_WHITE)
        if trimmed:
            shown = self._taken(trimmed)
            parts.append(AnswerPart(True, shown.lstrip(_WHITE) if self._is_first else shown))
            self._is_first = False
        if mark:
            self._taken("")
            self._phase = _Phase.BETWEEN
            return rest
        if len(trimmed) < len(thought) and not self._is_first:
            self._white.append(thought[len(trimmed) :])
        self._held = held
        return ""

    def _answer(self, text: str, parts: list[AnswerPart]) -> None:
        self._phase = _Phase.ANSWER
        if text:
            parts.append(AnswerPart(False, text))


def _common(text: str, mark: str) -> int:
    """Return the length of the longest end of the text that begins the mark."""
    return next(n for n in range(min(len(text), len(mark) - 1), -1, -1) if text.endswith(mark[:n]))


class ReasoningTokens:
    """Counts a choice's tokens up to the end of its reasoning, in bytes: a mark may be several tokens."""

    def __init__(self, marks: ThinkingMarks, bytes_of: Callable[[int], bytes], *, is_open: bool) -> None:
        """`bytes_of`: returns the bytes of one token."""
        self._parser = ReasoningParser(
            ThinkingMarks(*(mark.encode().decode("latin-1") for mark in marks)), is_open=is_open
        )
        self._bytes_of = bytes_of
        self._seen = 0

    @property
    def count(self) -> int:
        return self._seen if self.has_thought else 0

    @property
    def has_thought(self) -> bool:
        return self._parser.has_thought

    @property
    def has_ended(self) -> bool:
        return self._parser.has_ended

    def add(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._parser.has_ended:
                return
            self._parser.feed(self._bytes_of(token_id).decode("latin-1"))
            self._seen += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """Parser of reasoning in one request's answers; part of `PreparedRequest`."""

    marks: ThinkingMarks
    is_open: bool
    """Whether the prompt ends with the first mark."""
    may_begin: bool
    """Whether the model itself writes the first mark, if it reasons."""
    shown_ids: frozenset[int]
    """Special tokens that the parser must see."""
    bytes_of: Callable[[int], bytes]

    def new_parser(self) -> ReasoningParser:
        return ReasoningParser(self.marks, is_open=self.is_open)

    def new_counter(self) -> ReasoningTokens:
        return ReasoningTokens(self.marks, self.bytes_of, is_open=self.is_open)

    def answer_in(self, text: str) -> str:
        """Return a whole choice without its reasoning."""
        parser = self.new_parser()
        return "".join(part.text for part in (*parser.feed(text), *parser.flush()) if not part.is_reasoning)
