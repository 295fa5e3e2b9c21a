"""Models of the answers of OpenAI's routes: for /openapi.json, and for validating small answers.

Generated text bypasses them: generating routes write answers as they arise (`router.http.openai.answers`).
"""

from typing import Any, Literal

from pydantic import Field

from router.http.body.answer_object import AnswerObject, AnyObject, Count, ExactObject

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class CachedTokensObject(AnswerObject):
    cached_tokens: Count


class ReasoningTokensObject(AnswerObject):
    reasoning_tokens: Count


class CompletionDetailsObject(ReasoningTokensObject):
    accepted_prediction_tokens: Count
    """Tokens of `prediction` that were verified as drafts and became output."""
    rejected_prediction_tokens: Count
    """Tokens of `prediction` that were verified as drafts and did not."""


class UsageObject(AnswerObject):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokensObject
    completion_tokens_details: CompletionDetailsObject


class CalledFunctionObject(ExactObject):
    name: str
    arguments: str


class ToolCallObject(ExactObject):
    id: str
    type: Literal["function"]
    function: CalledFunctionObject


class AssistantMessageObject(ExactObject):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCallObject] = Field(default_factory=list)
    function_call: CalledFunctionObject | None = None


class ChoiceObject(AnswerObject):
    index: Count
    finish_reason: FinishReason
    logprobs: AnyObject | None = None


class ChatChoiceObject(ChoiceObject):
    message: AssistantMessageObject


class CompletionChoiceObject(ChoiceObject):
    text: str


class GenerationObject(AnswerObject):
    """Fields common to both kinds of completions."""

    id: str
    created: Count
    model: str
    usage: UsageObject
    timing: AnyObject | None = Field(default=None, description="With the header X-Tandem-Timing: 1")


class ChatCompletionObject(GenerationObject):
    object: Literal["chat.completion"]
    choices: list[ChatChoiceObject]


class CompletionObject(GenerationObject):
    object: Literal["text_completion"]
    choices: list[CompletionChoiceObject]


class FunctionDeltaObject(AnswerObject):
    arguments: str
    name: str = ""


class ToolCallDeltaObject(AnswerObject):
    index: Count
    function: FunctionDeltaObject


class ChatDeltaObject(ExactObject):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str = ""
    tool_calls: list[ToolCallDeltaObject] = Field(default_factory=list)
    function_call: FunctionDeltaObject | None = None


class ChoiceChunkObject(AnswerObject):
    index: Count
    logprobs: AnyObject | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[Count] = Field(default_factory=list)


class ChatChoiceChunkObject(ChoiceChunkObject):
    delta: ChatDeltaObject


class CompletionChoiceChunkObject(ChoiceChunkObject):
    text: str


class ChunkObject(AnswerObject):
    """Fields common to chunks of both kinds."""

    id: str
    created: Count
    model: str
    usage: UsageObject | None = None
    timing: AnyObject | None = None


class ChatCompletionChunkObject(ChunkObject):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChoiceChunkObject]
    prompt_token_ids: list[Count] = Field(default_factory=list)


class CompletionChunkObject(ChunkObject):
    object: Literal["text_completion"]
    choices: list[CompletionChoiceChunkObject]


class ModelObject(AnswerObject):
    id: str
    object: Literal["model"]
    created: Count
    owned_by: str
    max_model_len: Count
    has_chat_template: bool
    default_sampling_params: AnyObject


class ModelList(AnswerObject):
    object: Literal["list"]
    data: list[ModelObject]


class TokensObject(AnswerObject):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class TextObject(AnswerObject):
    prompt: str


class EmbeddingList(AnswerObject):
    object: Literal["list"]
    data: list[AnyObject]
    model: str
    usage: dict[str, Any]
    pooling: str = Field(description="How hidden states became a vector, by sentence-transformers' names")
    trained_for_embeddings: bool = Field(description="False: vectors of a model that was made for something else")
