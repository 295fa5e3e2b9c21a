"""What shape a client wants its answers to have, as one grammar for llguidance.

Nothing is read or compiled here: that is for a process which can be killed. JSON comes without spaces between its
parts: what may be anywhere could go on for ever.
"""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from router.text.grammars.closed_schema import closed_schema
from tandem.errors import InvalidRequest
from tandem.values.sampling import MAX_GRAMMAR_CHARS

MAX_CHOICES = 4096
_STRICT = {"lenient": False, "whitespace_flexible": False}
"""A keyword of JSON Schema that cannot be kept is refused, not left out."""
_ANY_OBJECT = {"type": "object"}


class Shape(Enum):
    """Ways to say what an answer must be."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    """Lark as llguidance writes it, or GBNF, which has `::=`."""
    LARK = "lark"
    """Of our own making, for calls of tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What a client asked for, and in which field."""

    shape: Shape
    value: Any
    """A schema, as an object, a boolean or its text; texts; or one text. Nothing of a JSON object."""
    param: str
    disables_additional_properties: bool = False
    """Objects of a JSON schema have no properties but those that it names, unless it says otherwise."""

    def grammar(self) -> str:
        """For GrammarChecker. Raises InvalidRequest naming the field."""
        match self.shape:
            case Shape.JSON_SCHEMA | Shape.JSON_OBJECT:
                found = self._json(self.schema)
            case Shape.REGEX:
                found = _lark(f"start: /{_slashes_escaped(self._text())}/")
            case Shape.CHOICE:
                found = _lark("start: " + " | ".join(json.dumps(choice) for choice in self._choices()))
            case Shape.GRAMMAR:
                text = self._text()
                found = text if "::=" in text else _lark(text)
            case Shape.LARK:
                found = _lark(self._text())
        if len(found) > MAX_GRAMMAR_CHARS:
            raise self._refusal(f"more than {MAX_GRAMMAR_CHARS} characters")
        return found

    @property
    def schema(self) -> Any:
        """Of JSON. Raises InvalidRequest."""
        if self.shape is Shape.JSON_OBJECT:
            return _ANY_OBJECT
        schema = self._schema(self.value)
        if not self.disables_additional_properties:
            return schema
        try:
            if len(json.dumps(schema)) > MAX_GRAMMAR_CHARS:
                raise self._refusal(f"more than {MAX_GRAMMAR_CHARS} characters")
            return closed_schema(schema)
        except RecursionError:
            raise self._refusal("this schema cannot be read") from None
        except ValueError as error:
            raise self._refusal(str(error)) from None

    def _json(self, schema: Any) -> str:
        matcher = importlib.import_module("llguidance").LLMatcher
        try:
            return str(matcher.grammar_from_json_schema(json.dumps(schema), overrides=_STRICT))
        except (ValueError, RecursionError):
            raise self._refusal("this schema cannot be read") from None

    def _schema(self, value: Any) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise self._refusal("the schema is not JSON") from None
        if not isinstance(value, (dict, bool)):
            raise self._refusal("a JSON schema is an object")
        return value

    def _choices(self) -> Sequence[str]:
        value = self.value
        if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= MAX_CHOICES:
            raise self._refusal(f"choice: 1 to {MAX_CHOICES} texts")
        if not all(isinstance(choice, str) and choice for choice in value):
            raise self._refusal("choice: each must be a text that is not empty")
        return value

    def _text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            raise self._refusal(f"{self.shape.value} must be a text that is not empty")
        return self.value

    def _refusal(self, why: str) -> InvalidRequest:
        return InvalidRequest(f"{self.param}: {why}", param=self.param)


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _slashes_escaped(pattern: str) -> str:
    """A slash ends a pattern in Lark, unless it is escaped."""
    escaped, is_escaped = [], False
    for char in pattern:
        escaped.append("\\/" if char == "/" and not is_escaped else char)
        is_escaped = char == "\\" and not is_escaped
    return "".join(escaped)
