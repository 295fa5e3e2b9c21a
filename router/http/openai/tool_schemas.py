"""Tools, tool choice, and calls, in the format of OpenAI's chat."""

from typing import Annotated, Any, ClassVar

from router.http.body.strict_body import OnlyTypes, StrictBody, at_most
from router.text.tools import MAX_TOOLS, AssistantToolCall, ToolDefinition, ToolUse, use_of
from tandem.errors import InvalidRequest

_CHOICE = "tool_choice"
_OLDER_CHOICE = "function_call"


class FunctionSpec(StrictBody):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> ToolDefinition:
        """Convert to the representation that all APIs share."""
        return ToolDefinition(
            name=self.name, description=self.description, parameters=self.parameters, strict=bool(self.strict)
        )


class ToolSpec(StrictBody):
    TYPES: ClassVar[OnlyTypes | None] = OnlyTypes("tools", "a tool", frozenset({"function"}))
    type: str
    function: FunctionSpec

    def tool(self) -> ToolDefinition:
        """Convert to the representation that all APIs share."""
        return self.function.tool()


class FunctionName(StrictBody):
    """A reference to a function by name."""

    name: str


class NamedTool(StrictBody):
    """A reference to one of the tools."""

    type: str
    function: FunctionName


class AllowedTools(StrictBody):
    """A subset of the tools."""

    mode: str
    tools: Annotated[list[NamedTool], at_most(MAX_TOOLS)]


class ChatToolChoice(StrictBody):
    """One function that must be called, or several that may be."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(StrictBody):
    name: str
    arguments: str


class ToolCallPart(StrictBody):
    """One of an assistant message's `tool_calls`, as it was sent."""

    TYPES: ClassVar[OnlyTypes | None] = OnlyTypes("messages", "a call", frozenset({"function"}))
    id: str
    type: str = "function"
    function: CalledFunction
    index: int | None = None

    def call(self) -> AssistantToolCall:
        """Convert to the representation that all APIs share."""
        return AssistantToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


def tool_use(
    tools: list[ToolSpec] | None, choice: str | ChatToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """Combine `tools`, `tool_choice` and `parallel_tool_calls`. Raises InvalidRequest."""
    if isinstance(choice, ChatToolChoice):
        mode, allowed = _chosen(choice)
    else:
        mode, allowed = "auto" if choice is None else choice, None
    made = tuple(tool.tool() for tool in tools or ())
    return use_of(made, mode, allowed, parallel is not False and not _is_named(choice))


def functions_use(functions: list[FunctionSpec] | None, call: str | FunctionName | None) -> ToolUse | None:
    """Combine `functions` and `function_call`, the older form: at most one call. Raises InvalidRequest."""
    if isinstance(call, str) and call not in ("none", "auto"):
        raise InvalidRequest(f"{_OLDER_CHOICE} must be none, auto, or an object with a name", param=_OLDER_CHOICE)
    name = call.name if isinstance(call, FunctionName) else None
    if not functions:
        if name is not None:
            raise InvalidRequest(f"{_OLDER_CHOICE}: there are no functions to call", param=_OLDER_CHOICE)
        return None
    allowed = None if name is None else frozenset({name})
    tools = tuple(function.tool() for function in functions)
    use = ToolUse(tools=tools, must_call=name is not None, allowed=allowed, parallel=False)
    use.check("functions", _OLDER_CHOICE)
    return use if call != "none" else None


def _is_named(choice: str | ChatToolChoice | None) -> bool:
    return isinstance(choice, ChatToolChoice) and choice.type == "function"


def _chosen(choice: ChatToolChoice) -> tuple[str, frozenset[str]]:
    if choice.type == "function" and choice.function is not None and choice.allowed_tools is None:
        return "required", frozenset({choice.function.name})
    some = choice.allowed_tools
    if choice.type == "allowed_tools" and some is not None and choice.function is None:
        if some.mode not in ("auto", "required") or any(tool.type != "function" for tool in some.tools):
            raise InvalidRequest(f"{_CHOICE}: allowed_tools needs mode auto or required, and functions", param=_CHOICE)
        return some.mode, frozenset(tool.function.name for tool in some.tools)
    raise InvalidRequest(f"{_CHOICE}: must have either function or allowed_tools, as its type says", param=_CHOICE)
