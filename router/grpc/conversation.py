"""Parses the conversation of a gRPC request: messages, tools, calls, template variables, cache breakpoints."""

from collections.abc import Sequence
from typing import Any

from router.api.cache_breakpoints import BREAKPOINT_TTL_S, DEFAULT_BREAKPOINT_TTL, CacheBreakpoint, check_breakpoints
from router.api.request.strict_json import parse
from router.text.conversation import Message, TemplateOptions
from router.text.tools import MAX_TOOLS_CHARS, AssistantToolCall, ToolDefinition, ToolUse, use_of
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb

_TOOLS, _CHOICE, _CONTROL = "tools", "tool_choice", "cache_control"
_MOST_SCHEMA_CHARS = 4 * MAX_TOOLS_CHARS
"""Bound on all schemas as they were sent: checked before they are parsed."""
_OF_CONVERSATIONS = (
    *("add_generation_prompt", _TOOLS, _CHOICE, "chat_template_kwargs", "continue_final_message", "cached_content"),
    "prediction",
)
_OF_PROMPTS = ("add_special_tokens",)


def check_input_kind(request: pb.GenerateRequest) -> None:
    """Check that no field of conversations comes with a prompt, nor the other way round. Raises InvalidRequest."""
    is_chat = request.WhichOneof("input") == "chat"
    names, what = (_OF_PROMPTS, "prompt") if is_chat else (_OF_CONVERSATIONS, "conversation")
    given = {field.name for field, _ in request.ListFields()}
    if foreign := next((name for name in names if name in given and not _asks_for_nothing(request, name)), None):
        raise InvalidRequest(f"{foreign}: is allowed with a {what} only", param=foreign)


def _asks_for_nothing(request: pb.GenerateRequest, name: str) -> bool:
    """Whether the field's value has no effect, which HTTP accepts with every body as well."""
    if name == _CHOICE:
        return _chosen(request.tool_choice) in (("none", None, False), ("auto", None, False))
    return name == "continue_final_message" and not request.continue_final_message


def messages_of(chat: pb.Chat) -> Sequence[Message]:
    """Convert a conversation. Raises InvalidRequest."""
    return [_message(turn) for turn in chat.messages]


def _message(turn: pb.ChatMessage) -> Message:
    if not turn.HasField("content") and turn.role != "assistant":
        raise InvalidRequest("messages: content is missing", param="messages")
    return Message(
        role=turn.role,
        content=turn.content,
        name=turn.name if turn.HasField("name") else None,
        tool_calls=tuple(
            AssistantToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls
        ),
        tool_call_id=turn.tool_call_id if turn.HasField("tool_call_id") else None,
        reasoning=turn.reasoning_content if turn.HasField("reasoning_content") else None,
    )


def breakpoints_of(request: pb.GenerateRequest) -> list[CacheBreakpoint]:
    """Return the beginnings that should stay cached. Raises InvalidRequest."""
    turns = enumerate(request.chat.messages, 1)
    marks = [
        CacheBreakpoint(number, len(t.content), _ttl_s(t.cache_control)) for number, t in turns if t.HasField(_CONTROL)
    ]
    if marks and request.HasField("cached_content"):
        raise InvalidRequest(f"{_CONTROL} cannot be combined with cached_content", param=_CONTROL)
    check_breakpoints(marks)
    return marks


def check_no_breakpoints(chat: pb.Chat) -> None:
    """Check that there are no breakpoints where they cannot be honoured. Raises InvalidRequest."""
    if any(turn.HasField(_CONTROL) for turn in chat.messages):
        raise InvalidRequest(f"{_CONTROL} is only supported in Generate", param=_CONTROL)


def _ttl_s(control: pb.CacheControl) -> float:
    ttl = control.ttl if control.HasField("ttl") else DEFAULT_BREAKPOINT_TTL
    if ttl not in BREAKPOINT_TTL_S:
        raise InvalidRequest(f"{_CONTROL}: ttl must be one of {', '.join(BREAKPOINT_TTL_S)}", param=_CONTROL)
    return BREAKPOINT_TTL_S[ttl]


def template_options(request: pb.GenerateRequest) -> TemplateOptions:
    """Convert the options of the chat template. Raises InvalidRequest."""
    continues = request.continue_final_message
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: no message can follow the one that is continued",
            param="continue_final_message",
        )
    variables = {name: _variable(value) for name, value in request.chat_template_kwargs.items()}
    return TemplateOptions(variables=variables, continue_final=continues)


def _variable(value: pb.TemplateValue) -> Any:
    kind = value.WhichOneof("kind")
    return None if kind is None else getattr(value, kind)


def tool_use(request: pb.GenerateRequest) -> ToolUse | None:
    """Combine `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidRequest."""
    mode, allowed, is_named = _chosen(request.tool_choice)
    parallel = request.parallel_tool_calls or not request.HasField("parallel_tool_calls")
    return use_of(tools_of(request.tools), mode, allowed, parallel and not is_named)


def tools_of(tools: Sequence[pb.Tool]) -> tuple[ToolDefinition, ...]:
    """Convert tools. Raises InvalidRequest for parameters that are not a JSON object; `ToolUse` has the other
    bounds."""
    if sum(len(tool.parameters) for tool in tools) > _MOST_SCHEMA_CHARS:
        raise InvalidRequest(f"{_TOOLS}: more than {MAX_TOOLS_CHARS} characters", param=_TOOLS)
    return tuple(
        ToolDefinition(
            name=tool.name,
            description=tool.description if tool.HasField("description") else None,
            parameters=_parameters(tool.parameters) if tool.HasField("parameters") else None,
            strict=tool.strict,
        )
        for tool in tools
    )


def _parameters(text: str) -> dict[str, Any]:
    try:
        value = parse(text.encode())
    except InvalidRequest:
        value = None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{_TOOLS}: parameters must be the text of a JSON object", param=_TOOLS)
    return value


def _chosen(choice: pb.ToolChoice) -> tuple[str, frozenset[str] | None, bool]:
    """Return the mode, the names of callable tools, and whether one must be called."""
    if choice.HasField("function"):
        if choice.allowed or (choice.HasField("mode") and choice.mode != "required"):
            raise InvalidRequest(f"{_CHOICE}: nothing else is allowed beside function", param=_CHOICE)
        return "required", frozenset({choice.function}), True
    mode = choice.mode if choice.HasField("mode") else "auto"
    if choice.allowed and mode not in ("auto", "required"):
        raise InvalidRequest(f"{_CHOICE}: allowed requires mode auto or required", param=_CHOICE)
    return mode, frozenset(choice.allowed) or None, False
