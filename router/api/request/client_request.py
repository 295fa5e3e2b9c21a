"""A client's request before and after validation, and the model's properties that servers need."""

from msgspec import Struct, field

from router.api.request.generation_defaults import GenerationDefaults
from router.text.conversation import TemplateOptions
from router.text.grammars.structured_output import StructuredOutput
from router.text.reasoning import Reasoning
from router.text.stop_strings import StopStrings
from router.text.tool_parsers.request_calls import ToolCallReading
from router.text.tools import ToolUse
from router.types.prompt_logprobs import PromptScoringRequest
from router.types.request_digest import request_digest
from router.types.requests import BeamSearchParams, RoutedRequest
from router.types.stream_position import ChoicePosition, StreamPosition
from tandem.pooling_model import PoolingModel
from tandem.telemetry.tracing import TraceContext
from tandem.values.sampling import SamplingParams


class ModelInfo(Struct, frozen=True, kw_only=True):
    """The served model, as the HTTP and gRPC servers need to know it."""

    name: str
    fingerprint: str
    max_model_len: int
    """Bound on tokens of prompt and answer together."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    created_s: int
    """Creation time (Unix), shown in the list of models."""
    has_chat_template: bool = True
    """Whether it serves conversations; otherwise plain prompts only."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    pooling: PoolingModel | None = None
    """What the model's files say of embeddings and relevance; None: nothing."""


class ClientRequest(Struct, frozen=True, kw_only=True):
    """A client's request without its prompt, as received: nothing has been validated yet."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters. `max_tokens` and `seed` are ignored in favour of the fields below, which may be absent."""
    stated_sampling: frozenset[str] | None = None
    """Fields of `sampling` that the client stated; the model's defaults replace the others. None: all of them."""
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    """The field that stated `max_tokens`."""
    seed: int | None = None
    model: str | None = None
    num_choices: int = 1
    choices_param: str = "n"
    """The field that stated `num_choices`."""
    reads_along: bool = True
    """Whether the client wants text as it is generated."""
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    """Let the tokenizer put its own tokens, such as BOS, around a plain prompt."""
    add_generation_prompt: bool = True
    template: TemplateOptions = field(default_factory=TemplateOptions)
    priority: int = 0
    cache_salt: str | None = None
    tenant: str = ""
    trace: TraceContext | None = None
    """Trace context from the client's headers."""
    by_operator: bool = False
    """Whether the caller has operator rights."""
    time_left_s: float | None = None
    """Seconds left until the client's own deadline; the router's applies as well."""
    last_seen: StreamPosition | None = None
    """Position at which the stream that this request continues broke off."""
    structure: StructuredOutput | None = None
    """Structure that every answer must follow."""
    tools: ToolUse | None = None
    """Tools that the model may call, in a conversation."""
    prediction: str | None = None
    """The answer that the client expects, in a conversation."""
    suffix: str | None = None
    """Text that follows the answer to a plain prompt."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the prompt's last tokens; -1: as many as the context leaves beside the answer."""
    beams: BeamSearchParams | None = None
    scoring: PromptScoringRequest | None = None
    """Scores requested for the prompt itself."""
    bad_words: tuple[str, ...] = ()
    """Texts that must never be generated, at the beginning of a word or within one."""

    @property
    def operation(self) -> str:
        """Operation name for plain prompts, after OpenTelemetry's GenAI conventions."""
        if self.scoring is not None and self.scoring.is_relevance:
            return "rerank"
        return "embeddings" if self.is_pooled else "text_completion"

    @property
    def is_pooled(self) -> bool:
        """Whether hidden states are wanted."""
        return self.scoring is not None and self.scoring.num_top is None

    @property
    def least_tokens(self) -> int:
        """Tokens that the context must leave for an answer."""
        return 0 if self.scoring is not None and self.scoring.only else 1


class PreparedRequest(Struct, frozen=True, kw_only=True):
    """A request ready for dispatch, and what the server needs to show its answer."""

    request: RoutedRequest
    stops: StopStrings
    stop_token_ids: frozenset[int]
    """Ids that end a choice when sampled; their text is not part of the answer."""
    include_stop: bool
    skip_special_tokens: bool
    prompt_text: str | None = None
    """The prompt as text; None for a conversation or a prompt of token ids."""
    has: tuple[ChoicePosition, ...] = ()
    """Positions in a continued stream up to which the client has each choice."""

    calling: ToolCallReading | None = None
    """Parser of tool calls in the answer's text; None: the answer is text alone."""
    reasoning: Reasoning | None = None
    """Parser that separates reasoning from the answer; None: it is not separated."""

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that parsers of the text must see."""
        if self.calling is None and self.reasoning is None:
            return frozenset()
        readers = (reader for reader in (self.calling, self.reasoning) if reader is not None)
        return frozenset().union(*(reader.shown_ids for reader in readers))

    @property
    def digest(self) -> bytes:
        """Digest that is equal for the same request in the same words, on every router."""
        request, sampling = self.request, self.request.sampling
        return request_digest(
            request.prompt_token_ids,
            sampling._replace(logit_bias=dict(sampling.logit_bias)),  # equal mappings may be shown differently
            request.hash_root,
            request.num_choices,
            self.stops.strings,
            self.include_stop,
            self.skip_special_tokens,
            *(() if self.calling is None else (self.calling.use,)),
        )
