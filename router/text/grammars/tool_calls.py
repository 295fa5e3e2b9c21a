"""Builds grammars (Lark, as llguidance reads it) for answers that are tool calls, or text with calls in it."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.grammars.closed_schema import closed_schemas
from router.text.tool_parsers.families import NAME, CallForm
from router.text.tools import ToolDefinition, ToolUse
from tandem.errors import InvalidRequest

MAX_CALLS_IN_ANSWER = 16
"""Calls that a grammar allows: unbounded repetition might never end."""
_STRICT = {"lenient": False, "whitespace_flexible": False}
ANY = "/(?s:.*)/"
"""Any text; special tokens are not text."""


class CallGrammar:
    """Builds grammars for one model; `token_ids`: of the markers that are single tokens there."""

    def __init__(self, form: CallForm, token_ids: Mapping[str, int], thinks_from: str | None = None) -> None:
        """`thinks_from`: the mark that begins reasoning; text beside calls must not begin with it."""
        self._form = form
        self._no_thought = "" if thinks_from is None else f" & ~/\\s*{_escaped(thinks_from)}(?s:.*)/"
        self._token_ids = token_ids
        longest_first = sorted(token_ids, key=len, reverse=True)
        self._tokens = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if token_ids else None

    def calls_only(self, use: ToolUse, answer: Any = None) -> str:
        """Allow one or more calls whose arguments obey their schemas; or JSON of the schema `answer`, if given."""
        rules = self._rules(use, is_strict=True)
        start = "start: block" if answer is None else f"start: block | answer\nanswer: {_json(answer)}"
        return "\n".join([start, f"block: {self._block(use)}", *rules])

    def with_text(self, use: ToolUse) -> str:
        """Allow text with calls in it; the arguments of strict tools obey their schemas, others are any object."""
        trigger, starts = self._form.trigger, self._form.starts
        rules = self._rules(use, is_strict=False)
        if trigger is None:
            text = rf"/(?s:\s*([^{{\s].*)?)/{without(starts)}{self._no_thought}"
            return "\n".join(["start: block | TEXT", f"TEXT: {text}", f"block: {self._block(use)}", *rules])
        times = "*" if use.parallel else "?"
        # Text that is not a call must not look like one to the parser either.
        any_text = ANY + self._no_thought
        texts = [f"LEAD: {any_text}{without(starts)}", f"REST: {any_text}{without((trigger, *starts))}"]
        if trigger in self._token_ids:
            texts[0] = f"LEAD: {any_text}{without((trigger, *starts))}"
            lead = f"lead: LEAD {self._written(trigger)}"
        else:
            lead = f"lead[lazy]: LEAD {json.dumps(trigger, ensure_ascii=False)}"
        block = f"block: {self._block(use, is_begun=True)}"
        return "\n".join([f"start: (lead block){times} rest", lead, "rest: REST", *texts, block, *rules])

    def _block(self, use: ToolUse, *, is_begun: bool = False) -> str:
        """`is_begun`: the trigger has been written. If each call has its own trigger, text may stand between two
        calls."""
        form = self._form
        begin = form.open.removeprefix(form.trigger or "") if is_begun and form.open else form.open
        if is_begun and not form.open:
            return "call"
        more = f" ({self._written(form.joint)} call){{0,{MAX_CALLS_IN_ANSWER - 1}}}" if use.parallel else ""
        if use.parallel and not form.joint:
            more = f" call{{0,{MAX_CALLS_IN_ANSWER - 1}}}"
        return f"{self._written(begin)} call{more} {self._written(form.close)}".strip()

    def _rules(self, use: ToolUse, *, is_strict: bool) -> list[str]:
        form, tools = self._form, use.callable_tools
        before = form.before
        if not is_strict and not form.open and form.trigger is not None:
            before = before.removeprefix(form.trigger)
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        schemas = iter(_closed_parameters([tool for tool in tools if is_strict or tool.strict]))
        for i, tool in enumerate(tools):
            parts = self._written(before.replace(NAME, tool.name)), f"args_{i}", self._written(form.after)
            rules.append(f"call_{i}: {' '.join(filter(None, parts))}")
            schema = next(schemas) if is_strict or tool.strict else {"type": "object"}
            rules.append(f"args_{i}: {_json(schema)}")
        return rules

    def _written(self, text: str) -> str:
        """Return the grammar that writes this text: single tokens where there are any, else characters."""
        pieces: Sequence[str] = self._tokens.split(text) if self._tokens is not None else [text]
        return " ".join(
            f"<[{self._token_ids[piece]}]>" if piece in self._token_ids else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )


def _closed_parameters(tools: Sequence[ToolDefinition]) -> list[Any]:
    """Return the closed schema of each tool's arguments: they may have no other properties."""
    try:
        return closed_schemas(tool.schema for tool in tools)
    except (ValueError, RecursionError):
        raise InvalidRequest("tools: their parameters have too many parts", param="tools") from None


def _json(schema: Any) -> str:
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": _STRICT}
    return f"%json {json.dumps(schema)}"


def without(texts: Sequence[str]) -> str:
    """Return a suffix for a regular expression that excludes texts containing any of these."""
    if not texts:
        return ""
    return f" & ~/(?s:.*)({'|'.join(map(_escaped, texts))})(?s:.*)/"


def _escaped(text: str) -> str:
    """Escape a text for a regular expression in Lark, which a slash would end."""
    return re.escape(text).replace("/", "\\/")


def strict_tools(tools: Sequence[ToolDefinition]) -> bool:
    """Whether any tool requires its schema to be enforced."""
    return any(tool.strict for tool in tools)
