"""Parses calls as a Python list of calls, `[weather(city="Paris"), clock()]`, instead of an answer (Llama 3.2 and
4)."""

from collections.abc import Sequence

from router.text.tool_parsers.json_call import WHITE
from router.text.tool_parsers.python_call import MAX_CALL_CHARS, read_call
from router.text.tool_parsers.text_machine import TextMachine
from router.text.tools import ToolDefinition

_OPENING, _CLOSING = "([{", ")]}"


class PythonicCalls(TextMachine):
    """Reports a call when it is complete: Python's values become JSON."""

    def __init__(self, tools: Sequence[ToolDefinition]) -> None:
        super().__init__(tools, ())
        self.go(PythonicCalls._start)

    def marked(self, marker: str) -> None:
        """Never called, see TextMachine: this family has no markers, and what looked like one would be text."""
        self._say(marker)

    def _start(self, text: str, at: int) -> int:
        if text[at] in WHITE:
            self.hold(text[at])
            return at + 1
        if text[at] == "[":
            self.hold(text[at])
            self._read_call()
            return at + 1
        self.no_call()
        return at

    def _read_call(self) -> None:
        parts: list[str] = []
        depth, quote, is_escaped = 0, "", False

        def step(self: PythonicCalls, text: str, at: int) -> int:
            nonlocal depth, quote, is_escaped
            char = text[at]
            parts.append(char)
            self.hold(char)
            if is_escaped:
                is_escaped = False
            elif quote:
                is_escaped = char == "\\"
                quote = "" if char == quote else quote
            elif char in "\"'":
                quote = char
            elif char in _OPENING:
                depth += 1
            elif char in _CLOSING:
                depth -= 1
                if depth <= 0:
                    self._take("".join(parts))
                    return at + 1
            if len(parts) > MAX_CALL_CHARS:
                self.no_call()
            return at + 1

        self.go(step)

    def _take(self, text: str) -> None:
        found = read_call(text)
        if found is None or found[0] not in self.tools:
            self.no_call()
            return
        self.began(found[0])
        self.arguments(found[1])
        self.ended(PythonicCalls._between)

    def _between(self, text: str, at: int) -> int:
        if text[at] in WHITE + ",":
            return at + 1
        if text[at] == "]":
            self.go(PythonicCalls.text)
            return at + 1
        self._read_call()
        return at
