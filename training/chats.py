"""Generated conversations: JSON requests, stories on demand, small talk, repetition.

Conversations are (user, assistant) turns; `training.tokenizer` owns how turns become text.
"""

import json
from dataclasses import dataclass
from random import Random

from tandem_bench import stories
from tandem_bench import story_words as words
from tandem_bench.quality.json_requests import draw_json_request
from tandem_bench.story_words import invented_word

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Tandem, a small and friendly model.",
    "Answer briefly.",
    "You answer with JSON when asked.",
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


def json_turn(rng: Random) -> Turn:
    """Ask for a JSON object; the answer is what `json.dumps` prints, in the order asked."""
    request = draw_json_request(rng)
    return Turn(user=request.text, assistant=json.dumps(request.record))


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
