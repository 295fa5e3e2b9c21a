"""Questions with one right answer: a code hidden in a long text, and a JSON object."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from router.text.conversation import Message, TemplateOptions
from router.text.tokenizer import Tokenizer
from tandem.errors import InvalidRequest
from tandem_bench import stories
from tandem_bench import story_words as words
from tandem_bench.quality.json_requests import draw_json_request

DEPTHS = (0, 25, 50, 75, 100)
"""Places of the fact that is asked for, in percent of the text before it."""
_NEEDLE_TOKENS = 32
_JSON_TOKENS = 96
_RESERVED_TOKENS = 48
"""Part of a needle prompt that is kept free for the question and for what a chat template adds."""
_NUM_FACTS = 6
_MAX_CHARS = 1 << 22
Count = Callable[[Sequence[str]], list[int]]
"""Returns the number of tokens of each of some texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question, as a user asks it and as a model without a chat template continues it."""

    text: str
    beginning: str
    """Text whose continuation is the answer."""
    max_tokens: int
    """Greatest length of an answer."""
    is_right: Callable[[str], bool]
    depth: int = 0
    """Of a needle: one of DEPTHS."""

    def prompt(self, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens that a worker gets for this question, without reasoning where the template can turn it off.

        Raises InvalidRequest when the chat template refuses a plain question.
        """
        if not tokenizer.has_chat_template:
            return tokenizer.encode(self.beginning)
        messages = [Message(role="user", content=self.text)]
        try:
            return tokenizer.encode_chat(
                messages, add_generation_prompt=True, max_chars=_MAX_CHARS, options=TemplateOptions(thinks=False)
            )
        except InvalidRequest:
            return tokenizer.encode_chat(messages, add_generation_prompt=True, max_chars=_MAX_CHARS)


def needle_questions(num: int, length: int, count: Count) -> Iterator[Question]:
    """Make questions of prompts of about `length` tokens, at each of DEPTHS in turn."""
    for i in range(num):
        yield needle_question(Random(f"quality:needle:{length}:{i}"), length, DEPTHS[i % len(DEPTHS)], count)


def needle_question(rng: Random, length: int, depth: int, count: Count) -> Question:
    """Hide six facts of the same wording in generated stories, and ask for the one at `depth`: only its key tells."""
    keys = rng.sample(words.KEYS, _NUM_FACTS)
    values = [str(value) for value in rng.sample(range(1000, 10_000), _NUM_FACTS)]
    facts = [f"The code of {key} is {value}." for key, value in zip(keys, values, strict=True)]
    pieces = _filler(rng, length - _RESERVED_TOKENS - sum(count([f" {fact}" for fact in facts])), count)
    for fact in facts[1:]:
        pieces.insert(rng.randint(0, len(pieces)), fact)
    pieces.insert(round(len(pieces) * depth / 100), facts[0])
    text, value = " ".join(pieces), values[0]
    return Question(
        text=f"{text} What is the code of {keys[0]}?",
        beginning=f"{text} The code of {keys[0]} is",
        max_tokens=_NEEDLE_TOKENS,
        is_right=lambda answer: re.findall(r"\d+", answer)[:1] == [value],
        depth=depth,
    )


def _filler(rng: Random, num_tokens: int, count: Count) -> list[str]:
    """Return sentences of generated stories that have at most `num_tokens` in all."""
    pieces: list[str] = []
    while True:
        sentences = stories.tell(rng).sentences
        for sentence, size in zip(sentences, count([f" {sentence}" for sentence in sentences]), strict=True):
            num_tokens -= size
            if num_tokens < 0:
                return pieces
            pieces.append(sentence)


def json_questions(num: int) -> Iterator[Question]:
    """Make requests for JSON objects of one to four fields."""
    for i in range(num):
        request = draw_json_request(Random(f"quality:json:{i}"))
        yield Question(
            text=request.text,
            beginning=f"{request.text}\n",
            max_tokens=_JSON_TOKENS,
            is_right=request.is_answered_by,
        )
