"""A conversation in the form that chat templates take: turns with transformers' field names, and tools.

Templates differ in their support for tools. One that shows tools, calls and results gets them, in the form that it
accepts (`ToolForm`, detected once by rendering a sample). For any other the conversation is rewritten in plain words:
the tools in the system message, calls and results in tags, as Hermes writes them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from router.text.tools import AssistantToolCall, ToolDefinition, arguments_of, check_call_id, check_calls
from tandem.errors import InvalidRequest

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MAX_MESSAGES = 2048
MAX_VARIABLES = 16
MAX_VARIABLE_CHARS = 256
_VARIABLES, _CONTINUE = "chat_template_kwargs", "continue_final_message"
_INSTRUCTIONS = """You can call functions. They are described here in JSON, one a line:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as a JSON object in these tags:
<tool_call>
{{"name": "function-name", "arguments": {{}}}}
</tool_call>
What it returns is then told to you in <tool_response> tags."""
_NOTE, _ARGUMENT, _RESULT = "tandemsampletool", "tandemsampleargument", "tandemsampleresult"


class Message(Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str
    name: str | None = None
    tool_calls: tuple[AssistantToolCall, ...] = ()
    """Tool calls of an assistant's turn."""
    tool_call_id: str | None = None
    """In a tool's turn: the call whose result the content is."""
    reasoning: str | None = None
    """Reasoning before an assistant's answer; templates render the part that their model should see."""

    @property
    def num_chars(self) -> int:
        """Characters of everything that a client wrote."""
        found = len(self.content) + len(self.name or "") + len(self.reasoning or "")
        for call in self.tool_calls:
            found += len(call.id) + len(call.name) + len(call.arguments)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """The form in which a template that supports tools expects calls."""

    arguments_as_text: bool = False
    """Whether arguments are passed as text instead of an object."""
    empty_is_none: bool = True
    """Whether a turn of calls alone has content None; otherwise an empty text."""


class TemplateOptions(Struct, frozen=True, kw_only=True):
    """A client's options for rendering its conversation."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    """Values for the template's own variables, such as `enable_thinking`: texts, numbers, booleans."""
    effort: Effort | None = None
    """Reasoning effort, for templates with such a variable."""
    thinks: bool = True
    """Whether the model may reason before it answers."""
    continue_final: bool = False
    """Whether the last turn is the assistant's, and the answer continues it."""

    def check(self, messages: Sequence[Message]) -> None:
        """Check every bound that needs no template. Raises InvalidRequest."""
        last = messages[-1]
        if self.continue_final and (last.role != "assistant" or last.tool_calls):
            raise InvalidRequest(f"{_CONTINUE}: the last message must be an assistant's text", param=_CONTINUE)
        if len(self.variables) > MAX_VARIABLES:
            raise InvalidRequest(f"{_VARIABLES}: must have at most {MAX_VARIABLES} variables", param=_VARIABLES)
        for value in self.variables.values():
            is_scalar = value is None or isinstance(value, (bool, int, float, str))
            if not is_scalar or len(str(value)) > MAX_VARIABLE_CHARS:
                bound = f"a text, number or boolean of at most {MAX_VARIABLE_CHARS} characters"
                raise InvalidRequest(f"{_VARIABLES}: each must be {bound}", param=_VARIABLES)


def check_messages(messages: Sequence[Message]) -> None:
    """Check the messages of a conversation. Raises InvalidRequest."""
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(f"messages must have 1 to {MAX_MESSAGES} elements", param="messages")
    for message in messages:
        if message.role not in ROLES:
            raise InvalidRequest(f"messages: role must be one of {', '.join(sorted(ROLES))}", param="messages")
        if message.tool_calls and message.role != "assistant":
            raise InvalidRequest("messages: tool_calls are allowed only in an assistant message", param="messages")
        if message.reasoning is not None and message.role != "assistant":
            raise InvalidRequest(
                "messages: reasoning_content is allowed only in an assistant message", param="messages"
            )
        if (message.tool_call_id is not None) != (message.role == "tool"):
            raise InvalidRequest("messages: tool_call_id is allowed only in a message of role tool", param="messages")
        if message.tool_call_id is not None:
            check_call_id(message.tool_call_id, "messages")
        if message.tool_calls:
            check_calls(message.tool_calls, "messages")


