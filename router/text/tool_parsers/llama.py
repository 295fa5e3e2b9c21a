"""Parses Llama 3's calls: a JSON object instead of an answer, or after `<|python_tag|>`; several separated by
semicolons."""

from collections.abc import Sequence

from router.text.tool_parsers.json_call import WHITE
from router.text.tool_parsers.text_machine import TextMachine
from router.text.tools import ToolDefinition

OPEN = "<|python_tag|>"


class LlamaCalls(TextMachine):
    """Holds an answer that begins with a brace until it is clear whether it is a call."""

    def __init__(self, tools: Sequence[ToolDefinition]) -> None:
        super().__init__(tools, (OPEN,))
        self.go(LlamaCalls._start)

    def marked(self, marker: str) -> None:
        self.read_json_call(LlamaCalls._between)

    def _start(self, text: str, at: int) -> int:
        if text[at] in WHITE:
            self.hold(text[at])
            return at + 1
        if text[at] == "{":
            self.read_json_call(LlamaCalls._between)
        else:
            self.no_call()
        return at

    def _between(self, text: str, at: int) -> int:
        if text[at] in WHITE + ";,":
            return at + 1
        if text[at] == "{":
            self.read_json_call(LlamaCalls._between)
        else:
            self.go(LlamaCalls.text)
        return at
