"""Generated plain text: short stories told from a grammar, one seeded draw at a time.

A story keeps its hero, friend, thing and place from beginning to end, so continuing one well
takes attention over the text and not only the previous word.
"""

from dataclasses import dataclass
from random import Random

from tandem_bench import story_words as words

_OPENINGS = (
    "Once upon a time there was {a_hero} named {name}.",
    "There was once {a_hero} named {name}.",
    "{name} was {a_hero} who lived near the {place}.",
    "In {a_adj2} {place} lived {a_hero} called {name}.",
    "Long ago, {a_hero} named {name} lived by the {place}.",
)
_HABITS = (
    "{name} loved to look for {food} in the {place}.",
    "Every day {name} walked to the {place2} to see {friend}.",
    "{name} had {a_color} {thing} and was very proud of it.",
    "{name} and {friend} were good friends.",
    "{name} liked {food} more than anything else.",
    "People in the {place} said that {name} was {adj} and {adj2}.",
    "The {animal} lived in {a_color} house with a door of {color2} wood.",
)
_TROUBLES = (
    "{time}, {name} lost the {color} {thing} in the {place2}.",
    "{time}, {name} found {a_color} {thing} under a tree.",
    "{time}, {friend} came to {name} and asked for help.",
    "{time}, {a_adj2} {animal2} took the {thing} and ran to the {place2}.",
    "{time}, it was very {weather}, and {name} could not find the way home.",
    "{time}, {name} heard a strange sound from the {place2}.",
)
_SPEECH = (
    '"Where is my {thing}?" asked {name}.',
    '"I will help you," said {friend}.',
    '"Look, {a_color} {thing}!" said {name}.',
    '"Do not be afraid," said the {animal2}.',
    '"Let us go to the {place2} together," said {friend}.',
    '"You are very kind," said {name} to the {animal2}.',
    '"I have {number} pieces of {food}," said the {animal2}.',
)
_SEARCH = (
    "They looked behind the {place2} and under the old bridge.",
    "{name} asked the {animal2}, but the {animal2} did not know.",
    "The two friends walked for {number} hours through the {place}.",
    "It was {weather} outside, and the road to the {place2} was long.",
    "{friend} climbed a tall tree and saw something {color} far away.",
    "{name} sat down, ate some {food} and thought about it.",
    "The {adj2} {animal2} showed them the way.",
    "They counted {number} steps and stopped near the {place2}.",
)
_RESULTS = (
    "At last they found the {thing} near the {place2}.",
    "Then {name} saw the {color} {thing} and was happy again.",
    "The {animal2} gave the {thing} back and said sorry.",
    "{name} shared the {food} with {friend} and the {animal2}.",
    "In the end the {thing} was only a gift from {friend}.",
)
_ENDINGS = (
    "{name} went home and slept well.",
    "From that day on, {name} and the {animal2} were friends.",
    "They all ate {food} and laughed until the evening.",
    "And {name} never lost the {thing} again.",
    "{name} learned that it is good to be {adj}.",
    "That is the story of {name} the {animal}.",
)
_NUMBERS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One story, kept as sentences so that other generators can put text between them."""

    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The story in one paragraph."""
        return " ".join(self.sentences)


def tell(rng: Random, *, animal: str | None = None, short: bool = False) -> Story:
    """Tell one story; `short` keeps it within a chat answer."""
    cast = _cast(rng, animal)
    beats = [rng.choice(_OPENINGS)]
    plan = ((_HABITS, 1), (_TROUBLES, 1), (_RESULTS, 1)) if short else _long_plan(rng)
    for templates, count in plan:
        beats += rng.sample(templates, count)
    beats.append(rng.choice(_ENDINGS))
    return Story(sentences=tuple(beat.format_map(cast) for beat in beats))


def _long_plan(rng: Random) -> tuple[tuple[tuple[str, ...], int], ...]:
    return (
        (_HABITS, rng.randint(1, 3)),
        (_TROUBLES, 1),
        (_SPEECH, rng.randint(1, 2)),
        (_SEARCH, rng.randint(1, 4)),
        (_SPEECH, rng.randint(0, 2)),
        (_RESULTS, 1),
    )


def _cast(rng: Random, animal: str | None) -> dict[str, str]:
    name, friend = rng.sample(words.NAMES, 2)
    hero = animal or rng.choice(words.ANIMALS)
    adj, adj2 = rng.sample(words.ADJECTIVES, 2)
    place, place2 = rng.sample(words.PLACES, 2)
    color, color2 = rng.sample(words.COLORS, 2)
    return {
        "name": name,
        "friend": friend,
        "animal": hero,
        "animal2": rng.choice([a for a in words.ANIMALS if a != hero]),
        "a_hero": f"{with_article(adj)} {hero}",
        "a_adj2": with_article(adj2),
        "a_color": with_article(color),
        "adj": adj,
        "adj2": adj2,
        "place": place,
        "place2": place2,
        "color": color,
        "color2": color2,
        "thing": rng.choice(words.OBJECTS),
        "food": rng.choice(words.FOODS),
        "weather": rng.choice(words.WEATHER),
        "time": rng.choice(words.TIMES),
        "number": rng.choice(_NUMBERS),
    }


def with_article(noun: str) -> str:
    """The noun after "a" or "an", by its first letter."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
