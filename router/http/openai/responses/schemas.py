"""The body of POST /v1/responses. Nothing is stored: each request contains its whole conversation."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec.structs import replace
from pydantic import Field

from router.api.request.client_request import ClientRequest
from router.http.body.strict_body import NOT_YET, OnlyTypes, StrictBody, at_most
from router.http.openai.tool_schemas import FunctionSpec
from router.text.conversation import MAX_MESSAGES, Effort, Message, TemplateOptions
from router.text.grammars.structured_output import Shape, StructuredOutput
from router.text.tools import MAX_TOOLS, AssistantToolCall, ToolUse, use_of
from tandem.errors import InvalidRequest
from tandem.values.sampling import SamplingParams

_MAX_PARTS = 256
_MAX_NOTES = 16
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_THINKING = "reasoning"
"""Stands in for a role until it is known whose turn it was."""
_LOGPROBS = "message.output_text.logprobs"
_TEXTS = frozenset({"input_text", "output_text"})
_PARTS = OnlyTypes("input", "content", _TEXTS | {"reasoning_text"})
_ITEMS = OnlyTypes("input", "an item", frozenset({"message", "function_call", "function_call_output", "reasoning"}))
_TOOLS = OnlyTypes("tools", "a tool", frozenset({"function"}))


class ContentPart(StrictBody):
    """Text of a message or of a function's result. Log probabilities that this server sent with it are ignored."""

    TYPES: ClassVar[OnlyTypes | None] = _PARTS
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {"annotations": (None, [])}
    type: str
    text: str = ""
    logprobs: list[dict[str, Any]] | None = None


_Content = Annotated[str | list[ContentPart] | None, at_most(_MAX_PARTS)]


class InputItem(StrictBody):
    """A message, a function call, or its result. Ids and states of items are ignored."""

    TYPES: ClassVar[OnlyTypes | None] = _ITEMS
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: (None,) for name in ("phase", "caller", "namespace", "async", "created_by")
    }
    type: str = "message"
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: _Content = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: _Content = None
    summary: Annotated[list[ContentPart] | None, at_most(0)] = None
    """Summary of reasoning; this router makes none."""

    def part(self) -> Message | AssistantToolCall:
        """Return what it adds to the conversation. Raises InvalidRequest."""
        given = {
            name
            for name in ("role", "content", "call_id", "name", "arguments", "output")
            if getattr(self, name) is not None
        }
        match self.type:
            case "message" if given == {"role", "content"} and self.role != "tool":
                return Message(role=self.role or "", content=_text(self.content))
            case "function_call" if given == {"call_id", "name", "arguments"}:
                return AssistantToolCall(id=self.call_id or "", name=self.name or "", arguments=self.arguments or "")
            case "function_call_output" if given == {"call_id", "output"}:
                return Message(role="tool", content=_text(self.output), tool_call_id=self.call_id)
            case "reasoning" if given == {"content"} and isinstance(self.content, list):
                return Message(role=_THINKING, content="\n".join(part.text for part in self.content))
        raise InvalidRequest(f"input: an item of type {self.type} does not have these fields", param="input")


class TextFormat(StrictBody):
    """The requested format of the text."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def structure(self) -> StructuredOutput | None:
        """Return the structure of the text. Raises InvalidRequest."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise InvalidRequest("text.format: schema requires type json_schema, and vice versa", param="text")
        if self.type not in ("text", "json_object", "json_schema"):
            raise InvalidRequest("text.format: type must be one of text, json_object, json_schema", param="text")
        if self.type == "text":
            return None
        return StructuredOutput(
            shape=Shape(self.type),
            value=self.schema_,
            param="text",
            disables_additional_properties=bool(self.strict),
        )


class TextConfig(StrictBody):
    format: TextFormat | None = None


class ReasoningConfig(StrictBody):
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {"summary": (None,), "generate_summary": (None,)}
    effort: Effort | None = None


class FunctionTool(FunctionSpec):
    """A function; other kinds of tools are not supported."""

    TYPES: ClassVar[OnlyTypes | None] = _TOOLS
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {
        name: (None,) for name in ("allowed_callers", "async", "defer_loading", "output_schema")
    }
    type: str


class NamedFunction(StrictBody):
    """A reference to a function by name."""

    type: str
    name: str


