"""The bodies of Anthropic's routes: types here, bounds in the frontend."""

from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec.structs import replace
from pydantic import Field

from router.api.cache_breakpoints import CacheBreakpoint, check_breakpoints
from router.api.prompts import MAX_MESSAGES
from router.api.request.client_request import ClientRequest
from router.http.anthropic.content_blocks import (
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    Blocks,
    CacheControl,
    TextBlock,
    Texts,
    ThinkingBlock,
    ToolResultBlock,
    chosen_tools,
    joined,
)
from router.http.body.strict_body import StrictBody, at_most
from router.text.conversation import Message, TemplateOptions
from router.text.stop_strings import MAX_STOP_STRINGS
from router.text.tools import MAX_TOOLS, AssistantToolCall
from tandem.errors import InvalidRequest
from tandem.values.sampling import SamplingParams

_SAMPLING = ("temperature", "top_k", "top_p")


class AnthropicMessage(StrictBody):
    role: Literal["user", "assistant"]
    content: Blocks


class Metadata(StrictBody):
    """A note of the client's, which is ignored."""

    user_id: str | None = None


class ThinkingConfig(StrictBody):
    """Whether the model may reason. The length cannot be guaranteed, so `enabled` with its budget is refused."""

    type: Literal["disabled", "adaptive"]


class AnthropicConversation(NamedTuple):
    """The conversation as the template sees it."""

    messages: list[Message]
    marks: list[CacheBreakpoint]


class CountBody(StrictBody):
    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[AnthropicTool] | None, at_most(MAX_TOOLS)] = None
    tool_choice: AnthropicToolChoice | None = None
    cache_control: CacheControl | None = None
    """A breakpoint as if it were set on the last block."""
    thinking: ThinkingConfig | None = None

    def fields(self, tenant: str) -> ClientRequest:
        """Convert the fields for the frontend. Raises InvalidRequest."""
        continues = self.messages[-1].role == "assistant"
        return ClientRequest(
            model=self.model,
            tenant=tenant,
            tools=chosen_tools(self.tools or (), self.tool_choice),
            template=TemplateOptions(
                continue_final=continues, thinks=self.thinking is None or self.thinking.type != "disabled"
            ),
            add_generation_prompt=not continues,
        )

    def conversation(self) -> AnthropicConversation:
        """Convert the conversation, merging consecutive turns of the same role. Raises InvalidRequest."""
        talk = AnthropicConversation([], [])
        if self.system is not None:
            _add(talk, "system", self.system)
        for tool in self.tools or ():
            if tool.cache_control is not None:
                # Templates show tools in the system turn, so the breakpoint covers all of that.
                size = len(talk.messages[0].content) if talk.messages else 0
                talk.marks.append(CacheBreakpoint(len(talk.messages), size, tool.cache_control.ttl_s))
        for role, blocks in _merged(self.messages):
            _add(talk, role, blocks)
        if self.cache_control is not None:
            talk.marks.append(
                CacheBreakpoint(len(talk.messages), len(talk.messages[-1].content), self.cache_control.ttl_s)
            )
        check_breakpoints(talk.marks)
        return talk


class MessagesBody(CountBody):
    max_tokens: int
    stop_sequences: Annotated[list[str] | None, at_most(MAX_STOP_STRINGS)] = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def fields(self, tenant: str) -> ClientRequest:
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return replace(
            super().fields(tenant),
            sampling=SamplingParams(**given),
            stated_sampling=frozenset(given),
            max_tokens=self.max_tokens,
            reads_along=bool(self.stream),
            stop=tuple(self.stop_sequences or ()),
        )


def _merged(turns: Sequence[AnthropicMessage]) -> list[tuple[str, list[Block]]]:
    merged: list[tuple[str, list[Block]]] = []
    for turn in turns:
        if merged and merged[-1][0] == turn.role:
            merged[-1][1].extend(turn.content)
        else:
            merged.append((turn.role, list(turn.content)))
    return merged


def _add(talk: AnthropicConversation, role: str, blocks: Sequence[Block]) -> None:
    """Add a turn: tool results in a user's turn become turns of their own; calls belong to an assistant's."""
    texts: list[TextBlock] = []
    calls: list[AssistantToolCall] = []
    thoughts: list[str] = []
    is_open, num_chars = False, 0

    def close() -> None:
        nonlocal is_open, num_chars
        thought = "\n".join(thoughts) if thoughts else None
        turn = Message(role=role, content=joined(texts), tool_calls=tuple(calls), reasoning=thought)
        talk.messages.append(turn)
        texts.clear()
        thoughts.clear()
        calls.clear()
        is_open, num_chars = False, 0

    for block in blocks:
        if isinstance(block, ToolResultBlock):
            if role != "user":
                raise InvalidRequest("messages: tool_result is allowed only in a user turn", param="messages")
            if is_open:
                close()
            talk.messages.append(Message(role="tool", content=block.text, tool_call_id=block.tool_use_id))
            _mark(talk, len(talk.messages), len(block.text), block.cache_control)
            continue
        is_open = True
        if isinstance(block, ThinkingBlock):
            if role != "assistant":
                raise InvalidRequest("messages: thinking is allowed only in an assistant turn", param="messages")
            thoughts.append(block.thinking)
            continue
        if isinstance(block, TextBlock):
            num_chars += len(block.text) + (1 if texts else 0)  # the line break between two
            texts.append(block)
        elif role == "assistant":
            calls.append(block.call())
        else:
            raise InvalidRequest("messages: tool_use is allowed only in an assistant turn", param="messages")
        _mark(talk, len(talk.messages) + 1, num_chars, block.cache_control)
    if is_open or not blocks:
        close()


def _mark(talk: AnthropicConversation, num_messages: int, num_chars: int, control: CacheControl | None) -> None:
    if control is not None:
        talk.marks.append(CacheBreakpoint(num_messages, num_chars, control.ttl_s))
