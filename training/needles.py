"""Generated needle documents: facts stated inside a long filler, then asked for.

Every document has distractors (other keys, same wording), so the only way to answer is to match
the key of the question with the key of a statement and to copy the value that follows it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from tandem_bench import stories
from tandem_bench import story_words as words
from tandem_bench.story_words import invented_word
from training.chats import Chat, Turn, maybe_system

Count = Callable[[list[str]], list[int]]
"""Numbers of tokens of some pieces of text."""

_WORDINGS: tuple[tuple[str, str], ...] = (
    ("The code of {key} is {value}.", "What is the code of {key}?"),
    ("The number of {key} is {value}.", "What is the number of {key}?"),
    ("The secret code of {key} is {value}.", "What is the secret code of {key}?"),
    ("The password for {key} is {value}.", "What is the password for {key}?"),
)
_TURN_TOKENS = 17  # roles, a question, an answer, end
_START_TOKENS = 10  # bos and a system prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A key and its value, in one wording."""

    key: str
    value: str
    wording: tuple[str, str] = _WORDINGS[0]

    @property
    def statement(self) -> str:
        """The sentence that hides in the text."""
        return self.wording[0].format(key=self.key, value=self.value)

    @property
    def question(self) -> str:
        """The sentence that asks for the value."""
        return self.wording[1].format(key=self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large and how dense a needle document is."""

    num_tokens: int
    num_facts: int
    num_questions: int
    invented_keys: bool = False
    vary: bool = True
    """Draw the wording and the length of values; off for the measured task."""


def draw_facts(rng: Random, shape: Shape) -> list[Fact]:
    """Facts with different keys and one wording."""
    wording = rng.choice(_WORDINGS) if shape.vary and rng.random() < 0.4 else _WORDINGS[0]
    keys = rng.sample(words.KEYS, shape.num_facts)
    if shape.invented_keys:
        keys = [invented_word(rng) if rng.random() < 0.5 else key for key in keys]
        keys = list(dict.fromkeys(keys))
    return [Fact(key=key, value=_value(rng, shape.vary), wording=wording) for key in keys]


def _value(rng: Random, vary: bool) -> str:
    num_digits = rng.randint(3, 6) if vary and rng.random() < 0.2 else 4
    return "".join(rng.choice("0123456789") for _ in range(num_digits))


def needle_chat(rng: Random, shape: Shape, filler: Iterator[str], count: Count) -> Chat:
    """A chat whose first message holds the text; later turns ask for more of its facts."""
    facts = draw_facts(rng, shape)
    asked = rng.sample(facts, min(shape.num_questions, len(facts)))
    reserve = _START_TOKENS + _TURN_TOKENS * len(asked)
    text = hide(rng, facts, filler, shape.num_tokens - reserve, count)
    turns = [Turn(user=f"{text} {asked[0].question}", assistant=asked[0].value)]
    turns += [Turn(user=fact.question, assistant=fact.value) for fact in asked[1:]]
    system = maybe_system(rng) if shape.vary else None
    return Chat(turns=tuple(turns), system=system)


def needle_text(rng: Random, shape: Shape, filler: Iterator[str], count: Count) -> str:
    """The same skill without chat: statements come back later in the text, unchanged."""
    facts = draw_facts(rng, shape)
    again = rng.sample(facts, min(shape.num_questions, len(facts)))
    recall = " ".join(fact.statement for fact in again)
    reserve = _START_TOKENS + count([recall])[0]
    return f"{hide(rng, facts, filler, shape.num_tokens - reserve, count)} {recall}"


def hide(rng: Random, facts: list[Fact], filler: Iterator[str], num_tokens: int, count: Count) -> str:
    """Put every statement somewhere into `num_tokens` of filler."""
    statements = [fact.statement for fact in facts]
    room = num_tokens - sum(count([f" {statement}" for statement in statements]))
    pieces: list[str] = []
    while room > 0:
        drawn = [next(filler) for _ in range(16)]
        for piece, size in zip(drawn, count([f" {piece}" for piece in drawn]), strict=True):
            room -= size
            if room <= 0:
                break
            pieces.append(piece)
    for statement in statements:
        pieces.insert(rng.randint(0, len(pieces)), statement)
    return " ".join(pieces)


def story_filler(rng: Random) -> Iterator[str]:
    """Sentences of one generated story after the other."""
    while True:
        yield from stories.tell(rng).sentences


def line_filler(rng: Random, lines: tuple[str, ...]) -> Iterator[str]:
    """Runs of consecutive lines of a real text."""
    while True:
        start = rng.randrange(len(lines))
        yield from lines[start : start + rng.randint(4, 12)]
