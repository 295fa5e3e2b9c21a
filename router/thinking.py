"""Whether the served model thinks before it answers, and how that is told: one per router, every door shares it."""

from collections.abc import Sequence

from router.asked import ClientFields
from router.reasoning import Reasoning, marks_of
from router.tokenizer import Tokenizer

_TAIL_TOKENS = 16
"""Of a prompt: what a template writes last."""


class Thinking:
    """What the model's template and tokenizer say of it."""

    def __init__(self, tokenizer: Tokenizer, forced: str | None = None) -> None:
        """`forced`: the family's name, if the configuration says it."""
        template = tokenizer.template
        self._marks = None if template is None else marks_of(template.source, forced)
        self._tokenizer = tokenizer

    def reasoning(self, prompt_ids: Sequence[int], asked: ClientFields) -> Reasoning | None:
        """How answers are read. An answer that is a structure, or calls alone, has no room for thinking."""
        marks = self._marks
        if marks is None or asked.structure is not None or (asked.tools is not None and asked.tools.must_call):
            return None
        ids = self._tokenizer.added_ids
        tail = self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
        return Reasoning(
            marks=marks,
            is_open=tail.rstrip().endswith(marks.begin),
            shown_ids=frozenset(ids[mark] for mark in marks if mark in ids),
            bytes_of=self._tokenizer.bytes_of,
        )
