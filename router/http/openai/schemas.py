"""The bodies of OpenAI's routes: types here, bounds in the frontend."""

import re
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from msgspec.structs import replace
from pydantic import Field, model_validator

from router.api.prompts import MAX_MESSAGES
from router.api.request.beam_search_options import parse_beam_search
from router.api.request.choice_selection import ChoiceSelection
from router.api.request.client_request import ClientRequest
from router.api.request.prompt_logprobs_options import parse_prompt_scoring
from router.api.selected_choices import logprobs_needed, parse_selection
from router.http.body.strict_body import StrictBody, at_most
from router.http.openai.chat_messages import MAX_PARTS, ChatTurn
from router.http.openai.prompt_logprobs import PromptLogprobOptions
from router.http.openai.response_format import ResponseFormat, StructuredOutputs, guided, the_one
from router.http.openai.tool_schemas import (
    ChatToolChoice,
    FunctionName,
    FunctionSpec,
    ToolSpec,
    functions_use,
    tool_use,
)
from router.text.conversation import MAX_VARIABLES, Effort, TemplateOptions
from router.text.grammars.structured_output import StructuredOutput
from router.text.stop_strings import MAX_STOP_STRINGS
from router.text.tools import MAX_TOOLS, ToolUse
from router.types.requests import BeamSearchParams
from tandem.errors import InvalidRequest
from tandem.values.sampling import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, SamplingParams

_MAX_NOTES = 16  # OpenAI's bound of `metadata`
_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")  # one spelling of each, so that no id comes twice
_SAMPLING = frozenset(
    {
        "min_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "ignore_eos",
    }
)
# Groups of fields that few requests state: without any of them, there is nothing to convert or check.
_STRUCTURE = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
)
_BEAMS = frozenset({"use_beam_search", "length_penalty", "early_stopping"})
_SELECTION = frozenset({"best_of", "vote", "vote_pattern"})
_TOOLS = frozenset({"tools", "tool_choice", "functions", "function_call"})
_TEMPLATE = frozenset({"chat_template_kwargs", "reasoning_effort", "continue_final_message"})
_PLAIN_TEMPLATE = TemplateOptions()


class StreamOptions(StrictBody):
    """Options for what a stream contains."""

    NOT_YET: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(StrictBody):
    """Fields that chat and completions share."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_LOGIT_BIAS)] = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    vote: bool | None = None
    vote_pattern: str | None = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, at_most(MAX_STOP_STRINGS)] = None
    stop_token_ids: Annotated[list[int] | None, at_most(MAX_STOP_TOKENS)] = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[list[str] | None, at_most(MAX_BAD_WORDS)] = None
    prompt_logprobs: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    """Becomes part of the answer's `id`; internally the router uses its own id."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Whether log probabilities name tokens by id."""
    # Fields without effect: notes of the client's.
    user: str | None = None
    metadata: Annotated[dict[str, str] | None, at_most(_MAX_NOTES)] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.allowed_token_ids == []:
            raise InvalidRequest("allowed_token_ids: an empty list allows nothing", param="allowed_token_ids")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        return self

    def fields(
        self,
        *,
        tenant: str,
        num_logprobs: int | None,
        max_tokens: int | None,
        max_tokens_param: str = "max_tokens",
        echo: bool = False,
        add_special_tokens: bool = True,
        add_generation_prompt: bool = True,
        tools: ToolUse | None = None,
        template: TemplateOptions | None = None,
    ) -> ClientRequest:
        """Convert the fields for the frontend."""
        stated, ask, scoring = self.__pydantic_fields_set__, self.selection(), None
        if echo or self.prompt_logprobs is not None:
            scoring = parse_prompt_scoring(
                prompt_logprobs=self.prompt_logprobs,
                echoed_logprobs=num_logprobs if echo else None,
                streams=bool(self.stream),
                max_tokens=max_tokens,
                echo=echo,
            )
        given: dict[str, Any] = {}
        for name in _SAMPLING & stated:
            if (value := getattr(self, name)) is not None:
                given[name] = value
        sampling = SamplingParams(
            **given,
            logit_bias=_token_keys(self.logit_bias) if self.logit_bias else {},
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            num_logprobs=num_logprobs if ask is None else logprobs_needed(ask, num_logprobs),
        )
        return ClientRequest(
            sampling=sampling,
            stated_sampling=frozenset(given),
            max_tokens=1 if scoring is not None and scoring.only else max_tokens,
            max_tokens_param=max_tokens_param,
            seed=self.seed,
            model=self.model,
            num_choices=(self.n if self.n is not None else 1) if ask is None else ask.candidates,
            choices_param="n" if ask is None else ask.param,
            reads_along=bool(self.stream),
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            priority=self.priority or 0,
            cache_salt=self.cache_salt,
            tenant=tenant,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            structure=None if _STRUCTURE.isdisjoint(stated) else self._structure(),
            bad_words=tuple(self.bad_words or ()),
            scoring=scoring,
            beams=None if _BEAMS.isdisjoint(stated) else self._beams(),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            tools=tools,
            template=template or _PLAIN_TEMPLATE,
        )

    def _beams(self) -> BeamSearchParams | None:
        return parse_beam_search(
            wanted=bool(self.use_beam_search),
            width=self.best_of if self.best_of is not None else self.n or 1,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            streams=bool(self.stream),
            votes=bool(self.vote) or self.vote_pattern is not None,
        )

    @property
    def wants_logprobs(self) -> bool:
        """Whether its answers show log probabilities."""
        return False

    def selection(self) -> ChoiceSelection | None:
        """Return the selection of choices to show, if more are generated. A beam search selects its own."""
        if self.use_beam_search or _SELECTION.isdisjoint(self.__pydantic_fields_set__):
            return None
        return parse_selection(
            n=self.n,
            best_of=self.best_of,
            vote=bool(self.vote),
            vote_pattern=self.vote_pattern,
            streams=bool(self.stream),
            shows_logprobs=self.wants_logprobs,
        )

    def scores_shown(self) -> PromptLogprobOptions:
        """Return the prompts' log probabilities that the answer shows."""
        return PromptLogprobOptions(prompt_logprobs=self.prompt_logprobs)

    def _structure(self) -> StructuredOutput | None:
        """Return the structure of answers. Raises InvalidRequest when it is given twice."""
        return the_one(
            [
                *(self.response_format.structures() if self.response_format is not None else ()),
                *(self.structured_outputs.structures() if self.structured_outputs is not None else ()),
                *guided(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar),
            ]
        )


