"""What the model reads: token rows drawn from seeded generators and, if given, a real text.

A row depends only on its random generator, and a generator only on (seed, step), so a resumed run
reads exactly what an uninterrupted one would have read.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tandem_bench import stories
from tandem_bench import story_words as words
from training import chats, needles
from training.needles import Shape
from training.tokenizer import ASSISTANT_ID, BOS, BOS_ID, END, END_ID, PAD_ID, SPECIAL_TOKENS, USER_ID, render

HELD_OUT_SHARE = 0.05
"""The end of the real text is never trained on."""

_MIN_NEEDLE_TOKENS = 96
_ANSWER_WEIGHT = 4.0
_QUESTION_WEIGHT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Shares of the kinds of documents; they need not add up to one."""

    plain: float
    needle: float
    json: float
    talk: float
    copy: float


def split_text(text: str) -> tuple[str, str]:
    """The part to train on and the held-out end."""
    cut = int(len(text) * (1.0 - HELD_OUT_SHARE))
    return text[:cut], text[cut:]


def tokenizer_texts(seed: int, text: str, num_documents: int = 6000) -> Iterator[str]:
    """A sample of every kind, for learning the merges."""
    rng = Random(f"{seed}:tokenizer")
    for _ in range(num_documents):
        yield stories.tell(rng).text
        makers = (chats.json_turn,) * 4 + (chats.small_talk_turn, chats.repeat_turn)
        for turn in (make(rng) for make in makers):
            yield turn.user
            yield turn.assistant
        shape = Shape(num_tokens=0, num_facts=6, num_questions=1)
        for fact in needles.draw_facts(rng, shape):
            yield f"{fact.statement} {fact.question}"
    for _ in range(num_documents // 40):  # as a JSON value, a name has no space before it
        yield json.dumps(words.NAMES + words.CITIES)
    yield from text.splitlines(keepends=True)


class Corpus:
    """Draws documents of each kind and packs them into rows of one length."""

    def __init__(self, tokenizer: Tokenizer, text: str = "") -> None:
        self._tokenizer = tokenizer
        self._text_ids = self.encode(text) if text else []
        self._lines = tuple(line for line in text.splitlines() if line.strip())

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that already holds its special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def count(self, pieces: list[str]) -> list[int]:
        """Number of tokens of every piece."""
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [len(piece.ids) for piece in encoded]

    def row(self, rng: Random, mix: Mix, length: int) -> list[int]:
        """Whole documents until `length` is reached; the last one is cut, or padded if needle."""
        ids: list[int] = []
        while len(ids) < length:
            ids += self._document(rng, mix, length - len(ids), length)
        return ids[:length]

    def _document(self, rng: Random, mix: Mix, room: int, length: int) -> list[int]:
        kinds = ("plain", "needle", "json", "talk", "copy")
        shares = (mix.plain, mix.needle, mix.json, mix.talk, mix.copy)
        kind = rng.choices(kinds, shares)[0]
        if kind == "needle" and room < _MIN_NEEDLE_TOKENS:
            kind = "json"
        if kind == "needle":
            return self._needle(rng, room)
        if kind == "json":
            return self.encode(render(chats.json_chat(rng)))
        if kind == "talk":
            return self.encode(render(chats.talk_chat(rng)))
        if kind == "copy":
            return self._copy(rng)
        return self._plain(rng, length)

    def _plain(self, rng: Random, length: int) -> list[int]:
        if not self._text_ids or rng.random() < 0.4:
            return self.encode(f"{BOS}{stories.tell(rng).text}{END}")
        size = min(rng.randint(length // 2, length), len(self._text_ids) - 1)
        start = rng.randrange(len(self._text_ids) - size)
        head = [BOS_ID] if rng.random() < 0.5 else []
        return head + self._text_ids[start : start + size]

    def _copy(self, rng: Random) -> list[int]:
        """Any tokens at all, to be said again: what makes the model learn to copy by identity."""
        first, last = len(SPECIAL_TOKENS), self._tokenizer.get_vocab_size() - 1
        ids = [rng.randint(first, last) for _ in range(rng.randint(2, 30))]
        question = [BOS_ID, USER_ID, *self.encode("Repeat:"), *ids, END_ID]
        return [*question, ASSISTANT_ID, *ids, END_ID]

    def _needle(self, rng: Random, room: int) -> list[int]:
        most = max(2, min(24, room // 20))
        num_facts = rng.randint(2, most)
        shape = Shape(
            num_tokens=room,
            num_facts=num_facts,
            num_questions=rng.randint(1, max(1, min(8, room // 28))),
            invented_keys=rng.random() < 0.15,
        )
        if rng.random() < 0.3:
            text = needles.needle_text(rng, shape, self.filler(rng), self.count)
            return self.encode(f"{BOS}{text}{END}")
        chat = needles.needle_chat(rng, shape, self.filler(rng), self.count)
        return self.encode(render(chat))

    def filler(self, rng: Random) -> Iterator[str]:
        """Sentences of stories or lines of the real text."""
        if self._lines and rng.random() < 0.5:
            return needles.line_filler(rng, self._lines)
        return needles.story_filler(rng)


def target_weights(rows: NDArray[np.int64], digit_ids: frozenset[int]) -> NDArray[np.float32]:
    """How much each token counts as a target.

    Answers count most. Digits that a user states are random, so predicting them teaches nothing.
    """
    weights = np.ones(rows.shape, dtype=np.float32)
    for row, out in zip(rows.tolist(), weights, strict=True):
        current = 1.0
        for i, token in enumerate(row):
            if token == ASSISTANT_ID:
                out[i], current = 0.0, _ANSWER_WEIGHT
            elif token in (USER_ID, BOS_ID):
                out[i], current = 0.0, _QUESTION_WEIGHT if token == USER_ID else 1.0
            elif token == PAD_ID or (current == _QUESTION_WEIGHT and token in digit_ids):
                out[i] = 0.0
            else:
                out[i] = current
                if token == END_ID:
                    current = 1.0
    return weights
