"""docs/use/fields.md lists the handling of every field, and the servers follow it."""

import re
from pathlib import Path
from typing import Any

import pytest

from router.http.anthropic.body import MessagesBody
from router.http.body.strict_body import NOT_YET, StrictBody, asks_for_nothing
from router.http.openai.responses.schemas import ResponsesBody
from router.http.openai.schemas import ChatBody, CompletionBody

PAGE = (Path(__file__).resolve().parents[4] / "docs/use/fields.md").read_text()
BODIES: dict[str, type[StrictBody]] = {
    "chat": ChatBody, "completions": CompletionBody, "responses": ResponsesBody, "messages": MessagesBody,
}  # fmt: skip
NOTES = {"user", "metadata", "safety_identifier", "prompt_cache_key", "service_tier", "parallel_tool_calls"}


def columns(route: str) -> dict[str, str]:
    """The page's entry for each field, from the route's table."""
    (table,) = [part for part in PAGE.split("\n## ") if f"| {route} |" in part]
    head, _, *rows = [re.split(r" *\| *", line.strip("| ")) for line in table.splitlines() if line.startswith("|")]
    found = {row[0].strip("`"): row[head.index(route)] for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.parametrize("route", BODIES)
def test_fields_page_lists_every_field(route: str) -> None:
    body, documented = BODIES[route], columns(route)
    served = set(body.model_fields)
    refused = set(asks_for_nothing(body))
    assert {name for name, state in documented.items() if state in ("yes", "note")} == served
    assert {name for name, state in documented.items() if state == "note"} <= NOTES
    assert {name for name, state in documented.items() if state == "no"} <= refused
    # Those that every body knows need not stand in each table.
    of_all = set(NOT_YET) if route in ("responses", "messages") else set[Any]()
    assert refused <= {name for name, state in documented.items() if state == "no"} | of_all