class FunctionChoice(StrictBody):
    """One function that must be called, or several that may be."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: Annotated[list[NamedFunction] | None, at_most(MAX_TOOLS)] = None

    def chosen(self) -> tuple[str, frozenset[str]]:
        """Return mode and names. Raises InvalidRequest."""
        if self.type == "function" and self.name is not None and self.mode is None and self.tools is None:
            return "required", frozenset({self.name})
        is_list = self.type == "allowed_tools" and self.name is None and self.tools is not None
        if is_list and self.mode in ("auto", "required") and all(t.type == "function" for t in self.tools or ()):
            return self.mode, frozenset(tool.name for tool in self.tools or ())
        reason = "type function with a name, or allowed_tools with mode and functions"
        raise InvalidRequest(f"tool_choice: {reason}", param="tool_choice")


class ResponsesBody(StrictBody):
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {
        **NOT_YET,
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "prompt": (None,),
        "truncation": (None, "disabled"),
        "max_tool_calls": (None,),
        "context_management": (None, []),
        "prompt_cache_retention": (None,),
        "stream_options": (None, {}, {"include_obfuscation": False}),
    }
    input: Annotated[str | list[InputItem], at_most(MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionTool] | None, at_most(MAX_TOOLS)] = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Literal["message.output_text.logprobs"]] | None, at_most(_MAX_NOTES)] = None
    top_logprobs: int | None = None
    stream: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    # Fields without effect: notes of the client's.
    user: str | None = None
    metadata: Annotated[dict[str, str] | None, at_most(_MAX_NOTES)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def messages(self) -> list[Message]:
        """Convert the conversation. Raises InvalidRequest."""
        system = [Message(role="system", content=self.instructions)] if self.instructions is not None else []
        if isinstance(self.input, str):
            return [*system, Message(role="user", content=self.input)]
        return [*system, *_turns([item.part() for item in self.input])]

    @property
    def leaves_strict_open(self) -> bool:
        """Whether it has tools without a value for strict."""
        return any(tool.strict is None for tool in self.tools or ())

    def fields(self, tenant: str, *, strict: bool = True) -> ClientRequest:
        """Convert the fields for the frontend; `strict`: for tools without a value. Raises InvalidRequest."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        if self.top_logprobs and not self.include:
            raise InvalidRequest(f"top_logprobs needs include: {_LOGPROBS}", param="top_logprobs")
        use = self._use(strict)
        if self.include and use is not None:
            raise InvalidRequest("include: log probabilities cannot be combined with tools", param="include")
        return ClientRequest(
            sampling=SamplingParams(**given, num_logprobs=(self.top_logprobs or 0) if self.include else None),
            stated_sampling=frozenset(given),
            max_tokens=self.max_output_tokens,
            max_tokens_param="max_output_tokens",
            seed=self.seed,
            model=self.model,
            reads_along=bool(self.stream),
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            tenant=tenant,
            structure=self.text.format.structure() if self.text is not None and self.text.format is not None else None,
            tools=use,
            template=TemplateOptions(effort=self.reasoning.effort if self.reasoning is not None else None),
        )

    def _use(self, strict: bool) -> ToolUse | None:
        tools = tuple(
            replace(tool.tool(), strict=strict if tool.strict is None else tool.strict) for tool in self.tools or ()
        )
        choice = self.tool_choice
        mode, allowed = (
            choice.chosen() if isinstance(choice, FunctionChoice) else ("auto" if choice is None else choice, None)
        )
        is_named = isinstance(choice, FunctionChoice) and choice.type == "function"
        return use_of(tools, mode, allowed, self.parallel_tool_calls is not False and not is_named)


def _text(content: str | list[ContentPart] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    if other := next((part.type for part in content if part.type not in _TEXTS), None):
        raise InvalidRequest(f"input: content of type {other[:40]!r} is not supported yet", param="input")
    return "\n".join(part.text for part in content)


def _turns(parts: Sequence[Message | AssistantToolCall]) -> Iterator[Message]:
    """Yield turns: a call belongs to the assistant's turn before it, or makes one with those that follow it."""
    turn: Message | None = None
    calls: list[AssistantToolCall] = []
    thought: str | None = None
    for part in (*parts, None):
        if isinstance(part, Message) and part.role == _THINKING:
            thought = part.content
            continue
        if not isinstance(part, AssistantToolCall) or turn is None or turn.role != "assistant" or thought is not None:
            if turn is not None:
                yield replace(turn, tool_calls=(*turn.tool_calls, *calls)) if calls else turn
            calls = []
            turn = Message(role="assistant", content="") if isinstance(part, AssistantToolCall) else part
            if turn is not None and turn.role == "assistant":
                turn = replace(turn, reasoning=thought)
        if isinstance(part, AssistantToolCall):
            calls.append(part)
        thought = None
