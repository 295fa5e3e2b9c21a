"""Models of the answers of /v1/responses, whole and as events, for /openapi.json."""

from typing import Any, Literal

from router.http.body.answer_object import AnswerObject, AnyObject, Count, ExactObject
from router.http.openai.objects import CachedTokensObject, ReasoningTokensObject
from router.http.openapi.event_streams import named_event

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextObject(ExactObject):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[AnyObject]


class ReasoningTextObject(ExactObject):
    type: Literal["reasoning_text"]
    text: str


class ItemObject(ExactObject):
    """Fields common to items of all types."""

    id: str
    status: ItemStatus


class MessageItemObject(ItemObject):
    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputTextObject]


class ReasoningItemObject(ItemObject):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningTextObject]


class FunctionCallItemObject(ItemObject):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


OutputItemObject = MessageItemObject | ReasoningItemObject | FunctionCallItemObject


class ResponseUsageObject(AnswerObject):
    input_tokens: Count
    input_tokens_details: CachedTokensObject
    output_tokens: Count
    output_tokens_details: ReasoningTokensObject
    total_tokens: Count


class ResponseObject(AnswerObject):
    id: str
    object: Literal["response"]
    created_at: Count
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    output: list[OutputItemObject]
    usage: ResponseUsageObject | None
    timing: AnyObject | None = None


_Number: dict[str, Any] = {"sequence_number": Count}
_Place: dict[str, Any] = {"item_id": str, "output_index": Count} | _Number
_InPart: dict[str, Any] = {"content_index": Count} | _Place
_Item: dict[str, Any] = {"output_index": Count, "item": OutputItemObject} | _Number
_Part: dict[str, Any] = {"part": OutputTextObject | ReasoningTextObject} | _InPart
_Logprobs: dict[str, Any] = {"logprobs": list[AnyObject]} | _InPart
_FIELDS: dict[str, dict[str, Any]] = {
    **{
        kind: {"response": ResponseObject} | _Number
        for kind in ("created", "in_progress", "completed", "incomplete", "failed")
    },
    "output_item.added": _Item,
    "output_item.done": _Item,
    "content_part.added": _Part,
    "content_part.done": _Part,
    "reasoning_text.delta": {"delta": str} | _InPart,
    "reasoning_text.done": {"text": str} | _InPart,
    "output_text.delta": {"delta": str} | _Logprobs,
    "output_text.done": {"text": str} | _Logprobs,
    "function_call_arguments.delta": {"delta": str} | _Place,
    "function_call_arguments.done": {"name": str, "arguments": str} | _Place,
}
RESPONSE_EVENTS = [named_event(f"response.{kind}", **fields) for kind, fields in _FIELDS.items()]
