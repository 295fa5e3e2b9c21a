"""Tools that a client lets the model call, the calls that it made, and the bounds on both. Shared by all servers."""

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from tandem.errors import InvalidRequest

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 128 * 1024
"""Characters of all tools of a request, as JSON."""
MAX_DESCRIPTION_CHARS = 16 * 1024
MAX_SCHEMA_DEPTH = 48
MAX_CALLS = 128
"""Calls in one message."""
MAX_CALL_ID_CHARS = 256
_CHOICE = "tool_choice"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CALL_ID = re.compile(r"[!-~]+")
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_NO_OTHERS = {"additionalProperties": False}


class ToolDefinition(Struct, frozen=True, kw_only=True):
    """A tool (function) that the model may call."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments, which are an object; None: it takes none."""
    strict: bool = False
    """Whether its arguments obey the schema even when the model itself decides to call it."""

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema of its arguments, always an object; without named properties it takes none."""
        return {**_NO_PARAMETERS, **self.parameters} if self.parameters else {**_NO_PARAMETERS, **_NO_OTHERS}

    @property
    def num_chars(self) -> int:
        """Characters of the tool as JSON; its depth must be known to be bounded."""
        return len(json.dumps([self.name, self.description, self.parameters], ensure_ascii=False))


class AssistantToolCall(Struct, frozen=True, kw_only=True):
    """One call in an assistant's message."""

    id: str
    name: str
    arguments: str
    """Arguments as JSON text, as the model wrote it."""


class ToolUse(Struct, frozen=True, kw_only=True):
    """The tools of one request, and how they may be used. A request whose tools must not be called has none."""

    tools: tuple[ToolDefinition, ...]
    must_call: bool = False
    """Whether the answer must consist of calls only."""
    allowed: frozenset[str] | None = None
    """Names of the tools that may be called; None: all."""
    parallel: bool = True
    """Whether an answer may have several calls."""

    @property
    def callable_tools(self) -> tuple[ToolDefinition, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)

    @property
    def num_chars(self) -> int:
        """Characters of all tools as JSON."""
        return sum(tool.num_chars for tool in self.tools)

    def check(self, param: str = "tools", choice_param: str = "tool_choice") -> None:
        """Check every bound that needs no model. Raises InvalidRequest; the parameters give the names of the request's
        fields."""
        if not 1 <= len(self.tools) <= MAX_TOOLS:
            raise InvalidRequest(f"{param} must have 1 to {MAX_TOOLS} elements", param=param)
        left, names = MAX_TOOLS_CHARS, set()
        for tool in self.tools:
            _check_tool(tool, param)
            left -= tool.num_chars
            if left < 0:
                raise InvalidRequest(f"{param}: more than {MAX_TOOLS_CHARS} characters", param=param)
            if tool.name in names:
                raise InvalidRequest(f"{param}: {tool.name!r} is not unique", param=param)
            names.add(tool.name)
        if self.allowed is not None and not (self.allowed and self.allowed <= names):
            raise InvalidRequest(f"{choice_param}: names a tool that is not in this request", param=choice_param)


def use_of(
    tools: tuple[ToolDefinition, ...], mode: str, allowed: frozenset[str] | None, parallel: bool
) -> ToolUse | None:
    """Combine tools and mode (none, auto or required); None where no tool may be called. Raises InvalidRequest."""
    if mode not in ("none", "auto", "required"):
        raise InvalidRequest(f"{_CHOICE} must be none, auto, required, or an object with a function", param=_CHOICE)
    if not tools and (mode == "required" or allowed is not None):
        raise InvalidRequest(f"{_CHOICE}: there are no tools to call", param=_CHOICE)
    if not tools:
        return None
    use = ToolUse(tools=tools, must_call=mode == "required", allowed=allowed, parallel=parallel)
    use.check()
    return use if mode != "none" else None


def _check_tool(tool: ToolDefinition, param: str) -> None:
    check_name(tool.name, param)
    if len(tool.description or "") > MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(f"{param}: descriptions may have at most {MAX_DESCRIPTION_CHARS} characters", param=param)
    if tool.parameters is None:
        return
    if tool.parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{param}: parameters must be a schema of type object", param=param)
    if _is_deeper(tool.parameters, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(f"{param}: parameters are nested deeper than {MAX_SCHEMA_DEPTH}", param=param)


def check_name(name: str, param: str) -> None:
    """Check the name of a tool. Raises InvalidRequest."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(f"{param}: a name must have 1 to 128 of the characters A-Z a-z 0-9 _ -", param=param)


def check_call_id(text: str, param: str) -> None:
    """Check the id of a call. Raises InvalidRequest. Clients may send any, and some templates put it into the
    prompt."""
    if len(text) > MAX_CALL_ID_CHARS or not _CALL_ID.fullmatch(text):
        bound = f"1 to {MAX_CALL_ID_CHARS} visible ASCII characters"
        raise InvalidRequest(f"{param}: the id of a call must have {bound}", param=param)


def check_calls(calls: Sequence[AssistantToolCall], param: str) -> None:
    """Check the calls of a message that a client sends back. Their arguments are parsed later, see `arguments_of`."""
    if len(calls) > MAX_CALLS:
        raise InvalidRequest(f"{param}: at most {MAX_CALLS} calls in a message", param=param)
    for call in calls:
        check_call_id(call.id, param)
        check_name(call.name, param)


def arguments_of(call: AssistantToolCall, param: str = "messages") -> dict[str, Any]:
    """Return the arguments as an object; an empty one where the client left the text empty."""
    try:
        value = json.loads(call.arguments or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or _is_deeper(value, MAX_SCHEMA_DEPTH):
        raise InvalidRequest(f"{param}: the arguments of a call must be a JSON object", param=param)
    return value


def call_id(request_id: str, choice_index: int, index: int, *, is_short: bool = False) -> str:
    """Return the id of a call, the same for the same call of the same request on every router.

    `is_short`: nine letters and digits, as templates of Mistral's require.
    """
    found = blake2b(f"{request_id}:{choice_index}:{index}".encode(), digest_size=12)
    if not is_short:
        return f"call_{found.hexdigest()}"
    number, text = int.from_bytes(found.digest()), ""
    for _ in range(9):
        number, digit = divmod(number, len(_DIGITS))
        text += _DIGITS[digit]
    return text


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, Mapping) else one if isinstance(one, list) else ())
        ]
        if not level:
            return False
    return True


def _no_number(_text: str) -> Any:
    raise ValueError("not a JSON number")
