"""Parses DeepSeek's calls, each delimited by special tokens: V3 and R1 with a fenced block of JSON, V3.1 with plain
JSON."""

import re
from collections.abc import Sequence

from router.text.tool_parsers.json_call import WHITE
from router.text.tool_parsers.text_machine import TextMachine
from router.text.tools import ToolDefinition

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
NAME = "<｜tool▁sep｜>"
_HEAD = re.compile(rf"(?:function{NAME}([A-Za-z0-9_-]+)\s*```json|([A-Za-z0-9_-]+){NAME})\s*")


class DeepSeekCalls(TextMachine):
    """Parses both ways of writing."""

    def __init__(self, tools: Sequence[ToolDefinition]) -> None:
        super().__init__(tools, (ALL, ONE), (ONE_END, ALL_END))

    def marked(self, marker: str) -> None:
        if marker == ALL:
            self.expect(ONE, DeepSeekCalls._one)
        else:
            self._one()

    def _one(self) -> None:
        self.read_head(_HEAD, DeepSeekCalls._past)

    def _past(self, text: str, at: int) -> int:
        if text[at] in WHITE + "`":
            return at + 1
        self.go(DeepSeekCalls.text)
        return at