def tool_object(tool: ToolDefinition) -> dict[str, Any]:
    """Return a tool as templates expect it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function | {"parameters": tool.parameters or tool.schema}}


def turns_of(messages: Sequence[Message], form: ToolForm, hide: Callable[[str], str]) -> list[dict[str, Any]]:
    """Convert messages to a template's turns; `hide`: applied to each text that a client wrote."""
    turns, names = [], dict[str, str]()
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": hide(message.content)}
        if message.name:
            turn["name"] = hide(message.name)
        if message.reasoning is not None:
            turn["reasoning_content"] = hide(message.reasoning)
        if message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls}
            turn["tool_calls"] = [_call_object(call, form, hide) for call in message.tool_calls]
            if not message.content and form.empty_is_none:
                turn["content"] = None
        if message.tool_call_id is not None:
            turn["tool_call_id"] = hide(message.tool_call_id)
            if message.tool_call_id in names:
                turn["name"] = hide(names[message.tool_call_id])
        turns.append(turn)
    return turns


def _call_object(call: AssistantToolCall, form: ToolForm, hide: Callable[[str], str]) -> dict[str, Any]:
    arguments: Any = hidden(arguments_of(call), hide)
    if form.arguments_as_text:
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {"id": hide(call.id), "type": "function", "function": {"name": hide(call.name), "arguments": arguments}}


def hidden(value: Any, hide: Callable[[str], str]) -> Any:
    """Apply `hide` to all texts of a JSON value; its depth was checked."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {hide(key): hidden(inner, hide) for key, inner in value.items()}
    return [hidden(inner, hide) for inner in value] if isinstance(value, list) else value


def in_plain_words(messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[Message]:
    """Rewrite a conversation for a template that does not support tools."""
    for message in messages:
        if message.tool_calls or message.tool_call_id is not None:
            plain = _without_calls(messages)
            break
    else:
        plain = list(messages)
    if not tools:
        return plain
    lines = (json.dumps(tool_object(tool)["function"], ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(tools="\n".join(lines))
    if plain[0].role in ("system", "developer"):
        return [replace(plain[0], content=f"{plain[0].content}\n\n{instructions}"), *plain[1:]]
    return [Message(role="system", content=instructions), *plain]


def _without_calls(messages: Sequence[Message]) -> list[Message]:
    plain: list[Message] = []
    for are_results, turns in groupby(messages, lambda message: message.tool_call_id is not None):
        if are_results:
            results = (f"<tool_response>\n{message.content}\n</tool_response>" for message in turns)
            plain.append(Message(role="user", content="\n".join(results)))
        else:
            plain += map(_call_turn, turns)
    return plain


def _call_turn(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [f"<tool_call>\n{_call_text(call)}\n</tool_call>" for call in message.tool_calls]
    content = "\n".join([message.content, *calls] if message.content else calls)
    return Message(role=message.role, content=content, name=message.name)


def _call_text(call: AssistantToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": arguments_of(call)}, ensure_ascii=False)


def form_shown_by(render: Callable[[Sequence[Message], Sequence[ToolDefinition], ToolForm], str]) -> ToolForm | None:
    """Detect the form in which a template shows tools, calls and results; None when it shows them in none.

    `render` raises InvalidRequest for what the template refuses.
    """
    tool = ToolDefinition(
        name="sample_tool",
        description=_NOTE,
        parameters={"type": "object", "properties": {"note": {"type": "string", "description": "a note"}}},
    )
    call = AssistantToolCall(id="aB3dE6gH9", name=tool.name, arguments=json.dumps({"note": _ARGUMENT}))
    messages = [
        Message(role="user", content="Hello"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content=_RESULT, tool_call_id=call.id),
    ]
    shown: list[ToolForm] = []
    for as_text in (False, True):
        for empty_is_none in (True, False):
            form = ToolForm(arguments_as_text=as_text, empty_is_none=empty_is_none)
            try:
                text = render(messages, [tool], form)
            except InvalidRequest:
                continue
            if all(mark in text for mark in (_NOTE, _ARGUMENT, _RESULT)):
                # A printed object is Python's repr, not JSON, and a text dumped as JSON is escaped twice.
                if f'"note": "{_ARGUMENT}"' in text or f'"note":"{_ARGUMENT}"' in text:
                    return form
                shown.append(form)
    return shown[0] if shown else None
