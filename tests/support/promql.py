"""What a PromQL expression names: enough of a reader for that, and no more. promtool says whether it parses."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_WORDS = {"and", "or", "unless", "offset", "bool"}
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_NAME = re.compile(r"(?<![\w:.])([a-zA-Z_:][\w:]*)\s*(?P<next>[({]?)")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')


class Matcher(NamedTuple):
    """One condition on a label."""

    label: str
    op: str
    value: str


class Selector(NamedTuple):
    """A metric, and conditions on its labels."""

    name: str
    matchers: tuple[Matcher, ...]


class Named(NamedTuple):
    """All that an expression names."""

    selectors: tuple[Selector, ...]
    grouped_by: frozenset[str]


def named(expr: str) -> Named:
    """Read one expression that promtool has found sound."""
    expr = re.sub(r"#[^\n]*", "", expr)
    labels = {label.strip() for found in _GROUPING.findall(expr) for label in found.split(",")}
    return Named(tuple(_selectors(_GROUPING.sub(" ", expr))), frozenset(labels - {""}))


def _selectors(expr: str) -> Iterator[Selector]:
    braces = {match.start(): match.group(1) for match in re.finditer(r"\{([^}]*)\}", expr)}
    outside = re.sub(r"\{[^}]*\}|\[[^\]]*\]", lambda match: match.group()[0] + " " * (len(match.group()) - 1), expr)
    outside = re.sub(r"\boffset\s+\w+", lambda match: " " * len(match.group()), outside)
    for match in _NAME.finditer(outside):
        name, follows = match.group(1), match.group("next")
        if follows != "(" and name not in _WORDS:
            inside = braces[match.start("next")] if follows == "{" else ""
            yield Selector(name, tuple(Matcher(*found) for found in _MATCHER.findall(inside)))
