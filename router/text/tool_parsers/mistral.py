"""Parses Mistral's calls: `[TOOL_CALLS]` and a list of objects, or for each call the tool's name and its arguments."""

import re
from collections.abc import Sequence

from router.text.tool_parsers.json_call import WHITE
from router.text.tool_parsers.text_machine import TextMachine
from router.text.tools import ToolDefinition

OPEN, ARGUMENTS = "[TOOL_CALLS]", "[ARGS]"
_HEAD = re.compile(r"\s*([A-Za-z0-9_-]+)(?:\[CALL_ID\][A-Za-z0-9]+)?(?:\[ARGS\])?\s*")


class MistralCalls(TextMachine):
    """Parses both ways of writing."""

    def __init__(self, tools: Sequence[ToolDefinition]) -> None:
        super().__init__(tools, (OPEN,))

    def marked(self, marker: str) -> None:
        self.go(MistralCalls._begun)

    def _begun(self, text: str, at: int) -> int:
        if text[at] in WHITE:
            self.hold(text[at])
            return at + 1
        if text[at] != "[":
            self.read_head(_HEAD)
            return at
        self.hold(text[at])
        self.read_json_call(MistralCalls._listed)
        return at + 1

    def _listed(self, text: str, at: int) -> int:
        """Read on after a call of a list."""
        if text[at] == "{":
            self.read_json_call(MistralCalls._listed)
            return at
        if text[at] == "]" or text[at] not in WHITE + ",":
            self.go(MistralCalls.text)
            return at + (text[at] == "]")
        return at + 1
