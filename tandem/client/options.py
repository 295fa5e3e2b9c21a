"""What a caller of the client may ask for. Whatever is None or empty is left to the server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

TemplateValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: str | None = None
    """Text of the JSON schema of its arguments, which are an object; None: it takes none."""
    strict: bool = False
    """Its arguments obey the schema also when the model itself decides to call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """How tools may be used: one that must be called, or some that may."""

    mode: Literal["none", "auto", "required"] | None = None
    function: str | None = None
    """The one that must be called; nothing else beside it."""
    allowed: Sequence[str] = ()
    """Names of those that may be called; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """What the model called."""

    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message of a conversation."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    """Of an assistant's turn; see `Choice.turn`."""
    tool_call_id: str | None = None
    """Of a turn of role tool: which call its content is the result of."""
    cached_for: Literal["5m", "1h"] | None = None
    """The conversation up to here stays cached for so long after its last use."""
    reasoning_content: str | None = None
    """What the model thought before an assistant's turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What every answer must be: one of these."""

    json_schema: str | None = None
    """Text of a JSON schema."""
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    """Lark as llguidance writes it, or GBNF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Everything about an answer but its prompt; bounds are the server's."""

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
    ignore_eos: bool | None = None
    seed: int | None = None
    num_logprobs: int | None = None
    """0: of the sampled tokens; k: of the k most likely as well."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    n: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    request_id: str | None = None
    structure: Structure | None = None
    prompt_logprobs: int | None = None
    """Of the prompt's tokens too; of each also so many of the most likely in its place."""
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Mapping[str, TemplateValue] = field(default_factory=dict)
    """Variables that the model's template reads."""
    continue_final_message: bool | None = None
    """The last turn is the assistant's, and the answer goes on with it."""
    cached_content: str | None = None
    """Name of what the conversation begins with."""
    best_of: int | None = None
    """Generate this many choices and return the `n` most likely."""
    vote: bool | None = None
    """Return one choice of `n`: the answer that most of them gave."""
    vote_pattern: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    timeout_s: float | None = None
    """For the whole answer, connecting again included; None: the server's own bound."""

    @property
    def can_be_continued(self) -> bool:
        """Whether a broken answer can be resumed; if not, the caller gets the error."""
        at_end = (self.prompt_logprobs, self.best_of, self.vote or None, self.use_beam_search or None)
        return all(option is None for option in at_end)


DEFAULT_OPTIONS = Options()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """PEM contents. Without a CA the system's own are trusted; certificate and key prove the client (mTLS)."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None
    """That the server's certificate bears, when it is not the one of the address."""
