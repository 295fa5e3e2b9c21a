"""Parses a call written as a JSON object, `{"name": …, "arguments": {…}}`, as it grows."""

import json
import re
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Any

WHITE = " \t\r\n"
_ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = _ARGUMENTS | {"name", "type", "id"}
_MAX_KEY_CHARS = 32
_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')


class JsonSpan:
    """Finds the end of an object, list or string, starting after its first character. Its content may be invalid
    JSON."""

    def __init__(self, first: str) -> None:
        """`first`: the character that the value began with."""
        self._depth = 0 if first == '"' else 1
        self._in_text = first == '"'
        self._is_escaped = False
        self.ended = False

    def feed(self, text: str, at: int, stop: int | None = None) -> int:
        """Read on from `at`, not beyond `stop`; return the position after the last character of the value."""
        stop = len(text) if stop is None else min(stop, len(text))
        while at < stop and not self.ended:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            found = (_INSIDE if self._in_text else _OUTSIDE).search(text, at, stop)
            if found is None:
                return stop
            at = found.end()
            self._met(found[0])
        return at

    def _met(self, char: str) -> None:
        if char == "\\":
            self._is_escaped = True
            return
        if char == '"':
            self._in_text = not self._in_text
        else:
            self._depth += 1 if char in "{[" else -1
        self.ended = not self._in_text and self._depth == 0


class JsonCallState(Enum):
    """The state of a call after some text."""

    ON = auto()
    ENDED = auto()
    BROKEN = auto()
    """The next character does not belong to it. If the call has begun it is over; otherwise there was none."""


class JsonCall:
    """Parses one object, which becomes a call as soon as the name of an offered tool and its arguments are there."""

    def __init__(self, names: Collection[str]) -> None:
        self.begun: str | None = None
        """Name of the tool, as soon as the call has begun."""
        self._names = names
        self._arguments: list[str] = []
        self._state: Callable[[JsonCall, str, int], int] = JsonCall._open
        self._reading = JsonCallState.ON
        self._key = ""
        self._span: JsonSpan | None = None
        self._parts: list[str] = []
        self._name: str | None = None
        self._early: str | None = None
        """Arguments that came before the name."""

    def feed(self, text: str, at: int) -> tuple[JsonCallState, int]:
        """Read on from `at`; return the state, and the position of the first character that was not read."""
        while at < len(text) and self._reading is JsonCallState.ON:
            at = self._state(self, text, at)
        return self._reading, at

    def drain(self) -> str:
        """Return the arguments that were read since the last call."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _break(self, at: int) -> int:
        self._reading = JsonCallState.BROKEN
        return at

    def _expect(self, text: str, at: int, chars: str, then: Callable[["JsonCall", str, int], int]) -> int:
        """Skip white space and one of `chars`, from which `then` reads on."""
        if text[at] in WHITE:
            return at + 1
        if text[at] not in chars:
            return self._break(at)
        self._state = then
        return at

    def _open(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", JsonCall._opened)

    def _opened(self, _text: str, at: int) -> int:
        self._state = JsonCall._first_key
        return at + 1

    def _first_key(self, text: str, at: int) -> int:
        return self._expect(text, at, '"', JsonCall._begin_key)

    def _begin_key(self, text: str, at: int) -> int:
        self._span, self._parts = JsonSpan('"'), ['"']
        self._state = JsonCall._in_key
        return at + 1

    def _in_key(self, text: str, at: int) -> int:
        read = sum(map(len, self._parts))
        end = self._collect(text, at, at + _MAX_KEY_CHARS - read)
        if self._span_now().ended:
            key = self._value()
            if key not in _KEYS:
                return self._break(end)
            self._key = key
            self._state = JsonCall._colon
        elif read + end - at >= _MAX_KEY_CHARS:
            return self._break(end)
        return end

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", JsonCall._past_colon)

    def _past_colon(self, _text: str, at: int) -> int:
        self._state = JsonCall._begin_value
        return at + 1

    def _begin_value(self, text: str, at: int) -> int:
        char = text[at]
        if char in WHITE:
            return at + 1
        if self._key == "name" and char != '"':
            return self._break(at)
        if self._key in _ARGUMENTS and char == "{" and self._name is not None and self.begun is None:
            self._begin(char)
            self._span = JsonSpan(char)
            self._state = JsonCall._in_arguments
        elif char in '"{[':
            self._span, self._parts = JsonSpan(char), [char]
            self._state = JsonCall._in_value
        elif char.isalnum() or char == "-":
            self._parts = [char]
            self._state = JsonCall._in_scalar
        else:
            return self._break(at)
        return at + 1

    def _in_arguments(self, text: str, at: int) -> int:
        """Pass the arguments on as they arrive."""
        span = self._span_now()
        end = span.feed(text, at)
        self._arguments.append(text[at:end])
        if span.ended:
            self._state = JsonCall._past_value
        return end

    def _in_value(self, text: str, at: int) -> int:
        end = self._collect(text, at)
        return self._took_value(end) if self._span_now().ended else end

    def _in_scalar(self, text: str, at: int) -> int:
        if text[at] not in WHITE + ",}":
            self._parts.append(text[at])
            return at + 1
        return self._took_value(at)

    def _took_value(self, at: int) -> int:
        self._state = JsonCall._past_value
        if self._key == "name":
            name = self._value()
            if name not in self._names:
                return self._break(at)
            self._name = name
            if self._early is not None and self.begun is None:
                self._begin(self._early)
        elif self._key in _ARGUMENTS and self.begun is None:
            return self._took_arguments(at)
        return at

    def _took_arguments(self, at: int) -> int:
        """Handle an object that came too early, one that is written as a string, or neither."""
        raw = "".join(self._parts)
        if raw[0] == '"':
            raw = self._value() or ""
        if raw in ("null", ""):
            raw = "{}"
        if not raw.startswith("{"):
            return self._break(at)
        if self._name is None:
            self._early = raw
        else:
            self._begin(raw)
        return at

    def _past_value(self, text: str, at: int) -> int:
        return self._expect(text, at, ",}", JsonCall._comma_or_end)

    def _comma_or_end(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._state = JsonCall._first_key
            return at + 1
        if self._name is None:
            return self._break(at)
        if self.begun is None:
            self._begin("{}")
        self._reading = JsonCallState.ENDED
        return at + 1

    def _begin(self, arguments: str) -> None:
        self.begun = self._name
        self._arguments.append(arguments)

    def _collect(self, text: str, at: int, stop: int | None = None) -> int:
        end = self._span_now().feed(text, at, stop)
        self._parts.append(text[at:end])
        return end

    def _span_now(self) -> JsonSpan:
        assert self._span is not None  # noqa: S101  # set with the state that reads it
        return self._span

    def _value(self) -> Any:
        """Return the parsed text that was collected; None if it is invalid."""
        try:
            value = json.loads("".join(self._parts))
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, str) else None