_Turns: TypeAlias = Annotated[list[ChatTurn], Field(min_length=1, max_length=MAX_MESSAGES)]


class PredictionPart(StrictBody):
    """One part of an expected answer."""

    type: Literal["text"]
    text: str


class Prediction(StrictBody):
    """The answer that the client expects, such as the text that it wants edited."""

    type: Literal["content"]
    content: Annotated[str | list[PredictionPart], at_most(MAX_PARTS)]

    @property
    def whole(self) -> str:
        """Its text; parts follow each other directly."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    messages: _Turns
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    tools: Annotated[list[ToolSpec] | None, at_most(MAX_TOOLS)] = None
    tool_choice: str | ChatToolChoice | None = None
    # The older form of both.
    functions: Annotated[list[FunctionSpec] | None, at_most(MAX_TOOLS)] = None
    function_call: str | FunctionName | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, at_most(MAX_VARIABLES)] = None
    continue_final_message: bool | None = None
    prediction: Prediction | None = None
    cached_content: str | None = None
    """Name of the cache with which the conversation begins."""

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    def chat_fields(self, tenant: str) -> ClientRequest:
        """Convert the fields for the frontend, resolving the aliases that chat has."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        limit, newer = self.max_tokens, self.max_completion_tokens
        if limit is not None and newer is not None and limit != newer:
            raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        stated = self.__pydantic_fields_set__
        fields = self.fields(
            tenant=tenant,
            num_logprobs=num_logprobs,
            max_tokens=limit if newer is None else newer,
            max_tokens_param="max_tokens" if newer is None else "max_completion_tokens",
            add_generation_prompt=self.add_generation_prompt is not False and not self.continue_final_message,
            tools=None if _TOOLS.isdisjoint(stated) else self._use(),
            template=None if _TEMPLATE.isdisjoint(stated) else self._template_options(),
        )
        return fields if self.prediction is None else replace(fields, prediction=self.prediction.whole)

    def _use(self) -> ToolUse | None:
        if not self.functions:
            functions_use(None, self.function_call)
            return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.tools or self.tool_choice is not None:
            raise InvalidRequest("functions, the older form of tools, cannot be combined with tools", param="functions")
        return functions_use(self.functions, self.function_call)

    def _template_options(self) -> TemplateOptions:
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: no message can follow the one that is continued",
                param="continue_final_message",
            )
        return TemplateOptions(
            variables=self.chat_template_kwargs or {},
            effort=self.reasoning_effort,
            continue_final=bool(self.continue_final_message),
        )


class CompletionBody(GenerationBody):
    prompt: Any
    """Text, several texts, token ids or lists of them; the frontend parses it."""
    suffix: str | None = None
    """Text that follows the answer; only for models that support filling in."""
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None

    def completion_fields(self, tenant: str) -> ClientRequest:
        """Convert the fields for the frontend."""
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"logprobs must be an integer in [0, {MAX_TOP_LOGPROBS}]", param="logprobs")
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            other = "echo" if self.echo else "truncate_prompt_tokens"
            raise InvalidRequest(f"suffix cannot be combined with {other}", param="suffix")
        fields = self.fields(
            tenant=tenant,
            num_logprobs=self.logprobs,
            max_tokens=self.max_tokens,
            echo=bool(self.echo),
            add_special_tokens=self.add_special_tokens is not False,
        )
        return replace(fields, suffix=self.suffix) if self.suffix else fields

    def scores_shown(self) -> PromptLogprobOptions:
        return PromptLogprobOptions(prompt_logprobs=self.prompt_logprobs, echoed=self.logprobs if self.echo else None)


class TokenizeBody(StrictBody):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: _Turns | None = None
    tools: Annotated[list[ToolSpec] | None, at_most(MAX_TOOLS)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", param="prompt")
        if self.tools and self.messages is None:
            raise InvalidRequest("tools are allowed in a conversation only", param="tools")
        if self.add_special_tokens and self.messages is not None:
            raise InvalidRequest("add_special_tokens is allowed with a prompt only", param="add_special_tokens")
        if self.add_generation_prompt is not None and self.messages is None:
            raise InvalidRequest("add_generation_prompt is allowed with messages only", param="add_generation_prompt")
        return self


class DetokenizeBody(StrictBody):
    model: str | None = None
    tokens: list[Any]


def _token_keys(bias: dict[str, float]) -> dict[int, float]:
    if bad := next((key for key in bias if not _TOKEN_KEY.fullmatch(key)), None):
        raise InvalidRequest(f"logit_bias: {bad[:40]!r} is not a token id", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
