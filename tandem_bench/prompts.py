"""Deterministic prompts: generated stories and random tokens, of lengths that use both pools."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tandem_bench import stories

MIN_TOKENS = 80
MAX_TOKENS = 700
_FIRST_PLAIN_ID = 16
"""First id after the special tokens of the built-in vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Prompt to send: as text where there is one, else as token ids."""

    token_ids: tuple[int, ...]
    """Token ids that transformers' own tokenizer gives for the text."""
    text: str | None = None

    @property
    def body(self) -> str | list[int]:
        """Return the `prompt` field of a completions request."""
        return list(self.token_ids) if self.text is None else self.text

    def half(self) -> "Prompt":
        """Return its first half, to warm a prefix with."""
        return Prompt(token_ids=self.token_ids[: len(self.token_ids) // 2])


def mixed_prompts(model: Path, count: int, *, seed: int = 0) -> list[Prompt]:
    """Generate prompts, every other one as text. Lengths are drawn evenly from `MIN_TOKENS` to `MAX_TOKENS`."""
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    vocab_size = AutoConfig.from_pretrained(model).vocab_size
    prompts = []
    for i in range(count):
        rng = Random(f"bench:prompt:{seed}:{i}")
        length = rng.randint(MIN_TOKENS, MAX_TOKENS)
        prompts.append(story_prompt(tokenizer, rng, length) if i % 2 else random_prompt(rng, length, vocab_size))
    return prompts


def random_prompt(rng: Random, length: int, vocab_size: int) -> Prompt:
    """Generate random tokens, which reveal errors of a cache or kernel first."""
    return Prompt(token_ids=tuple(rng.randrange(_FIRST_PLAIN_ID, vocab_size) for _ in range(length)))


def story_prompt(tokenizer: Any, rng: Random, length: int) -> Prompt:
    """Concatenate stories, cut at a word near `length` tokens."""
    words: list[str] = []
    story_words = _words(rng)
    while True:
        words += [next(story_words) for _ in range(10)]
        text = " ".join(words)
        ids = tokenizer(text)["input_ids"]
        if len(ids) >= length:
            return Prompt(token_ids=tuple(ids), text=text)


def _words(rng: Random) -> Iterator[str]:
    while True:
        yield from stories.tell(rng).text.split()
