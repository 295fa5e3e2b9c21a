"""The content blocks of Anthropic's messages, and tools."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import orjson
from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from router.api.cache_breakpoints import BREAKPOINT_TTL_S, DEFAULT_BREAKPOINT_TTL
from router.http.body.strict_body import OnlyTypes, StrictBody, at_most
from router.text.tools import AssistantToolCall, ToolDefinition, ToolUse, use_of
from tandem.errors import InvalidRequest

_MAX_BLOCKS = 256  # of one message's content
_MODES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class CacheControl(StrictBody):
    """A cache breakpoint: the conversation up to this block should stay cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def ttl_s(self) -> float:
        """Seconds that the prefix is kept after its last use."""
        return BREAKPOINT_TTL_S[self.ttl or DEFAULT_BREAKPOINT_TTL]


class TextBlock(StrictBody):
    # Clients that send an answer's blocks back unchanged send these as well.
    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {"citations": (None, [])}
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ToolUseBlock(StrictBody):
    """A tool call, in an assistant's message that the client sends back."""

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {"caller": (None, {"type": "direct"}), "toolset_name": (None,)}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None

    def call(self) -> AssistantToolCall:
        """Convert to the representation that all APIs share."""
        return AssistantToolCall(id=self.id, name=self.name, arguments=orjson.dumps(self.input).decode())


class _Known:
    """Rejects unsupported block types by name; a text becomes a list of one block, so that errors refer to blocks."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check blocks before any of them is parsed."""
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe the field as a text, or as blocks."""
        return {"anyOf": [{"type": "string"}, handler(core)]}

    def _check(self, content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        for block in content if isinstance(content, list) else ():
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in self._kinds:
                raise InvalidRequest(f"content of type {kind[:40]!r} is not supported here", param="messages")
        return content


Texts: TypeAlias = Annotated[list[TextBlock], at_most(_MAX_BLOCKS), _Known("text")]


class ToolResultBlock(StrictBody):
    """The result of a tool, in a user's message."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        """Format the result for the model, which has no other indication of an error."""
        text = joined(self.content or ())
        return f"Error: {text}" if self.is_error else text


class ThinkingBlock(StrictBody):
    """Reasoning in an assistant's message that the client sends back; its signature is empty here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
Blocks: TypeAlias = Annotated[
    list[Annotated[Block, Field(discriminator="type")]],
    at_most(_MAX_BLOCKS),
    _Known("text", "thinking", "tool_use", "tool_result"),
]


class AnthropicTool(StrictBody):
    """A tool that the client runs; server-side tools are not supported."""

    TYPES: ClassVar[OnlyTypes | None] = OnlyTypes("tools", "a tool", frozenset({"custom"}))
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    def tool(self) -> ToolDefinition:
        """Convert to the representation that all APIs share."""
        return ToolDefinition(
            name=self.name, description=self.description, parameters=self.input_schema, strict=bool(self.strict)
        )


class AnthropicToolChoice(StrictBody):
    """Whether tools may or must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_one(self) -> "AnthropicToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise InvalidRequest("tool_choice: name requires type tool", param="tool_choice")
        return self


def chosen_tools(tools: Sequence[AnthropicTool], choice: AnthropicToolChoice | None) -> ToolUse | None:
    """Combine both. Raises InvalidRequest."""
    made = tuple(tool.tool() for tool in tools)
    if choice is None:
        return use_of(made, "auto", None, True)
    allowed = None if choice.name is None else frozenset({choice.name})
    return use_of(made, _MODES[choice.type], allowed, not choice.disable_parallel_tool_use and allowed is None)


def joined(blocks: Sequence[TextBlock]) -> str:
    """Join blocks by line breaks."""
    return "\n".join(block.text for block in blocks)
