"""Parses one call in Python syntax, `weather(city="Paris", days=[1, 2])`, into JSON. Pure.

`ast` is not used: a model's text is parsed on the event loop that all requests share, and Python's own parser takes a
tenth of a second for a list of 30,000 numbers. Here length, depth and the number of values are bounded, and each
character is examined once.
"""

import ast
import json
import re
import warnings
from typing import Any

MAX_CALL_CHARS = 64 * 1024
MAX_VALUES = 2048
"""Values of a call, keys and lists included; parsing so many takes a few milliseconds."""
MAX_DEPTH = 64
_MAX_DIGITS = 1024
"""Digits of a number: converting digits takes quadratic time."""
_WHITE = re.compile(r"[ \t\r\n\f]*+")
_NAME = re.compile(r"[^\W\d]\w*+")
_NUMBER = re.compile(
    r"[+-]?[ \t]*+(?:0[xX][0-9a-fA-F_]++|0[oO][0-7_]++|0[bB][01_]++"
    r"|(?P<float>(?:[0-9][0-9_]*+\.[0-9_]*+|\.[0-9][0-9_]*+)(?:[eE][+-]?[0-9_]++)?|[0-9][0-9_]*+[eE][+-]?[0-9_]++)"
    r"|[0-9][0-9_]*+)(?!\w)"
)
# No possessive group that looks ahead: Python before 3.11.5 matches it wrongly (CPython issue 100061).
_TEXT = re.compile(
    r"""(?P<prefix>[rRuU]?)(?P<text>"{3}[^"\\]*+(?:(?:\\.|"(?!""))[^"\\]*+)*"{3}"""
    r"""|'{3}[^'\\]*+(?:(?:\\.|'(?!''))[^'\\]*+)*'{3}"""
    r"""|"(?!"")(?:[^"\\\n]|\\.)*+"|'(?!'')(?:[^'\\\n]|\\.)*+')""",
    re.DOTALL,
)
_PLAIN = re.compile(r"""(?:[^\\\r]|\\[nrt"'\\])*+""")
_ESCAPE = re.compile(r"\\(.)")
_MEANT = {"n": "\n", "r": "\r", "t": "\t"}
_LONG_CHARS = 256
_RARE_VALUES = 8
"""Additional cost of a short text with other escapes."""
_CONSTANTS = {"True": True, "False": False, "None": None}


def read_call(text: str) -> tuple[str, str] | None:
    """Return (name, arguments as JSON) of a call with constant keyword arguments; None for anything else or too
    large."""
    if len(text) > MAX_CALL_CHARS:
        return None
    try:
        name, values = _Reader(text).call()
        return name, json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (_NoCall, ValueError, TypeError):
        # Python has values that JSON lacks: infinity, or a key that is a list.
        return None


class _NoCall(Exception):
    """The text is not such a call."""


class _Reader:
    """Reads the text once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._num_values = 0

    def call(self) -> tuple[str, dict[str, Any]]:
        """Parse the whole text."""
        name = self._name()
        if name in _CONSTANTS:
            raise _NoCall
        self._expect("(")
        values: dict[str, Any] = {}
        while not self._has(")"):
            key = self._name()  # Python's keywords are allowed here: tools do have an argument `from`
            if key in values or key in _CONSTANTS:
                raise _NoCall
            self._expect("=")
            values[key] = self._value(1)
            if not self._has(","):
                self._expect(")")
                break
        self._skip()
        if self._at < len(self._text):
            raise _NoCall
        return name, values

    def _value(self, depth: int) -> Any:
        self._count(1)
        if depth > MAX_DEPTH:
            raise _NoCall
        if self._has("["):
            return self._items("]", depth)[0]
        if self._has("("):
            items, is_tuple = self._items(")", depth)
            return items if is_tuple or not items else items[0]
        if self._has("{"):
            return self._pairs(depth)
        if (found := _TEXT.match(self._text, self._at)) is not None:
            return self._texts(found)
        if (found := _NUMBER.match(self._text, self._at)) is not None:
            self._at = found.end()
            return _number(found)
        if (name := self._name()) not in _CONSTANTS:
            raise _NoCall
        return _CONSTANTS[name]

    def _items(self, end: str, depth: int) -> tuple[list[Any], bool]:
        """Parse what precedes `end`, and return whether any of it was followed by a comma."""
        items: list[Any] = []
        has_comma = False
        while not self._has(end):
            items.append(self._value(depth + 1))
            if not self._has(","):
                self._expect(end)
                break
            has_comma = True
        return items, has_comma

    def _pairs(self, depth: int) -> dict[Any, Any]:
        pairs: dict[Any, Any] = {}
        while not self._has("}"):
            key = self._value(depth + 1)
            self._expect(":")
            pairs[key] = self._value(depth + 1)
            if not self._has(","):
                self._expect("}")
                break
        return pairs

    def _texts(self, found: re.Match[str]) -> str:
        """Concatenate adjacent strings, as Python does."""
        parts = []
        while True:
            self._at = found.end()
            parts.append(self._meant(found))
            self._skip()
            if (following := _TEXT.match(self._text, self._at)) is None:
                return "".join(parts)
            self._count(1)
            found = following

    def _meant(self, found: re.Match[str]) -> str:
        """Use Python's own parser for long texts and rare escapes, which costs some microseconds for each."""
        quotes = 3 if found["text"].startswith(('"""', "'''")) else 1
        text = found["text"][quotes:-quotes]
        if "\\" not in text and "\r" not in text:
            return text
        is_long = len(text) > _LONG_CHARS
        if not is_long and not found["prefix"] and _PLAIN.fullmatch(text) is not None:
            return _ESCAPE.sub(lambda escape: _MEANT.get(escape[1], escape[1]), text)
        self._count(0 if is_long else _RARE_VALUES)
        with warnings.catch_warnings(action="ignore"):  # for invalid escapes
            try:
                return str(ast.literal_eval(found[0]))
            except SyntaxError:
                raise _NoCall from None

    def _count(self, num_values: int) -> None:
        self._num_values += num_values
        if self._num_values > MAX_VALUES:
            raise _NoCall

    def _name(self) -> str:
        self._skip()
        if (found := _NAME.match(self._text, self._at)) is None:
            raise _NoCall
        self._at = found.end()
        return found[0]

    def _skip(self) -> None:
        if (found := _WHITE.match(self._text, self._at)) is not None:
            self._at = found.end()

    def _has(self, char: str) -> bool:
        self._skip()
        if not self._text.startswith(char, self._at):
            return False
        self._at += 1
        return True

    def _expect(self, char: str) -> None:
        if not self._has(char):
            raise _NoCall


def _number(found: re.Match[str]) -> int | float:
    text = "".join(found[0].split())
    if len(text) > _MAX_DIGITS:
        raise _NoCall
    return float(text) if found["float"] else int(text, 0)
