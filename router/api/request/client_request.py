"""What a client asked for, before and after it was checked, and what is known of the model."""

from dataclasses import dataclass, field

from router.api.request.generation_defaults import GenerationDefaults
from router.text.conversation import TemplateOptions
from router.text.grammars.structured_output import StructuredOutput
from router.text.reasoning import Reasoning
from router.text.stop_strings import StopStrings
from router.text.tool_parsers.request_calls import ToolCallReading
from router.text.tools import ToolUse
from router.types.prompt_logprobs import PromptScoringRequest
from router.types.requests import BeamSearchParams, RoutedRequest
from router.types.stream_ids import ChoicePosition, StreamPosition, request_digest
from tandem.telemetry.tracing import TraceContext
from tandem.values.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is served, as the HTTP and gRPC servers must know it."""

    name: str
    fingerprint: str
    max_model_len: int
    """Tokens of prompt and answer together."""
    vocab_size: int
    eos_token_ids: frozenset[int]
    created_s: int
    """Unix time; shown by the list of models."""
    has_chat_template: bool = True
    """Whether it serves conversations; without, plain prompts alone."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """What a client asked for besides its prompt, as it asked: nothing is checked yet."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Its `max_tokens` and `seed` are ignored: they stand below, because absent differs from any value."""
    stated_sampling: frozenset[str] | None = None
    """Fields of `sampling` that the client stated: the model's defaults stand in for the others. None: all of them."""
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    """The field that says so."""
    seed: int | None = None
    model: str | None = None
    num_choices: int = 1
    choices_param: str = "n"
    """The field that said so."""
    reads_along: bool = True
    """Wants text as it comes."""
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
    """The client's own, from its headers."""
    by_operator: bool = False
    """The client may do what operators may."""
    time_left_s: float | None = None
    """The client's own deadline; the router's applies as well."""
    last_seen: StreamPosition | None = None
    """Where a stream that this request continues broke."""
    structure: StructuredOutput | None = None
    """What every answer must be."""
    tools: ToolUse | None = None
    """What the model may call, in a conversation."""
    suffix: str | None = None
    """What comes after the answer to a plain prompt."""
    truncate_prompt_tokens: int | None = None
    """Only so many of the prompt's last tokens are kept; -1: as many as the context has beside the answer."""
    beams: BeamSearchParams | None = None
    reads: PromptScoringRequest | None = None
    """What is asked of the prompt itself."""
    bad_words: tuple[str, ...] = ()
    """Texts that never come, at the beginning of a word or within one."""

    @property
    def operation(self) -> str:
        """Of plain prompts; a name of OpenTelemetry's GenAI conventions."""
        return "embeddings" if self.reads is not None and self.reads.num_top is None else "text_completion"

    @property
    def least_tokens(self) -> int:
        """That the context must leave for an answer."""
        return 0 if self.reads is not None and self.reads.only else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request ready for dispatch, and what the server needs to show its answer."""

    request: RoutedRequest
    stops: StopStrings
    stop_token_ids: frozenset[int]
    """Ids that end a choice when sampled; their text is not part of the answer."""
    include_stop: bool
    skip_special_tokens: bool
    prompt_text: str | None = None
    """What the client wrote; None for a conversation or a prompt of token ids."""
    has: tuple[ChoicePosition, ...] = ()
    """What the client has of a stream that is continued, by choice."""

    calling: ToolCallReading | None = None
    """How calls in the answer's text are read; None: it is text alone."""
    reasoning: Reasoning | None = None
    """How what the model thinks is told from its answer; None: it is not."""

    @property
    def shown_ids(self) -> frozenset[int]:
        """Special tokens that whoever reads the text must see."""
        readers = (reader for reader in (self.calling, self.reasoning) if reader is not None)
        return frozenset().union(*(reader.shown_ids for reader in readers))

    @property
    def digest(self) -> bytes:
        """Equal for the same request in the same words, whichever router got it."""
        request = self.request
        return request_digest(
            request.prompt_token_ids,
            request.sampling,
            request.hash_root,
            request.num_choices,
            self.stops.strings,
            self.include_stop,
            self.skip_special_tokens,
            *(() if self.calling is None else (self.calling.use,)),
        )
