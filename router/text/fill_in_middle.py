"""Filling in: a model writes what stands between two texts, where its tokenizer has marks for that."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class FillMarks(NamedTuple):
    """Token ids: what comes before follows the first, what comes after the second, and the answer the third."""

    before: int
    after: int
    middle: int

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Of a model that is to write what stands between."""
        return [self.before, *before, self.after, *after, self.middle]


_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Of Qwen and CodeGemma, StarCoder, DeepSeek."""


def fill_marks(added_ids: Mapping[str, int]) -> FillMarks | None:
    """Those among a tokenizer's added tokens, by their texts; None: its model was not taught to fill in."""
    for spelling in _SPELLINGS:
        if all(text in added_ids for text in spelling):
            return FillMarks(*(added_ids[text] for text in spelling))
    return None
