"""Generated requests for JSON objects: the built-in model is trained on them, and quality gates ask them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from tandem_bench import story_words as words

Scalar = str | int | bool

_WORDINGS = (
    "Return a JSON object with {fields}.",
    "Return JSON with {fields}.",
    "Give me a JSON object with {fields}.",
    "Write a JSON object with {fields}.",
    "Please return a JSON object with {fields}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRequest:
    """A request in plain words, and the object that it asks for."""

    text: str
    record: Mapping[str, Scalar]
    """Fields in the order in which they are asked for."""

    def is_answered_by(self, answer: str) -> bool:
        """Whether the first object in an answer is exactly the one asked for; text around it does not count."""
        start = answer.find("{")
        if start < 0:
            return False
        try:
            found, _ = json.JSONDecoder().raw_decode(answer, start)
        except (ValueError, RecursionError):
            return False
        # Compared as text, since Python takes true for 1.
        return json.dumps(found, sort_keys=True) == json.dumps(self.record, sort_keys=True)


def _invented_name(rng: Random) -> str:
    return words.invented_word(rng).capitalize()


_FIELDS: Mapping[str, Callable[[Random], Scalar]] = {
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


def draw_json_request(rng: Random) -> JsonRequest:
    """Draw a request for an object of one to four fields. Trained weights depend on the order of the draws."""
    names = rng.sample(sorted(_FIELDS), rng.randint(1, 4))
    record = {name: _FIELDS[name](rng) for name in names}
    is_quoted = rng.random() < 0.15
    parts = [f"{name} {_spoken(value, is_quoted)}" for name, value in record.items()]
    fields = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return JsonRequest(text=rng.choice(_WORDINGS).format(fields=fields), record=record)


def _spoken(value: Scalar, is_quoted: bool) -> str:
    if isinstance(value, str) and not is_quoted:
        return value
    return json.dumps(value)
