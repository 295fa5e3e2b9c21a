"""Whether the served model reasons before it answers, and how that is marked: one per router, shared by its servers."""

import json
from collections.abc import Mapping, Sequence

from router.text.grammars.tool_calls import ANY, without
from router.text.reasoning import Reasoning, ThinkingMarks, marks_of
from router.text.tokenizer import Tokenizer
from tandem.errors import InvalidRequest

_TAIL_TOKENS = 16
"""Tokens at the end of a prompt that are searched for what the template writes last."""
_GAP = r"/[ \t\r\n]{1,4}/"
"""White space between reasoning and a structure: bounded, since unbounded repetition might never end."""
_ANSWER = "behind_thinking"
"""Name of the grammar after the reasoning."""


class ThinkingSupport:
    """The model's reasoning marks, from its template and tokenizer."""

    def __init__(self, tokenizer: Tokenizer, forced: str | None = None) -> None:
        """`forced`: the family's name, if the configuration sets it."""
        template = tokenizer.template
        self.marks = None if template is None else marks_of(template.source, forced)
        self._tokenizer = tokenizer

    def reasoning(self, prompt_ids: Sequence[int], *, begins_turn: bool) -> Reasoning | None:
        """Return how answers are parsed. `begins_turn`: the answer begins a turn instead of continuing one."""
        marks = self.marks
        if marks is None:
            return None
        ids = self._tokenizer.added_ids
        tail = self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
        is_open = tail.endswith(marks.begin)
        return Reasoning(
            marks=marks,
            is_open=is_open,
            may_begin=not is_open and begins_turn and not tail.endswith(marks.end),
            shown_ids=frozenset(ids[mark] for mark in marks if mark in ids),
            bytes_of=self._tokenizer.bytes_of,
        )

    def before(self, grammar: str, reasoning: Reasoning | None) -> str:
        """Wrap a grammar from `GrammarChecker`, for answers that have the structure after their reasoning."""
        if reasoning is None or not (reasoning.is_open or reasoning.may_begin):
            return grammar
        return with_thinking(grammar, reasoning.marks, self._tokenizer.added_ids, is_open=reasoning.is_open)


def with_thinking(grammar: str, marks: ThinkingMarks, token_ids: Mapping[str, int], *, is_open: bool) -> str:
    """Return a grammar for llguidance: reasoning, optional unless it `is_open` already, followed by the given grammar.

    `token_ids`: of marks that are single tokens. An answer cannot end during its reasoning.
    """
    match read := json.loads(grammar):
        case {"grammars": [dict() as first, *others]}:
            lead = {"lark_grammar": _lead(marks, token_ids, is_open=is_open)}
            return json.dumps({**read, "grammars": [lead, {**first, "name": _ANSWER}, *others]})
    raise InvalidRequest("grammar: this form is not supported for a reasoning model", param="grammar")


def _lead(marks: ThinkingMarks, token_ids: Mapping[str, int], *, is_open: bool) -> str:
    begin, end = (f"<[{token_ids[mark]}]>" if mark in token_ids else json.dumps(mark) for mark in marks)
    start = f"start: thinking GAP? @{_ANSWER}" if is_open else f"start: ({begin} thinking GAP?)? @{_ANSWER}"
    if marks.end in token_ids:
        thinking = [f"thinking: THOUGHT {end}", f"THOUGHT: {ANY}{without((marks.end,))}"]
    else:
        thinking = [f"thinking[lazy]: {ANY} {end}"]
    return "\n".join([start, *thinking, f"GAP: {_GAP}"])
