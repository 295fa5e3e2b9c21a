"""Parses one request's answers for tool calls."""

from collections.abc import Callable
from dataclasses import dataclass

from router.text.tool_parsers.events import ToolParser
from router.text.tools import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallReading:
    """Made by `router.text.grammars.tool_calling`; used by `router.api.answer.call_reader`."""

    use: ToolUse
    new_parser: Callable[[], ToolParser]
    """Makes the parser of one choice."""
    shown_ids: frozenset[int]
    """Special tokens that the parser must see."""
    has_short_ids: bool
