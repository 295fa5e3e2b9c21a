"""How one request's answers are read for calls: in `Prepared`, for the doors."""

from collections.abc import Callable
from dataclasses import dataclass

from router.tool_parsers.events import ToolParser
from router.tools import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class Calling:
    """Made by `router.tooling`; read with by `router.call_reader`."""

    use: ToolUse
    new_parser: Callable[[], ToolParser]
    """Of one choice."""
    shown_ids: frozenset[int]
    """Special tokens that the parser must see."""
    has_short_ids: bool
