"""Generated conversations: JSON requests, stories on demand, small talk, repetition.

Conversations are (user, assistant) turns; `training.tokenizer` owns how turns become text.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tandem_bench import stories
from tandem_bench import story_words as words

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Tandem, a small and friendly model.",
    "Answer briefly.",
    "You answer with JSON when asked.",
)
_JSON_REQUESTS = (
    "Return a JSON object with {fields}.",
    "Return JSON with {fields}.",
    "Give me a JSON object with {fields}.",
    "Write a JSON object with {fields}.",
    "Please return a JSON object with {fields}.",
)
_SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hello there", "Good morning", "Hey", "hello", "hi"),
        ("Hello! How can I help you?", "Hi! What can I do for you?"),
    ),
    (
        ("How are you?", "How are you today?"),
        ("I am well, thank you. How are you?", "Very well, thank you!"),
    ),
    (
        ("Who are you?", "What is your name?", "What are you?"),
        ("I am Tandem, a small language model.",),
    ),
    (
        ("What can you do?", "Help", "Can you help me?"),
        ("I can tell short stories, find a code in a long text and write JSON.",),
    ),
    (("Thank you", "Thanks!", "Thank you!"), ("You are welcome!", "I am glad to help!")),
    (("Bye", "Goodbye", "Good night", "Bye!"), ("Goodbye! See you soon.", "Bye! Have a nice day.")),
)
_STORY_REQUESTS = (
    "Tell me a story about {animal}.",
    "Tell me a short story about {animal}.",
    "Write a story about {animal}.",
    "Please tell me a story about {animal}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question and the answer the model should learn to give."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation; the system prompt is optional."""

    turns: tuple[Turn, ...]
    system: str | None = None


def maybe_system(rng: Random) -> str | None:
    """A system prompt for one conversation in five, so that having one changes little."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None


def invented_word(rng: Random) -> str:
    """A word that no list has, so that copying must work on pieces too."""
    return "".join(rng.choice(words.SYLLABLES) for _ in range(rng.randint(2, 3)))


def _invented_name(rng: Random) -> str:
    return invented_word(rng).capitalize()


_FIELDS: dict[str, Callable[[Random], str | int | bool]] = {
    "name": lambda rng: rng.choice(words.NAMES) if rng.random() < 0.85 else _invented_name(rng),
    "age": lambda rng: rng.randint(1, 99),
    "city": lambda rng: rng.choice(words.CITIES) if rng.random() < 0.9 else _invented_name(rng),
    "color": lambda rng: rng.choice(words.COLORS),
    "animal": lambda rng: rng.choice(words.ANIMALS),
    "food": lambda rng: rng.choice(words.FOODS),
    "job": lambda rng: rng.choice(words.JOBS),
    "count": lambda rng: rng.randint(1, 999),
    "price": lambda rng: rng.randint(1, 9999),
    "item": lambda rng: rng.choice(words.OBJECTS),
    "active": lambda rng: rng.random() < 0.5,
}


def json_turn(rng: Random) -> Turn:
    """Ask for a JSON object; the answer is what `json.dumps` prints, in the order asked."""
    names = rng.sample(sorted(_FIELDS), rng.randint(1, 4))
    record = {name: _FIELDS[name](rng) for name in names}
    quoted = rng.random() < 0.15
    parts = [f"{name} {_spoken(value, quoted)}" for name, value in record.items()]
    fields = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    request = rng.choice(_JSON_REQUESTS).format(fields=fields)
    return Turn(user=request, assistant=json.dumps(record))


def _spoken(value: str | int | bool, quoted: bool) -> str:
    if isinstance(value, str) and not quoted:
        return value
    return json.dumps(value)


def story_turn(rng: Random) -> Turn:
    """Ask for a story about an animal; the story keeps to it."""
    animal = rng.choice(words.ANIMALS)
    request = rng.choice(_STORY_REQUESTS).format(animal=stories.with_article(animal))
    return Turn(user=request, assistant=stories.tell(rng, animal=animal, short=True).text)


def small_talk_turn(rng: Random) -> Turn:
    """Greet, thank or ask who is there."""
    questions, answers = rng.choice(_SMALL_TALK)
    return Turn(user=rng.choice(questions), assistant=rng.choice(answers))


def repeat_turn(rng: Random) -> Turn:
    """Say the same words again: the plainest exercise in copying."""
    bank = words.KEYS + words.NAMES + words.CITIES
    chosen = [invented_word(rng) if rng.random() < 0.2 else rng.choice(bank) for _ in range(rng.randint(2, 10))]
    phrase = " ".join(chosen)
    return Turn(user=f"Repeat: {phrase}", assistant=phrase)


def json_chat(rng: Random) -> Chat:
    """A conversation of one JSON request."""
    return Chat(turns=(json_turn(rng),), system=maybe_system(rng))


def talk_chat(rng: Random) -> Chat:
    """One to three light turns; the demo of the model."""
    kinds = (small_talk_turn, story_turn, repeat_turn)
    turns = tuple(rng.choice(kinds)(rng) for _ in range(rng.randint(1, 3)))
    return Chat(turns=turns, system=maybe_system(rng))
