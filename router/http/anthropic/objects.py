"""Models of the answers of Anthropic's routes, whole and as events, for /openapi.json."""

from typing import Any, Literal

from router.http.body.answer_object import AnswerObject, AnyObject, Count, ExactObject
from router.http.openapi.event_streams import named_event


class AnthropicErrorFields(ExactObject):
    type: str
    message: str


class AnthropicErrorObject(ExactObject):
    type: Literal["error"]
    error: AnthropicErrorFields


class TextBlockObject(ExactObject):
    type: Literal["text"]
    text: str


class ThinkingBlockObject(ExactObject):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlockObject(ExactObject):
    type: Literal["tool_use"]
    id: str
    name: str
    input: AnyObject


ContentBlockObject = TextBlockObject | ThinkingBlockObject | ToolUseBlockObject


class MessageUsageObject(AnswerObject):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class MessageObject(AnswerObject):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlockObject]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsageObject


class TokenCountObject(AnswerObject):
    input_tokens: Count


class TextDeltaObject(ExactObject):
    type: Literal["text_delta"]
    text: str


class ThinkingDeltaObject(ExactObject):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDeltaObject(ExactObject):
    type: Literal["input_json_delta"]
    partial_json: str


class MessageDeltaObject(ExactObject):
    stop_reason: str
    stop_sequence: str | None


_BlockDelta: Any = TextDeltaObject | ThinkingDeltaObject | InputJsonDeltaObject
MESSAGE_EVENTS = [
    named_event("message_start", message=MessageObject),
    named_event("ping"),
    named_event("content_block_start", index=Count, content_block=ContentBlockObject),
    named_event("content_block_delta", index=Count, delta=_BlockDelta),
    named_event("content_block_stop", index=Count),
    named_event("message_delta", delta=MessageDeltaObject, usage=MessageUsageObject),
    named_event("message_stop"),
]
