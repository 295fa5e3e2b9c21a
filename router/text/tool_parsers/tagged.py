"""Parses calls in `<tool_call>` tags: as JSON (Hermes, Qwen 2.5 and 3), or in tags of their own (Qwen3-Coder)."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.text.stop_strings import StopMatcher, StopStrings
from router.text.tool_parsers.json_call import WHITE
from router.text.tool_parsers.text_machine import MAX_HEAD_CHARS, TextMachine
from router.text.tools import ToolDefinition

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_PARAMETER_ENDS = StopStrings((_PARAMETER_END,))


class TaggedCalls(TextMachine):
    """Parses both ways of writing; `has_bare_functions`: also functions without a surrounding tag."""

    def __init__(self, tools: Sequence[ToolDefinition], *, has_bare_functions: bool = False) -> None:
        bare = (_FUNCTION,) if has_bare_functions else ()
        super().__init__(tools, (OPEN, *bare), (CLOSE,))
        self._name, self._written = "", 0
        """The tool whose arguments are being reported, and how many of them were."""

    def marked(self, marker: str) -> None:
        if marker == _FUNCTION:
            self._read_function()
        else:
            self.go(TaggedCalls._begun)

    def _begun(self, text: str, at: int) -> int:
        if text[at] in WHITE:
            self.hold(text[at])
            return at + 1
        if text[at] == "<":
            self.expect(_FUNCTION, TaggedCalls._read_function)
        else:
            self.read_json_call()
        return at

    def _read_function(self) -> None:
        self._read_name(TaggedCalls._take_function)

    def _read_name(self, take: Callable[["TaggedCalls", str], None]) -> None:
        """Read up to the end of a tag that has begun, and pass it to `take`; no call if that is too long."""
        name = ""

        def step(self: TaggedCalls, text: str, at: int) -> int:
            nonlocal name
            if len(name) > MAX_HEAD_CHARS:
                take(self, "")
                return at
            if not self.is_open:
                self.hold(text[at])
            if text[at] == ">":
                take(self, name)
            else:
                name += text[at]
            return at + 1

        self.go(step)

    def _take_function(self, name: str) -> None:
        if name not in self.tools:
            self.no_call()
            return
        self._name, self._written = name, 0
        self.began(name)
        self._between()

    def _between(self) -> None:
        """Expect parameters, or the function's end."""
        tag = ""

        def step(self: TaggedCalls, text: str, at: int) -> int:
            nonlocal tag
            if text[at] in WHITE and not tag:
                return at + 1
            tag += text[at]
            if tag == _PARAMETER:
                self._read_name(TaggedCalls._take_parameter)
            elif tag == _FUNCTION_END:
                self._end()
            elif not (_PARAMETER.startswith(tag) or _FUNCTION_END.startswith(tag)):
                self._end()
                return at
            return at + 1

        self.go(step)

    def _end(self) -> None:
        self.arguments("}" if self._written else "{}")
        self.ended()

    def _take_parameter(self, key: str) -> None:
        if not key:
            self._end()
            return
        matcher, parts = StopMatcher(_PARAMETER_ENDS, include_match=False), list[str]()

        def step(self: TaggedCalls, text: str, at: int) -> int:
            end = text.find(">", at) + 1 or len(text)
            parts.append(matcher.feed(text[at:end]))
            if matcher.match is not None:
                self._write(key, "".join(parts))
                self._between()
            return end

        self.go(step)

    def _write(self, key: str, text: str) -> None:
        properties = self.tools[self._name].schema.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        value = _value(text.removeprefix("\n").removesuffix("\n"), schema)
        pair = f"{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self.arguments(("{" if not self._written else ", ") + pair)
        self._written += 1


def _value(text: str, schema: Any) -> Any:
    """Return a parameter's value: a string if its schema says so, otherwise JSON if the text is valid JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _no_number(_text: str) -> Any:
    raise ValueError("not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError("not representable as a JSON number")
    return number
